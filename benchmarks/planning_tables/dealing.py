"""Steps dealt to ranks: every world and way to meet, and a thousand ranks with a heavy-tailed mix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from multipack.planning import report as measure
from multipack.planning.ceiling import kappa, least_step_cost
from multipack.planning.cost import CostModel
from multipack.planning.deal import objective
from multipack.planning.options import Sync
from multipack.planning.plan import Plan, plan
from planning_tables.lengths import Integers, load, lognormal, sft_mix
from planning_tables.table import Table, cpu_seconds

FILL = 0.99


def thousand(quick: bool) -> Table:
    """One pack a rank on 1,024 ranks, with packs that may differ in tokens and with full packs."""
    ranks = 1024
    made = Table(
        "thousand",
        "1,024 ranks, one pack each: 99.89 % of mean 1 k tokens, 0.11 % of mean 37 k, at most 131,072",
        {
            "mean of a pack": ",",
            "capacity": ",",
            "seed": "",
            "steps": ",",
            "documents a step": ",.0f",
            "cost utilization": "%",
            "ceiling": "%",
            "share of it": "%",
            "tokens, most / mean": ".3f",
            "CPU s a step": ".3f",
        },
    )
    warm = plan(sft_mix(30_000), capacity=131_072, packs_per_step=8, window=1)
    measure.report(warm, 8)
    worst: dict[str, dict[str, float]] = {}
    for seed in range(1 if quick else 3):
        steps = 1 if quick else 3
        lengths = sft_mix(1_400_000, seed)
        longest = int(lengths.max())
        budget = int(1.05 * kappa(lengths, CostModel.from_shape().cost(lengths)) * longest)
        for name, mean, capacity in (("budget", budget, budget * 11 // 10), ("C = Lmax", longest, longest)):
            enough = int(np.searchsorted(np.cumsum(lengths), FILL * steps * ranks * mean))
            start = time.process_time()
            epoch = plan(
                lengths[:enough],
                capacity=capacity,
                packs_per_step=ranks,
                budget=mean,
                window=1,
                seed=seed,
            )
            for step in range(epoch.num_steps):
                epoch.deal(step, ranks)
            seconds = (time.process_time() - start) / epoch.num_steps
            report = measure.report(epoch, ranks)
            made.row(
                mean,
                capacity,
                seed,
                epoch.num_steps,
                epoch.num_documents / epoch.num_steps,
                report.cost_utilization,
                report.cost_utilization_ceiling,
                report.ceiling_reached,
                1 / report.utilization,
                seconds,
            )
            found = worst.setdefault(name, {"cost": 1.0, "share": 1.0, "seconds": 0.0})
            found["cost"] = min(found["cost"], report.cost_utilization)
            found["share"] = min(found["share"], report.ceiling_reached)
            found["seconds"] = max(found["seconds"], seconds)
    made.at_least("1,024 ranks, budget: cost utilization", worst["budget"]["cost"], 0.9995, "%")
    made.at_least("1,024 ranks, C = Lmax: share of the ceiling", worst["C = Lmax"]["share"], 0.999, "%")
    for name, found in worst.items():
        made.at_most(f"1,024 ranks, {name}: CPU s a step", found["seconds"], 0.2, ".3f")
    made.notes.append("seconds: planning and dealing; budget: 1.05 · κ · Lmax, and a capacity of 1.1 of that")
    return made


def dealing_sets(documents: int) -> Iterator[tuple[str, Integers, int]]:
    """(name, lengths, capacity); a real set is repeated until it is large enough."""
    openchat = load("openchat_v1")
    if openchat is not None:
        yield "OpenChat V1", np.tile(openchat, -(-documents // len(openchat))), 32_768
    yield "lognormal (5.7, 1.0)", lognormal(4 * documents, 5.7, 1.0, 8192), 8192
    yield "mail-like (5.0, 1.3)", lognormal(20 * documents, 5.0, 1.3, 32_768), 32_768
    yield "code-like (6.5, 1.5)", lognormal(2 * documents, 6.5, 1.5, 32_768), 32_768
    yield "prose-like (8.0, 1.2)", lognormal(documents, 8.0, 1.2, 32_768), 32_768
    yield "SFT mix", sft_mix(20 * documents), 131_072


def few_steps(lengths: Integers, capacity: int, packs: int, steps: int) -> Plan:
    """Random steps of these documents, their packs 99 % full in the mean."""
    enough = int(np.searchsorted(np.cumsum(lengths), FILL * steps * packs * capacity))
    if enough == len(lengths):
        raise ValueError(f"{len(lengths):,} documents do not fill {steps} steps of {packs} × {capacity:,}")
    return plan(lengths[:enough], capacity=capacity, packs_per_step=packs, window=1)


def table(quick: bool) -> Table:
    """P packs a step on P, P/2, P/4, P/8 and 3P/4 ranks, meeting once a step and at each micro-batch."""
    made = Table(
        "dealing",
        "Steps dealt to W ranks: cost utilization and its share of what no arrangement beats",
        {
            "lengths": "",
            "capacity": ",",
            "P": "",
            "W": "",
            "sync": "",
            "cost utilization": "%",
            "ceiling": "%",
            "share of it": "%",
            "worst step": "%",
            "CPU ms a step": ".1f",
        },
    )
    worst = {"step": (2.0, ""), "step, 4 or more": (2.0, ""), "micro": (2.0, "")}
    slowest: dict[int, tuple[float, str]] = {}
    costs_of = CostModel.from_shape().cost
    for packs in (64,) if quick else (64, 512):
        steps = 4 if packs == 64 else 2
        for name, lengths, capacity in dealing_sets(25_000 if packs == 64 else 60_000):
            epoch = few_steps(lengths, capacity, packs, steps)
            costs = costs_of(lengths)
            for world in (packs, packs // 2, packs // 4, packs // 8, 3 * packs // 4):
                for sync in ("step", "micro"):
                    if world == packs and sync == "step":
                        continue  # one micro-batch: the same as micro
                    found = _deal(epoch, costs, world, sync)
                    utilization, ceiling, share, least, milliseconds = found
                    made.row(
                        name, capacity, packs, world, sync, utilization, ceiling, share, least, milliseconds
                    )
                    where = f"{name}, P = {packs}, W = {world}"
                    micro_batches = -(-packs // world)
                    keys = ["step"] if sync == "step" or micro_batches == 1 else []
                    if sync == "step" and micro_batches >= 4 and capacity <= 32_768:
                        keys.append("step, 4 or more")
                    if sync == "micro" and packs % world == 0 and capacity <= 32_768:
                        keys.append("micro")
                    for key in keys:
                        worst[key] = min(worst[key], (share, where))
                    slowest[packs] = max(slowest.get(packs, (0.0, "")), (milliseconds, f"{where}, {sync}"))
    for key, asked, title in (
        ("step", 0.97, "dealing, step: share of the bound"),
        ("step, 4 or more", 0.995, "dealing, step, ⌈P/W⌉ ≥ 4, C ≤ 32 k: share of the bound"),
        ("micro", 0.975, "dealing, micro, W divides P, C ≤ 32 k: share of the bound"),
    ):
        made.at_least(title, worst[key][0], asked, "%", note=worst[key][1])
    for packs, (milliseconds, where) in slowest.items():
        asked = 10 if packs == 64 else 100
        made.at_most(f"dealing, P = {packs}: CPU ms a step", milliseconds, asked, ".1f", note=where)
    made.notes.append(
        "shares are over all steps of a row, and of its worst step; packs 99 % full in the mean"
    )
    return made


def _deal(epoch: Plan, costs: Integers, world: int, sync: Sync) -> tuple[float, float, float, float, float]:
    """Cost utilization, its ceiling, the share reached, that of the worst step; CPU milliseconds of a step."""
    micro_batches = epoch.micro_batches(world)
    reached, least, total, seconds = [], [], 0, []
    epoch.deal(0, world, sync)  # compiles
    for step in range(epoch.num_steps):
        spent, dealt = cpu_seconds(partial(epoch.deal, step, world, sync), 2)
        seconds.append(spent)
        reached.append(objective(dealt.totals(costs), world, sync))
        documents = dealt.order
        least.append(
            least_step_cost(
                epoch.slots[documents], costs[documents], world, micro_batches, epoch.capacity, sync
            )
        )
        total += int(costs[documents].sum())
    even = total / world
    worst = min(bound / value for bound, value in zip(least, reached, strict=True))
    ceiling = min(1.0, even / sum(least))
    return (
        even / sum(reached),
        ceiling,
        even / sum(reached) / ceiling,
        worst,
        1e3 * sum(seconds) / len(seconds),
    )
