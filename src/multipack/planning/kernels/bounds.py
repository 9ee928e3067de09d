"""What no arrangement of a step's documents can beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import compiled

Integers = NDArray[np.int64]

_ANY = np.iinfo(np.int64).max  # a rate that no document reaches


def dearest_bound(lengths: Integers, costs: Integers, packs: int, capacity: int, dearer: int = 0) -> int:
    """A proven lower bound on the cost of the dearest of `packs` packs, or of one further down the list.

    **The dearest.** For every k, some k packs hold the k longest documents. The other packs hold at most
    (packs − k)·capacity tokens, so those k hold T − (packs − k)·capacity at least, and what they hold beside
    the k longest costs at least what the documents with the lowest cost per token would, the last of them
    in part. The dearest pack costs at least the mean of these k. k = packs is the mean of all packs. And of the
    j·packs + 1 longest documents some pack holds j + 1.

    **The next after some `dearer` ones.** Documents longer than capacity / 2 are in different packs. Of the k
    longest of them at most `dearer` are in the dearer packs, so there are k − dearer other packs that hold
    one each, and for them the same holds. They need not hold the shortest of these k, but a longer one in
    place of a shorter one costs at least as much as filling up with tokens at the least slope of cost between
    such documents, so the rate of what is filled in is limited to that slope.

    Cost per token is rounded down to whole numbers, which errs on the safe side; it is whole for every
    cost of the form linear·l + l(l+1).

    Args:
        lengths: (documents,) tokens, falling, none above the capacity.
        costs: (documents,) their costs, falling with the lengths (documents of one length cost alike).
        packs: packs that hold the documents.
        capacity: most tokens of a pack.
        dearer: how many packs may cost more than the one that is meant; 0 = the dearest.

    Returns:
        The bound; 0 where nothing can be said.
    """
    rates, together = costs // lengths, 0
    if dearer == 0:
        last, limit, together = min(packs, len(lengths)), _ANY, _together(costs, packs)
    else:
        last = min(packs, int(np.searchsorted(-lengths, -(capacity // 2))))
        limit = _least_slope(lengths[:last], costs[:last]) if dearer < last else 0
    order = np.argsort(rates, kind="stable")
    return max(int(_bound(lengths, costs, rates, order, packs, capacity, dearer, last, limit)), together)


def _together(costs: Integers, packs: int) -> int:
    """The largest sum over j = 1, 2, … of the j + 1 cheapest among the j · packs + 1 dearest documents."""
    ends = np.zeros(len(costs) + 1, dtype=np.int64)
    np.cumsum(costs, out=ends[1:])
    last = ends[packs + 1 :: packs]
    return int((last - ends[np.arange(1, len(last) + 1) * (packs - 1)]).max(initial=0))


def _least_slope(lengths: Integers, costs: Integers) -> int:
    """The least cost of a further token between two documents of different lengths, rounded down."""
    steps = lengths[:-1] - lengths[1:]
    rises = (costs[:-1] - costs[1:])[steps > 0] // steps[steps > 0]
    return int(rises.min(initial=_ANY))


@compiled
def _bound(
    lengths: Integers,
    costs: Integers,
    rates: Integers,
    order: Integers,
    packs: int,
    capacity: int,
    dearer: int,
    last: int,
    limit: int,
) -> int:
    """The largest bound over k = dearer + 1 … last; `order` sorts by rising rates, of which none above `limit`.

    Documents of one rate form a group. From one k to the next, a document leaves the fill for the longest, and
    the tokens that are missing do not become fewer: the group in which the fill ends only moves up.
    """
    documents = len(lengths)
    group_of = np.empty(documents, dtype=np.int64)
    rate_of = np.empty(documents, dtype=np.int64)
    tokens_of = np.zeros(documents, dtype=np.int64)
    cost_of = np.zeros(documents, dtype=np.int64)
    groups = 0
    for document in order:
        if groups == 0 or rates[document] != rate_of[groups - 1]:
            rate_of[groups] = rates[document]
            groups += 1
        group_of[document] = groups - 1
        tokens_of[groups - 1] += lengths[document]
        cost_of[groups - 1] += costs[document]
    outside = lengths.sum() - packs * capacity  # tokens beyond all packs: the k packs hold k·capacity more
    bound, group = 0, 0
    filled_tokens, filled_cost = 0, 0  # of all groups before `group`
    longest_tokens, longest_cost = 0, 0
    for k in range(1, last + 1):
        mine = group_of[k - 1]
        tokens_of[mine] -= lengths[k - 1]
        cost_of[mine] -= costs[k - 1]
        if mine < group:
            filled_tokens -= lengths[k - 1]
            filled_cost -= costs[k - 1]
        if k <= dearer:
            continue
        longest_tokens += lengths[k - 1]
        longest_cost += costs[k - 1]
        missing = max(outside + (k - dearer) * capacity - longest_tokens, 0)
        while group < groups and rate_of[group] < limit and filled_tokens + tokens_of[group] <= missing:
            filled_tokens += tokens_of[group]
            filled_cost += cost_of[group]
            group += 1
        cost = longest_cost + filled_cost
        if group < groups:
            cost += (missing - filled_tokens) * min(rate_of[group], limit)
        bound = max(bound, -(-cost // (k - dearer)))
    return bound


def most_cost(lengths: Integers, costs: Integers, packs: int, capacity: int) -> int:
    """A proven upper bound on what any `packs` packs of these documents cost together.

    They hold packs · capacity tokens at most, and at most one document longer than capacity / 2 each. For any
    price r ≥ 0 of a token and s ≥ 0 of such a place,

        cost  ≤  r · packs · capacity  +  s · packs  +  Σ max(cost − r·length − s·[length > capacity / 2], 0).

    The prices are those at which the longest documents that fit are just worth it.

    Args:
        lengths: (documents,) tokens, falling, none above the capacity.
        costs: (documents,) their costs.
        packs: how many packs.
        capacity: most tokens of a pack.
    """
    total = int(costs.sum())
    half = int(np.searchsorted(-lengths, -(capacity // 2)))  # documents longer than capacity / 2
    taken = min(half, packs)
    room = packs * capacity - int(lengths[:taken].sum())
    if taken == half and room >= int(lengths[half:].sum()):
        return total
    by_rate = np.argsort(-(costs[half:] // lengths[half:]), kind="stable") + half
    index = int(np.searchsorted(np.cumsum(lengths[by_rate]), room, side="right"))
    token = 0 if index == len(by_rate) else -(-int(costs[by_rate[index]]) // int(lengths[by_rate[index]]))
    place = 0 if taken == half else max(int(costs[taken]) - token * int(lengths[taken]), 0)
    worth = costs - token * lengths
    worth[:half] -= place
    return min(total, (token * capacity + place) * packs + int(worth.clip(0).sum()))


def first_outside(lengths: Integers, packs: int, capacity: int) -> int:
    """The least number of longest documents that `packs` packs cannot hold, less one: a position in `lengths`.

    Together they have packs · capacity tokens at most, and of documents longer than capacity / (m + 1) a pack
    holds m at most. Some document outside of these packs is at least as long as the one at that position.

    Args:
        lengths: (documents,) tokens, falling, none above the capacity.
        packs: how many packs.
        capacity: most tokens of a pack.
    """
    least = int(np.searchsorted(np.cumsum(lengths), packs * capacity, side="right"))
    for each in range(1, 9):
        longer = int(np.searchsorted(-lengths, -(capacity // (each + 1))))
        if longer > each * packs:
            return min(least, each * packs)
    return least
