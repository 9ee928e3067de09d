"""Whole epochs of real and heavy-tailed lengths: steps, balance, and how far documents move."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial

import numpy as np

from multipack.planning.plan import Plan, plan
from multipack.planning.report import even, report
from planning_tables.lengths import ABSENT, Integers, heavy_sets, real_sets
from planning_tables.table import Table, cpu_seconds

CELLS = ((8, 8192), (8, 32_768), (64, 8192), (64, 32_768))
SEEDS = 3

COLUMNS = {
    "lengths": "", "packs": "", "capacity": ",", "window": "", "minimum": ",", "steps, most": ",",
    "filled at minimum": "%", "cost utilization": "%", "worst seed": "%", "ceiling": "%", "share of it, worst": "%",
    "spread": ".2f", "displacement p99": ".1f", "longest wait": "", "CPU ms": ".0f",
}  # fmt: skip


def _epoch(lengths: Integers, capacity: int, packs: int, window: int, seed: int) -> tuple[Plan, int]:
    """A plan with at most 200 of its steps dealt; and their number."""
    epoch = plan(lengths, capacity=capacity, packs_per_step=packs, window=window, seed=seed)
    steps = even(epoch.num_steps, 200)
    for step in steps.tolist():
        epoch.deal(step, packs)
    return epoch, len(steps)


def _table(name: str, title: str, sets: Iterable[tuple[str, Integers, int, int]], quick: bool) -> Table:
    """Plan, report and tabulate every set with every window; the ranks are the packs of a step."""
    made = Table(name, title, COLUMNS)
    waits: list[tuple[float, str]] = []
    _epoch(np.arange(1, 500), 8192, 8, 4, 0)  # compiles
    for lengths_name, lengths, packs, capacity in sets:
        for window in (4,) if quick else (1, 4, 16):
            found, seconds = [], []
            for seed in range(1 if quick else SEEDS):
                spent, (epoch, dealt) = cpu_seconds(
                    partial(_epoch, lengths, capacity, packs, window, seed), 1
                )
                seconds.append(spent)
                found.append(report(epoch, packs, sample=dealt))
            steps, minimum = max(each.steps for each in found), found[0].minimum_steps
            cost = statistics.mean(each.cost_utilization for each in found)
            spreads = [each.mean_length_spread for each in found if each.mean_length_spread is not None]
            wait = max(each.longest_wait for each in found)
            made.row(
                lengths_name, packs, capacity, window, minimum, steps,
                found[0].tokens / (minimum * packs * capacity),
                cost,
                min(each.cost_utilization for each in found),
                statistics.mean(each.cost_utilization_ceiling for each in found),
                min(each.ceiling_reached for each in found),
                statistics.mean(spreads) if spreads else None,
                max(each.displacement_p99 for each in found),
                wait,
                1e3 * statistics.median(seconds),
            )  # fmt: skip
            waits.append((wait / window, f"{lengths_name}, {packs} packs, {capacity:,}, window {window}"))
    if waits:
        made.at_most(f"{name}: steps of waiting over the window", max(waits)[0], 2, ".2f", max(waits)[1])
    made.notes.append(
        "minimum: proven; filled at minimum: the most that keeping every document allows; spread: of the steps' mean"
        " lengths over that of random steps; longest wait: steps from the first that trains a later document to a"
        " document's own; CPU: planning, and dealing up to 200 steps"
    )
    return made


def real(quick: bool) -> Table:
    """Real lengths of short documents."""
    sets = list(real_sets())
    cases = ((name, x, packs, capacity) for packs, capacity in CELLS for name, x in sets)
    made = _table("real", f"Real lengths, one pack a rank, {1 if quick else SEEDS} seeds", cases, quick)
    made.notes += [] if sets else [ABSENT]
    return made


def heavy(quick: bool) -> Table:
    """Lengths with heavy tails, cut to the capacity."""
    cases = (
        (name, x, packs, capacity)
        for packs, capacity in CELLS
        for name, x in heavy_sets(capacity)
        if not (name.startswith("lognormal") and capacity > 8192)
    )
    title = f"Heavy tails cut to the capacity, one pack a rank, {1 if quick else SEEDS} seeds"
    made = _table("heavy", title, cases, quick)
    made.notes.append(
        "Python files: a quarter of each file's bytes in the standard library of this Python; the others are lognormal"
        " (mean and σ of the logarithm), clipped; a fifth of prose-like documents is as long as a pack of 8,192"
    )
    return made
