"""Steps dealt to ranks: every number of ranks and sync, and a thousand ranks with a heavy-tailed mix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from multipack.planning.cost import CostModel
from multipack.planning.deal import least_step_cost, step_cost
from multipack.planning.plan import plan
from multipack.planning.report import kappa, report
from planning_tables.lengths import Integers, load, lognormal, sft_mix
from planning_tables.table import Table, cpu_seconds

FILL = 0.99


def thousand(quick: bool) -> Table:
    """One pack a rank on 1,024 ranks, with packs that may differ in tokens and with full packs."""
    ranks, steps = 1024, 1 if quick else 3
    columns = {
        "mean of a pack": ",", "capacity": ",", "seed": "", "steps": ",", "cost utilization": "%", "ceiling": "%",
        "share of it": "%", "CPU s a step": ".3f",
    }  # fmt: skip
    title = "1,024 ranks, one pack each: 99.89 % of mean 1 k tokens, 0.11 % of mean 37 k, at most 131,072"
    made = Table("thousand", title, columns)
    report(plan(sft_mix(30_000), capacity=131_072, packs_per_step=8, window=1), 8)  # compiles
    cost, share, slowest = 1.0, 1.0, 0.0
    for seed in range(1 if quick else 3):
        lengths = sft_mix(1_400_000, seed)
        longest = int(lengths.max())
        budget = int(1.05 * kappa(lengths, CostModel.from_shape().cost(lengths)) * longest)
        for mean, capacity in ((budget, budget * 11 // 10), (longest, longest)):
            enough = int(np.searchsorted(np.cumsum(lengths), FILL * steps * ranks * mean))
            start = time.process_time()
            epoch = plan(
                lengths[:enough], capacity=capacity, packs_per_step=ranks, budget=mean, window=1, seed=seed
            )
            for step in range(epoch.num_steps):
                epoch.deal(step, ranks)
            seconds = (time.process_time() - start) / epoch.num_steps
            found = report(epoch, ranks)
            reached, ceiling = found.cost_utilization, found.cost_utilization_ceiling
            made.row(mean, capacity, seed, epoch.num_steps, reached, ceiling, found.ceiling_reached, seconds)
            slowest = max(slowest, seconds)
            if mean == budget:
                cost = min(cost, reached)
            else:
                share = min(share, found.ceiling_reached)
    made.at_least("1,024 ranks, budget: cost utilization", cost, 0.9995, "%")
    made.at_least("1,024 ranks, C = Lmax: share of the ceiling", share, 0.999, "%")
    made.at_most("1,024 ranks: CPU s a step", slowest, 0.2, ".3f")
    made.notes.append("seconds: planning and dealing; budget: 1.05 · κ · Lmax, and a capacity of 1.1 of that")
    return made


def dealing_sets(documents: int) -> Iterator[tuple[str, Integers, int]]:
    """(name, lengths, capacity); a real set is repeated until it is large enough."""
    openchat = load("openchat_v1")
    if openchat is not None:
        yield "OpenChat V1", np.tile(openchat, -(-documents // len(openchat))), 32_768
    yield "lognormal (5.7, 1.0)", lognormal(4 * documents, 5.7, 1.0, 8192), 8192
    yield "code-like (6.5, 1.5)", lognormal(2 * documents, 6.5, 1.5, 32_768), 32_768
    yield "prose-like (8.0, 1.2)", lognormal(documents, 8.0, 1.2, 32_768), 32_768
    yield "SFT mix", sft_mix(20 * documents), 131_072


def table(quick: bool) -> Table:
    """P packs a step on P, P/2, P/4, P/8 and 3P/4 ranks, with sync once a step and at each micro-batch."""
    columns = {
        "lengths": "", "capacity": ",", "P": "", "W": "", "sync": "", "cost utilization": "%", "ceiling": "%",
        "share of it": "%", "CPU ms a step": ".1f",
    }  # fmt: skip
    made = Table("dealing", "Steps dealt to W ranks: cost utilization and its share of the ceiling", columns)
    worst, slowest = (2.0, ""), dict.fromkeys((64, 512), (0.0, ""))
    for packs, steps, documents in ((64, 4, 25_000),) if quick else ((64, 4, 25_000), (512, 2, 60_000)):
        for name, lengths, capacity in dealing_sets(documents):
            enough = int(np.searchsorted(np.cumsum(lengths), FILL * steps * packs * capacity))
            epoch = plan(lengths[:enough], capacity=capacity, packs_per_step=packs, window=1)
            costs = epoch.cost_model.cost(epoch.slots)
            for world in (packs, packs // 2, packs // 4, packs // 8, 3 * packs // 4):
                for sync in ("step", "micro"):
                    if world == packs and sync == "step":
                        continue  # one micro-batch: the same as micro
                    reached = least = 0
                    seconds = 0.0
                    epoch.deal(0, world, sync)  # compiles
                    for step in range(epoch.num_steps):
                        spent, dealt = cpu_seconds(partial(epoch.deal, step, world, sync), 2)
                        seconds += spent / epoch.num_steps
                        inside, each = dealt.order, epoch.micro_batches(world)
                        reached += step_cost(dealt.totals(costs), world, sync)
                        least += least_step_cost(
                            epoch.slots[inside], costs[inside], world, each, capacity, sync
                        )
                    even = int(costs[epoch.order].sum()) / world
                    utilization, ceiling = even / reached, min(1.0, even / least)
                    share, where = utilization / ceiling, f"{name}, P = {packs}, W = {world}, {sync}"
                    made.row(name, capacity, packs, world, sync, utilization, ceiling, share, 1e3 * seconds)
                    if sync == "step" or world == packs:
                        worst = min(worst, (share, where))
                    slowest[packs] = max(slowest[packs], (1e3 * seconds, where))
    made.at_least("dealing, one sync point a step: share of the ceiling", worst[0], 0.96, "%", worst[1])
    for packs, asked in ((64, 10), (512, 100)):
        made.at_most(
            f"dealing, P = {packs}: CPU ms a step", slowest[packs][0], asked, ".1f", slowest[packs][1]
        )
    made.notes.append("packs 99 % full on average")
    return made
