"""Draws docs/planner.svg: how near the planner comes to its proven bounds, and what a window costs in randomness.

    python docs/planner_picture.py

Lengths are drawn: lognormal (6.5, 1.5), at most 16,384 tokens, which are hard to balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from drawing import legend, picture, plain

import multipack

HERE = Path(__file__).parent
RANKS, LONGEST = 8, 16_384
WINDOWS = (1, 2, 4, 8, 16, 32)
CAPACITIES = tuple(LONGEST * times // 2 for times in (2, 3, 4, 6, 8))
REACHED, BOUND, OTHER = "#0067a8", "#c2570c", "#72b7b2"


def reported(**options: Any) -> multipack.PlanReport:
    """The report of a plan with these options."""
    drawn = np.random.default_rng(0).lognormal(6.5, 1.5, 10_000)
    plan = multipack.plan(drawn.astype(int).clip(1, LONGEST), packs_per_step=RANKS, **options)
    return multipack.report(plan, RANKS)


def main() -> None:
    """Plan with several windows and capacities, and draw what is reached beside the bounds."""
    with picture("planner.svg", HERE, 1, 3, (9, 2.9)) as ((windows, order, capacities),):
        found = [reported(capacity=LONGEST, window=window) for window in WINDOWS]
        draw_balance(windows, WINDOWS, found)
        order.plot(WINDOWS, [each.displacement_p99 for each in found], "o-", color=REACHED)
        order.plot(WINDOWS, [each.displacement_median for each in found], "s-", color=OTHER)
        legend(order, {"99 % of documents": REACHED, "half of them": OTHER})
        for axes in (windows, order):
            axes.set_xscale("log", base=2)
            axes.set_xticks(WINDOWS, WINDOWS)
        draw_balance(capacities, CAPACITIES, [reported(capacity=capacity) for capacity in CAPACITIES])
        capacities.set_xticks(CAPACITIES, [f"{capacity // 1024}k" for capacity in CAPACITIES])
        plain(windows, f"share of time that {RANKS} ranks compute", "window, in steps")
        plain(order, "steps from the random order, at most", "window, in steps")
        plain(capacities, "the same with longer packs, window 4", "capacity, in tokens")
    print(f"wrote {HERE / 'planner.svg'}")


def draw_balance(axes: Any, at: Sequence[int], found: list[multipack.PlanReport]) -> None:
    """Balance reached, and its ceiling."""
    axes.plot(at, [each.cost_utilization for each in found], "o-", color=REACHED)
    axes.plot(at, [each.cost_utilization_ceiling for each in found], "--", color=BOUND)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0.88, 1.004)
    legend(axes, {"reached": REACHED, "proven ceiling": BOUND}, loc="lower right")


if __name__ == "__main__":
    main()
