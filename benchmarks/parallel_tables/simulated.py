"""Simulated steps of many ranks, which wait for the slowest one, with measured seconds of packs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from multipack.planning.cost import CostModel
from multipack.planning.deal import least_step_cost, rank_loads
from multipack.planning.options import Sync
from multipack.planning.packing import Packs
from multipack.planning.plan import Plan, plan
from multipack.planning.report import even
from planning_tables.lengths import Integers, load, lognormal
from planning_tables.table import Table

MICRO_BATCHES = 4
RANKS = (8, 64, 256, 1024)
SYNCS: dict[Sync, str] = {"step": "each step", "micro": "each micro-batch"}
STEPS = 2
MICRO_BATCH, TOKEN, PAIR, DOCUMENT = 37.08e-3, 282.67e-6, 177.99e-9, 79.3e-6
"""Seconds of a micro-batch, per token, per l(l + 1) and per document: fitted to timed packs of a decoder of the preset
`small` on a CPU, one thread, fp32 (error 3.7 %)."""
COST = CostModel(None, round(TOKEN / PAIR), 1, constant=round(DOCUMENT / PAIR))
"""The same as a cost of documents, of which the time of a micro-batch is no part."""


@dataclass(frozen=True)
class Found:
    """Seconds of a step over those of perfect balance: all packs' seconds divided evenly among the ranks.

    Attributes:
        own: as the plan deals it.
        least: lower bound for any arrangement of these documents into as many packs, for the plan's cost.
        dealt: the plan's packs, dealt to ranks at random.
        seconds: CPU seconds of dealing.
    """

    own: float
    least: float
    dealt: float
    seconds: float


def table(quick: bool) -> Table:
    """Step time over perfect balance, from 8 to 1,024 ranks."""
    made = Table(
        "simulated",
        f"step time over perfect balance, {MICRO_BATCHES} packs per rank, means of up to {STEPS} steps",
        dict.fromkeys(("documents", "sync point"), "")
        | dict.fromkeys(("capacity", "ranks"), ",")
        | {"plan": ".4f", "lower bound": ".4f", "random ranks": ".3f", "CPU s to deal": ".2f"},
    )
    for ranks in RANKS[:2] if quick else RANKS:
        for name, lengths, capacity in _sets(ranks):
            epoch = _few_steps(lengths, capacity, ranks)
            for sync, when in SYNCS.items():
                steps = even(epoch.num_steps - 1, STEPS)
                found = [vars(arranged(epoch, int(step), ranks, sync)) for step in steps]
                means = [float(np.mean([each[key] for each in found])) for key in found[0]]
                made.row(name, when, capacity, ranks, *means)
    made.notes += [
        f"seconds of a pack: {1e3 * MICRO_BATCH:.2f} ms + {1e6 * TOKEN:.2f} µs per token +"
        f" {1e9 * PAIR:.2f} ns per l(l + 1) + {1e6 * DOCUMENT:.1f} µs per document, fitted to timed packs of a decoder"
        " of the preset `small` on a CPU (error 3.7%)",
        "sync point: each step with ddp and zero1; each micro-batch with zero2, zero3 and hsdp, which gather"
        " parameters, and with pipelines, whose stages run in lockstep",
        "lower bound: of any arrangement of the step's documents in as many packs. Where it is well above 1, the"
        " longest documents dominate; plan.budget helps",
        "random ranks: the plan's packs, assigned to ranks and micro-batches at random",
    ]
    return made


def seconds_of(packs: Packs, slots: Integers) -> np.ndarray:
    """(packs,) seconds of each pack of documents with these slots, as a micro-batch; none if it is empty."""
    pairs = packs.totals(slots * (slots + 1))
    made = TOKEN * packs.totals(slots) + PAIR * pairs + DOCUMENT * packs.sizes()
    return np.where(packs.sizes() > 0, MICRO_BATCH + made, 0.0)


def arranged(epoch: Plan, step: int, ranks: int, sync: Sync) -> Found:
    """One step, dealt by the plan and at random."""
    slots, costs = epoch.slots, COST.cost(epoch.slots)
    began = time.process_time()
    dealt = epoch.deal(step, ranks, sync)
    seconds = time.process_time() - began
    perfect = seconds_of(dealt, slots).sum() / ranks
    micro_batches = len(dealt) // ranks
    documents = epoch.documents(step)
    bound = least_step_cost(slots[documents], costs[documents], ranks, micro_batches, epoch.capacity, sync)
    always = MICRO_BATCH * micro_batches  # no part of the cost
    least = always + (perfect - always) * max(1.0, bound * ranks / int(costs[documents].sum()))
    anywhere = shuffled(epoch.packs(step), ranks, np.random.default_rng(step))
    own, random = (
        float(rank_loads(seconds_of(packs, slots), ranks, sync).max(axis=1).sum())
        for packs in (dealt, anywhere)
    )
    return Found(own / perfect, least / perfect, random / perfect, seconds)


def shuffled(packs: Packs, ranks: int, draw: np.random.Generator) -> Packs:
    """The same packs in random places, empty ones added until ranks have equally many."""
    places = draw.permutation(-(-len(packs) // ranks) * ranks).tolist()
    found = [packs[place] if place < len(packs) else packs.order[:0] for place in places]
    return Packs(np.concatenate(found), np.cumsum([0, *map(len, found)]).astype(np.int64))


def _sets(ranks: int) -> list[tuple[str, Integers, int]]:
    """Name, lengths, capacity: real ones where there are enough for a step, and drawn ones."""
    found = []
    for name in ("instructlab_sdg_24k", "natural_instructions_193k"):
        lengths = load(name)
        if lengths is not None and lengths.sum() > 1.2 * ranks * MICRO_BATCHES * 4096:
            found.append((name, np.minimum(lengths, 4096), 4096))
            break
    drawn = lognormal(int(3 * ranks * MICRO_BATCHES * 16_384 / 2000), 6.5, 1.5, 16_384)
    return [*found, ("lognormal (6.5, 1.5)", drawn, 16_384)]


def _few_steps(lengths: Integers, capacity: int, ranks: int) -> Plan:
    """A plan of the first documents of a seeded order: as many as fill `STEPS` steps and begin another."""
    order = np.random.default_rng(0).permutation(lengths)
    packs = ranks * MICRO_BATCHES
    enough = int(np.searchsorted(np.cumsum(order), (STEPS + 0.2) * packs * capacity)) + 1
    return plan(order[:enough], capacity=capacity, packs_per_step=packs, cost=COST, window=2)
