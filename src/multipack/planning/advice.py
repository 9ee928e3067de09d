"""What would lift a low ceiling, and how far: told in sentences, each with the ceiling of what it proposes.

Four ways out of a step whose longest document costs more than a rank's share (κ: see `ceiling.kappa`):
more tokens a rank, ranks that meet less often, both, or that document shared by several ranks. Each is tried on the
plan's own documents, from several places of the epoch, with the same bound as the ceiling itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multipack.planning.ceiling import kappa, least_step_cost

if TYPE_CHECKING:
    from multipack.planning.deal import Sync
    from multipack.planning.plan import Plan

Integers = NDArray[np.int64]

ENOUGH = 0.99
"""Nothing is advised where the ceiling is at least this."""

_PLACES = 8  # places of the epoch at which a proposal is tried
_WORTH = 0.005  # least gain of a proposal that is told
_MARGIN = 1.05  # tokens of a rank over κ · Lmax
_ROOM = 1.1  # capacity over budget, so that packs can differ in tokens


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
    micro_batches, mine = plan.micro_batches(world), plan.order
    runs = world * micro_batches
    tokens, cost = int(lengths[mine].sum()), int(costs[mine].sum())
    longest, factor = int(lengths[mine].max()), kappa(lengths[mine], costs[mine])
    share = cost / (plan.num_steps * (world if sync == "step" else runs))  # a rank's part of a meeting
    said = [
        f"no arrangement of these steps exceeds {ceiling:.1%}: the longest document ({longest:,} tokens) costs"
        f" {int(costs[mine].max()) / share:.2f} times a rank's mean share, and its tokens κ = {factor:.2f} times"
        " the mean token"
    ]

    def tell(what: str, reached: float | None) -> None:
        if reached is not None and reached >= ceiling + _WORTH:
            said.append(f"{what} lifts the ceiling to {reached:.1%}")

    def attempt(budget: int, each: int, capacity: int, meet: Sync) -> float | None:
        groups = _groups(plan, lengths, budget * world * each)
        return _ceiling(((lengths[g], costs[g]) for g in groups), world, each, capacity, meet)

    mean = -(-tokens // (plan.num_steps * runs))  # tokens of a pack that a rank runs
    if plan.packs_per_step % world:
        budget = -(-tokens // (plan.num_steps * plan.packs_per_step))
        what = f"packs_per_step={runs}, a multiple of the {world} ranks,"
        tell(what, attempt(budget, micro_batches, plan.capacity, sync))
    budget = round_up(_MARGIN * factor * longest)
    if budget > mean:
        capacity = round_up(_ROOM * budget)
        what = (
            f"budget={budget:,} with capacity={capacity:,} (packs of κ times the longest document in the mean;"
            f" {budget / mean:.1f} times the tokens of a step)"
        )
        tell(what, attempt(budget, micro_batches, capacity, sync))
    if sync != "step" and micro_batches > 1:
        what = "sync=step (ranks meet once a step: DDP, ZeRO-1/2) instead of at every micro-batch"
        tell(what, attempt(mean, micro_batches, plan.capacity, "step"))
    each = -(-budget // mean)
    if each > micro_batches:
        what = f"sync=step with {each} micro-batches a rank ({each / micro_batches:.1f} times the tokens of a step)"
        tell(what, attempt(mean, each, plan.capacity, "step"))
    limit = _longest_within(lengths[mine], costs[mine], share)
    if limit < longest:
        above = np.count_nonzero(lengths[mine] > limit)
        groups = (_shared(lengths[g], costs[g], share) for g in _groups(plan, lengths, mean * runs))
        what = (
            f"context parallelism for the {above:,} documents longer than {limit:,} tokens, which alone cost more"
            f" than a rank's mean share (the longest over {-(-int(costs[mine].max()) // int(share))} ranks),"
        )
        tell(what, _ceiling(groups, world, micro_batches, plan.capacity, sync))
    return said


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
