"""Whole epochs of real, heavy-tailed and adversarial lengths: steps, balance, and how far documents move."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from multipack.planning import report as measure
from multipack.planning.order import permutation
from multipack.planning.packing import pack
from multipack.planning.plan import Plan, plan
from multipack.planning.report import PlanReport
from planning_tables.lengths import ABSENT, Integers, bimodal, heavy_sets, real_sets, uniform
from planning_tables.packing import checked
from planning_tables.table import Table, cpu_seconds

CELLS = ((8, 8192), (8, 32_768), (64, 8192), (64, 32_768))
SEEDS = 3
COLUMNS = {
    "lengths": "",
    "packs": "",
    "capacity": ",",
    "window": "",
    "minimum": ",",
    "steps, most": ",",
    "filled at minimum": "%",
    "cost utilization": "%",
    "worst seed": "%",
    "ceiling": "%",
    "share of it, worst": "%",
    "spread": ".2f",
    "displacement p99": ".1f",
    "longest wait": "",
    "CPU ms": ".0f",
}


@dataclass(frozen=True)
class Cell:
    """One set, packs a step, capacity and window, over some seeds."""

    where: str
    window: int
    minimum: int
    steps: int
    worst_cost: float
    worst_share: float
    spread: float | None
    wait: int


def cells(made: Table, sets: Iterator[tuple[str, Integers, int, int]], quick: bool) -> list[Cell]:
    """Plan, report and tabulate every set with every window; the ranks are the packs of a step."""
    found = []
    windows, seeds = ((1, 16), 1) if quick else ((1, 4, 16), SEEDS)
    for name, lengths, packs, capacity in sets:
        for window in windows:
            reports, seconds, wait = [], [], 0
            for seed in range(seeds):
                spent, (epoch, dealt) = cpu_seconds(
                    partial(_epoch, lengths, capacity, packs, window, seed), 1
                )
                seconds.append(spent)
                reports.append(measure.report(epoch, packs, sample=dealt))
                wait = max(wait, int(waits(epoch).max()))
            median = statistics.median(seconds)
            found.append(_cell(made, name, packs, capacity, window, reports, wait, median))
    return found


def _epoch(lengths: Integers, capacity: int, packs: int, window: int, seed: int) -> tuple[Plan, int]:
    """A plan, all or up to 200 of its steps dealt; and how many were."""
    epoch = plan(lengths, capacity=capacity, packs_per_step=packs, window=window, seed=seed)
    steps = measure.even(epoch.num_steps, 200)
    for step in steps.tolist():
        epoch.deal(step, packs)
    return epoch, len(steps)


def _cell(
    made: Table,
    name: str,
    packs: int,
    capacity: int,
    window: int,
    reports: list[PlanReport],
    wait: int,
    seconds: float,
) -> Cell:
    minimum = reports[0].minimum_steps
    spreads = [each.mean_length_spread for each in reports if each.mean_length_spread is not None]
    cost = [each.cost_utilization for each in reports]
    cell = Cell(
        where=f"{name}, {packs} packs, {capacity:,}",
        window=window,
        minimum=minimum,
        steps=max(each.steps for each in reports),
        worst_cost=min(cost),
        worst_share=min(each.ceiling_reached for each in reports),
        spread=statistics.mean(spreads) if spreads else None,
        wait=wait,
    )
    made.row(
        name,
        packs,
        capacity,
        window,
        minimum,
        cell.steps,
        reports[0].tokens / (minimum * packs * capacity),
        statistics.mean(cost),
        cell.worst_cost,
        statistics.mean(each.cost_utilization_ceiling for each in reports),
        cell.worst_share,
        cell.spread,
        max(each.displacement_p99 for each in reports),
        wait,
        1e3 * seconds,
    )
    return cell


def _excess(found: list[Cell], most: int, share: float, made: Table, title: str) -> None:
    """Ask that no cell has more steps than the minimum and the larger of a number and a share of it."""
    cell = max(found, key=lambda each: each.steps - each.minimum - max(most, share * each.minimum))
    bound = cell.minimum + max(most, share * cell.minimum)
    note = f"{cell.where}, minimum {cell.minimum:,}"
    made.at_most(title, cell.steps, bound, ",.0f", note=note)


def _promise(found: list[Cell], made: Table, title: str) -> None:
    """Ask that nobody waited for longer than any window allows."""
    cell = max(found, key=lambda each: each.wait - longest_wait(each.window))
    note = f"{cell.where}, window {cell.window}"
    made.at_most(f"{title}: steps of waiting", cell.wait, longest_wait(cell.window), note=note)


def real(quick: bool) -> Table:
    """Real lengths of short documents."""
    made = Table("real", f"Real lengths, one pack a rank, {1 if quick else SEEDS} seeds", COLUMNS)
    sets = list(real_sets())
    if not sets:
        made.notes.append(ABSENT)
        return made
    _epoch(sets[0][1][:500], 8192, 8, 4, 0)  # compiles
    cases = ((name, x, packs, capacity) for name, x in sets for packs, capacity in CELLS)
    found = cells(made, cases, quick)
    one = [each for each in found if each.window == 1]
    wide = [each for each in found if each.window == 16]
    _excess(one, 1, 0.002, made, "real, window 1: steps, minimum + max(1, 0.2 %)")
    least = min(one, key=lambda each: each.worst_cost)
    made.at_least("real, window 1: cost utilization", least.worst_cost, 0.997, "%", note=least.where)
    _excess(wide, 1, 0.0, made, "real, window 16: steps, minimum + 1")
    least = min(wide, key=lambda each: each.worst_cost)
    made.at_least("real, window 16: cost utilization", least.worst_cost, 0.9995, "%", note=least.where)
    spread, where = max((each.spread, each.where) for each in wide if each.spread is not None)
    made.at_most("real, window 16: spread", spread, 1.2, ".2f", note=where)
    _promise(found, made, "real, window promise")
    made.notes.append(
        "minimum: proven; filled at minimum: the most that keeping every document allows; spread: of the steps'"
        " mean lengths over that of random steps, mean over seeds; CPU: planning, and dealing up to 200 steps"
    )
    return made


def heavy(quick: bool) -> Table:
    """Lengths with heavy tails, cut to the capacity."""
    made = Table(
        "heavy", f"Heavy tails cut to the capacity, one pack a rank, {1 if quick else SEEDS} seeds", COLUMNS
    )
    _epoch(np.arange(1, 500), 8192, 8, 4, 0)
    cases = (
        (name, x, packs, capacity)
        for packs, capacity in CELLS
        for name, x in heavy_sets(capacity)
        if not (name.startswith("lognormal") and capacity > 8192)
    )
    found = cells(made, cases, quick)
    for window, share in ((1, 0.985), (16, 0.995)):
        for kind in ("real", "drawn"):
            some = [
                each
                for each in found
                if each.window == window and ("(real)" in each.where) == (kind == "real")
            ]
            least = min(some, key=lambda each: each.worst_share)
            title = f"heavy tails ({kind}), window {window}"
            made.at_least(f"{title}: share of the ceiling", least.worst_share, share, "%", note=least.where)
            _excess(some, 2, 0.002, made, f"{title}: steps, minimum + max(2, 0.2 %)")
    _promise(found, made, "heavy tails, window promise")
    made.notes.append(
        "Python files: a quarter of each file's bytes in the standard library of the Python that runs this;"
        " the others are lognormal (mean and σ of the logarithm), clipped, and held to what is asked of real ones;"
        " a fifth of prose-like documents is as long as a pack of 8,192"
    )
    return made


def longest_wait(window: int) -> int:
    """Steps that a document waits at most, after the first that trained one of a later place: see planning/epoch.py."""
    return 3 * max(window, 2) - 1


def waits(epoch: Plan) -> Integers:
    """(documents,) steps from the first that trained a document of the same or a later place in the order."""
    position = np.empty(len(epoch.lengths), dtype=np.int64)
    position[permutation(epoch.seed, epoch.epoch, len(position))] = np.arange(len(position))
    places = position[epoch.order]
    first = epoch.pack_offsets[epoch.step_offsets[:-1]]
    reached = np.maximum.accumulate(np.maximum.reduceat(places, first))
    step = np.repeat(np.arange(epoch.num_steps), np.diff(epoch.pack_offsets[epoch.step_offsets]))
    return step - np.searchsorted(reached, places)


def adversarial(quick: bool) -> Table:
    """Sets that packers fail on, eight packs of 8,192 a step: one at least fills no pack well."""
    documents, capacity, packs = 20_000, 8192, 8
    made = Table(
        "adversarial",
        "Adversarial sets: 20,000 documents, capacity 8,192, eight packs a step, window 4",
        {
            "": "",
            "documents": ",",
            "packs, best fit": ",",
            "token bound": ",",
            "asked": ",",
            "steps": ",",
            "minimum": ",",
            "displacement p99": ".1f",
            "its most": ".1f",
            "longest wait": "",
            "CPU s": ".3f",
        },
    )
    spread = uniform(documents, capacity)
    short_long = bimodal(documents, capacity)

    def over_bound(lengths: Integers, ratio: float) -> int:
        return int(ratio * -(-int(lengths.sum()) // capacity))

    sets: dict[str, tuple[Integers, int, int]] = {
        "half a pack and one": (np.full(documents, capacity // 2 + 1), packs, documents),
        "ones": (np.ones(documents, dtype=np.int64), packs, 3),
        "whole packs": (np.full(2000, capacity), packs, 2000),
        "uniform 1 … capacity": (spread, packs, over_bound(spread, 10_106 / 10_011)),
        "bimodal": (short_long, packs, over_bound(short_long, 2_220 / 2_215)),
        "uniform, one rank": (spread, 1, over_bound(spread, 10_106 / 10_011)),
        "one document": (np.array([capacity]), packs, 1),
    }
    _epoch(np.arange(1, 500), capacity, packs, 4, 0)
    pack(np.arange(1, 500), capacity)
    total, longest = 0.0, (0, "")
    for name, (lengths, per_step, asked) in sets.items():
        packing, packed = cpu_seconds(partial(pack, lengths, capacity), 1)
        planning, epoch = cpu_seconds(
            partial(plan, lengths, capacity=capacity, packs_per_step=per_step, window=4), 1
        )
        checked(packed, lengths, capacity)
        total += packing + planning
        report = measure.report(epoch, per_step, sample=20)
        wait = int(waits(epoch).max())
        bound = -(-int(lengths.sum()) // capacity)
        made.row(
            name,
            len(lengths),
            len(packed),
            bound,
            asked,
            epoch.num_steps,
            report.minimum_steps,
            report.displacement_p99,
            report.displacement_max,
            wait,
            packing + planning,
        )
        made.at_most(f"adversarial, {name}: packs", len(packed), asked)
        longest = max(longest, (wait, name))
    made.at_most("adversarial, all sets: CPU s of packing and planning", total, 2.0, ".2f")
    made.at_most(
        "adversarial, window promise: steps of waiting", longest[0], longest_wait(4), note=longest[1]
    )
    made.notes.append(
        "uniform and bimodal are drawn here; what is asked of them is the ratio to the token bound that was"
        " asked of other draws (10,106 / 10,011 and 2,220 / 2,215)"
    )
    made.notes.append(
        "longest wait: steps between the first that trained a document at the same or a later place in the order and"
        " a document's own. The window promise: passed over by two blocks of 4 steps at most, so 11 steps"
    )
    made.notes.append(
        "displacement: from an even cut of the order, which full packs of such lengths cannot follow"
    )
    return made
