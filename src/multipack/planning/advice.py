"""`advise`: what limits the balance of a plan, and which other settings raise it.

A step whose longest document costs more than a rank's share has a low ceiling (κ: see `report.kappa`). Four changes
raise it: more tokens a rank, fewer sync points, both, or that document shared by several ranks. Each is tried on the
plan's own documents, from several places of the epoch, with the bound that the ceiling itself uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from multipack.planning.deal import least_step_cost
from multipack.planning.lengths import Integers
from multipack.planning.options import Sync
from multipack.planning.plan import Plan
from multipack.planning.report import PlanReport

ENOUGH = 0.99
"""No advice where the ceiling is at least this."""

_PLACES = 8  # places of the epoch at which a proposal is tried
_WORTH = 0.005  # least gain of a proposal that is reported
_MARGIN = 1.05  # proposed budget over κ · Lmax
_ROOM = 1.1  # capacity over budget, so that packs can differ in tokens
_GROUPED = 3.0  # spread of the steps' mean lengths above which grouping is reported


def advise(made: Plan, found: PlanReport) -> list[str]:
    """Sentences on what limits the balance of a plan and what would raise it; settings as the command line takes them.

    Args:
        made: any plan.
        found: its report, for a number of ranks.
    """
    sentences = _on_ceiling(made, found) if found.cost_utilization_ceiling < ENOUGH else []
    spread = found.mean_length_spread
    if spread is None or spread <= _GROUPED or made.options.order == "given" or not made.options.group:
        return sentences
    effect = "at a lower cost utilization"
    if found.data_parallel_size == 1:
        effect = "and with one rank grouping has no benefit"
    return [
        *sentences,
        f"documents of similar length share steps: mean lengths spread {spread:.1f} times as far as over random ones;"
        f" plan.group=false keeps steps random, {effect}",
    ]


def _on_ceiling(made: Plan, found: PlanReport) -> list[str]:
    """Sentences on the limit of the ceiling, and on every change that raises it."""
    world, sync, ceiling = found.data_parallel_size, found.sync, found.cost_utilization_ceiling
    each, packs, factor = made.micro_batches(world), made.packs_per_step, found.kappa
    slots = made.slots[made.order]
    costs = made.costs(made.order)
    tokens, longest, runs = int(slots.sum()), int(slots.max()), world * each
    share = int(costs.sum()) / (made.num_steps * (world if sync == "step" else runs))
    mean = -(-tokens // (made.num_steps * runs))  # tokens of a pack that a rank runs
    sentences = [
        f"no arrangement of these steps exceeds {ceiling:.1%}: the longest document ({longest:,} tokens) costs"
        f" {int(costs.max()) / share:.2f} times a rank's mean share, and its tokens κ = {factor:.2f} times"
        " the mean token"
    ]

    def add(what: str, reached: float | None) -> None:
        if reached is not None and reached >= ceiling + _WORTH:
            sentences.append(what.format(f"raises the ceiling to {reached:.1%}"))

    if packs % world:
        what = f"plan.packs_per_step={runs} instead of {packs} (a multiple of the {world} ranks) {{}}"
        add(what, _ceiling(made, world, -(-tokens // (made.num_steps * packs)), each, sync))
    budget = round_up(_MARGIN * factor * longest)
    if budget > mean:
        capacity = round_up(_ROOM * budget)
        filled = tokens / (packs * capacity * -(-tokens // (packs * budget)))
        now = tokens / (made.num_steps * packs * made.capacity)
        what = (
            f"plan.capacity={capacity} plan.budget={budget} (packs of κ times the longest document on average;"
            f" {budget / mean:.1f} times the tokens of a step) {{}}, at a packing efficiency of {filled:.1%} instead of"
            f" {now:.1%}"
        )
        add(what, _ceiling(made, world, budget, each, sync, capacity))
    if sync != "step" and each > 1:
        what = "sync=step (ranks wait once a step: DDP, ZeRO-1/2) instead of a sync point at every micro-batch {}"
        add(what, _ceiling(made, world, mean, each, "step"))
    more = -(-budget // mean)
    if more > each:
        what = (
            f"{'sync=step ' if sync != 'step' else ''}plan.packs_per_step={world * more} instead of {packs}"
            f" ({more} micro-batches a rank; {more / each:.1f} times the tokens of a step) {{}}"
        )
        add(what, _ceiling(made, world, mean, more, "step"))
    limit = int(slots[costs <= share].max(initial=0))
    if 0 < limit < longest:  # at 0 every document costs more than a mean share: too few, not too long
        what = (
            f"context parallelism for the {np.count_nonzero(slots > limit):,} documents longer than {limit:,}"
            " tokens, each of which costs more than a rank's mean share (the longest over"
            f" {math.ceil(costs.max() / share)} ranks), {{}}"
        )
        add(what, _ceiling(made, world, mean, each, sync, share=share))
    return sentences


def _ceiling(
    made: Plan,
    world: int,
    budget: int,
    each: int,
    sync: Sync,
    capacity: int | None = None,
    share: float | None = None,
) -> float | None:
    """The ceiling with packs of `budget` tokens, `each` of them a rank; None if the plan fills no such step.

    Documents that cost more than `share` are divided into equal parts, as context parallelism does.
    """
    cost = least = 0
    for documents in _groups(made, budget * world * each):
        slots, costs = made.slots[documents], made.costs(documents)
        if share is not None:
            parts = np.maximum(np.ceil(costs / share), 1).astype(np.int64)
            slots, costs = np.repeat(-(-slots // parts), parts), np.repeat(costs // parts, parts)
        cost += int(costs.sum())
        least += least_step_cost(slots, costs, world, each, capacity or made.capacity, sync)
    return min(1.0, cost / (world * least)) if least else None


def _groups(made: Plan, tokens: int) -> Iterator[Integers]:
    """Item numbers of neighbors in the plan with this many slots together, at evenly spaced places."""
    ends = np.cumsum(made.slots[made.order])
    free = int(ends[-1]) - tokens
    if free < 0:
        return
    places = min(_PLACES, made.num_steps)
    for place in range(places):
        first = int(np.searchsorted(ends, free * place // max(places - 1, 1), side="right"))
        last = int(np.searchsorted(ends, (int(ends[first - 1]) if first else 0) + tokens, side="right"))
        yield made.order[first : max(last, first + 1)]


def round_up(tokens: float) -> int:
    """The next number of tokens with five significant binary digits: 35,002 → 36,864."""
    whole = int(np.ceil(tokens))
    unit = 1 << max(whole.bit_length() - 5, 0)
    return -(-whole // unit) * unit
