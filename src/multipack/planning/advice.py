"""What would lift a low ceiling, and how far: told in sentences, each with the ceiling of what it proposes.

Four ways out of a step whose longest document costs more than a rank's share (κ: see `ceiling.kappa`):
more tokens a rank, ranks that meet less often, both, or that document shared by several ranks. Each is tried on the
plan's own documents, from several places of the epoch, with the same bound as the ceiling itself. Settings stand
in the sentences as the command line takes them; `plan` calls those of `plan.` by the same names.

Where documents of like length share steps, what random steps would cost is estimated on a part of the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multipack.planning.ceiling import kappa, least_step_cost
from multipack.planning.deal import meetings
from multipack.planning.order import keys

if TYPE_CHECKING:
    from multipack.planning.options import Sync
    from multipack.planning.plan import Plan

Integers = NDArray[np.int64]

ENOUGH = 0.99
"""Nothing is advised where the ceiling is at least this."""

_PLACES = 8  # places of the epoch at which a proposal is tried
_WORTH = 0.005  # least gain of a proposal that is told
_MARGIN = 1.05  # tokens of a rank over κ · Lmax
_ROOM = 1.1  # capacity over budget, so that packs can differ in tokens
_UNLIKE = 3.0  # spread of the steps' mean lengths above which grouping is told
_PART, _DEALT = 200_000, 8  # documents that are planned without grouping, and steps of them that are dealt


def advise(
    plan: Plan, lengths: Integers, costs: Integers, world: int, sync: Sync, ceiling: float
) -> list[str]:
    """Sentences on what limits the ceiling of a plan and what would lift it; none where it is high.

    Args:
        plan: any plan.
        lengths: (all documents,) tokens that documents take in a pack.
        costs: (all documents,) what they cost.
        world: data-parallel ranks.
        sync: where ranks meet.
        ceiling: of the plan's cost utilization for these ranks.
    """
    if ceiling >= ENOUGH:
        return []
    micro_batches, mine, packs = plan.micro_batches(world), plan.order, plan.packs_per_step
    runs = world * micro_batches
    tokens, cost = int(lengths[mine].sum()), int(costs[mine].sum())
    longest, factor = int(lengths[mine].max()), kappa(lengths[mine], costs[mine])
    share = cost / (plan.num_steps * (world if sync == "step" else runs))  # a rank's part of a meeting
    said = [
        f"no arrangement of these steps exceeds {ceiling:.1%}: the longest document ({longest:,} tokens) costs"
        f" {int(costs[mine].max()) / share:.2f} times a rank's mean share, and its tokens κ = {factor:.2f} times"
        " the mean token"
    ]

    def tell(what: str, reached: float | None, price: str = "") -> None:
        if reached is not None and reached >= ceiling + _WORTH:
            said.append(f"{what} lifts the ceiling to {reached:.1%}{price}")

    def attempt(budget: int, each: int, capacity: int, meet: Sync) -> float | None:
        groups = _groups(plan, lengths, budget * world * each)
        return _ceiling(((lengths[g], costs[g]) for g in groups), world, each, capacity, meet)

    mean = -(-tokens // (plan.num_steps * runs))  # tokens of a pack that a rank runs
    if packs % world:
        budget = -(-tokens // (plan.num_steps * packs))
        what = f"plan.packs_per_step={runs} instead of {packs} (a multiple of the {world} ranks)"
        tell(what, attempt(budget, micro_batches, plan.capacity, sync))
    budget = round_up(_MARGIN * factor * longest)
    if budget > mean:
        capacity = round_up(_ROOM * budget)
        what = (
            f"plan.capacity={capacity} plan.budget={budget} (packs of κ times the longest document in the mean;"
            f" {budget / mean:.1f} times the tokens of a step)"
        )
        slots = packs * capacity * -(-tokens // (packs * budget))
        filled = tokens / (plan.num_steps * packs * plan.capacity)
        price = f", at a packing efficiency of {tokens / slots:.1%} instead of {filled:.1%}"
        tell(what, attempt(budget, micro_batches, capacity, sync), price)
    if sync != "step" and micro_batches > 1:
        what = "sync=step (ranks meet once a step: DDP, ZeRO-1/2) instead of at every micro-batch"
        tell(what, attempt(mean, micro_batches, plan.capacity, "step"))
    each = -(-budget // mean)
    if each > micro_batches:
        meet = "sync=step " if sync != "step" else ""
        what = (
            f"{meet}plan.packs_per_step={world * each} instead of {packs} ({each} micro-batches a rank;"
            f" {each / micro_batches:.1f} times the tokens of a step)"
        )
        tell(what, attempt(mean, each, plan.capacity, "step"))
    limit = _longest_within(lengths[mine], costs[mine], share)
    if (
        0 < limit < longest
    ):  # at 0 every document costs more than a mean share: they are too few, not too long
        above = np.count_nonzero(lengths[mine] > limit)
        groups = (_shared(lengths[g], costs[g], share) for g in _groups(plan, lengths, mean * runs))
        what = (
            f"context parallelism for the {above:,} documents longer than {limit:,} tokens, which alone cost more"
            f" than a rank's mean share (the longest over {math.ceil(costs[mine].max() / share)} ranks),"
        )
        tell(what, _ceiling(groups, world, micro_batches, plan.capacity, sync))
    return said


def advise_order(plan: Plan, world: int, sync: Sync, reached: float, spread: float | None) -> list[str]:
    """A sentence on what random steps would cost, where documents of like length share steps; else none.

    Args:
        plan: any plan.
        world: data-parallel ranks.
        sync: where ranks meet.
        reached: cost utilization of the plan for these ranks.
        spread: of the steps' mean lengths over that of random steps; None: one step.
    """
    if spread is None or spread <= _UNLIKE or plan.options.order == "given" or not plan.options.group:
        return []
    said = f"documents of like length share steps: mean lengths spread {spread:.1f} times as far as over random ones"
    if world == 1:
        return [f"{said}; with one rank that brings nothing: plan.group=false keeps them random"]
    found = _without_grouping(plan, world, sync)
    return [
        f"{said}; plan.group=false keeps them random, at a cost utilization of about {found:.1%} instead of"
        f" {reached:.1%} (estimated on a part of the epoch)"
    ]


def _without_grouping(plan: Plan, world: int, sync: Sync) -> float:
    """Cost utilization of the plan's first documents, planned without grouping."""
    from multipack.planning.plan import plan as make_plan

    width = min(plan.window, plan.num_steps)
    size = -(-plan.num_documents // plan.num_steps)
    steps = max(min(2 * width, plan.num_steps, _PART // size), 1)
    chosen = plan.order[: plan.pack_offsets[plan.step_offsets[steps]]]
    chosen = chosen[np.argsort(keys(plan.seed, plan.epoch, chosen), kind="stable")]
    mean = -(-int(plan.slots[chosen].sum()) // (steps * plan.packs_per_step))
    made = make_plan(
        plan.lengths[chosen],
        options=plan.options,
        budget=min(mean, plan.capacity),
        window=min(width, steps),
        order="given",
        tail="keep",
        group=False,
        cost=plan.cost_model,
    )
    total = dearest = 0
    costs = made.cost_model.cost(made.slots)
    dealt = np.unique(np.linspace(0, made.num_steps - 1, _DEALT).astype(np.int64))
    for step in dealt.tolist():
        loads = meetings(made.deal(step, world, sync).totals(costs), world, sync)
        total += int(loads.sum())
        dearest += int(loads.max(axis=1).sum())
    return total / (world * dearest)


def round_up(tokens: float) -> int:
    """The least number of at least so many tokens with five significant binary digits: 35,002 → 36,864."""
    whole = int(np.ceil(tokens))
    unit = 1 << max(whole.bit_length() - 5, 0)
    return -(-whole // unit) * unit


def _groups(plan: Plan, lengths: Integers, tokens: int) -> Iterator[Integers]:
    """Document numbers that come together in the plan and make up so many tokens, from even places."""
    ends = np.cumsum(lengths[plan.order])
    free = int(ends[-1]) - tokens
    if free < 0:
        return
    places = min(_PLACES, plan.num_steps)
    for place in range(places):
        first = int(np.searchsorted(ends, free * place // max(places - 1, 1), side="right"))
        last = int(np.searchsorted(ends, (int(ends[first - 1]) if first else 0) + tokens, side="right"))
        yield plan.order[first : max(last, first + 1)]


def _ceiling(
    groups: Iterator[tuple[Integers, Integers]], world: int, micro_batches: int, capacity: int, sync: Sync
) -> float | None:
    """The ceiling for steps of these (lengths, costs); None where the documents fill no such step."""
    cost = least = 0
    for lengths, costs in groups:
        cost += int(costs.sum())
        least += least_step_cost(lengths, costs, world, micro_batches, capacity, sync)
    return min(1.0, cost / (world * least)) if least else None


def _longest_within(lengths: Integers, costs: Integers, share: float) -> int:
    """The longest of the documents that cost no more than a rank's mean share; 0 where all cost more."""
    return int(lengths[costs <= share].max(initial=0))


def _shared(lengths: Integers, costs: Integers, share: float) -> tuple[Integers, Integers]:
    """Each document that costs more than the share as so many equal parts that none does."""
    parts = np.maximum(np.ceil(costs / share), 1).astype(np.int64)
    return np.repeat(-(-lengths // parts), parts), np.repeat(costs // parts, parts)
