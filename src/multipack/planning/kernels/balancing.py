"""Balancing the packs of a step: which rank runs which, and documents that change places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import compiled

Integers = NDArray[np.int64]

_PARTNERS = 64  # cheapest ranks that the dearest one tries to trade with; fewer where each has many packs
_FEWEST_PARTNERS = 4
_TINY = 1_000_000  # a trade gains this part of the mean at least
_WORTH = 64  # … and this part of what the dearest rank costs too much: pairs of packs do the fine work
_TURNS = 50  # trades for each rank at most; a few are the rule


@compiled
def assign_ranks(costs: Integers, world: int, each: int) -> Integers:
    """Packs (by falling cost) to ranks, exactly `each` to a rank: the cheapest rank with a place takes one.

    Returns each pack's number in micro-batch-major order: micro-batch · world + rank.
    """
    load = np.zeros(world, dtype=np.int64)
    count = np.zeros(world, dtype=np.int64)
    number = np.empty(len(costs), dtype=np.int64)
    for pack in range(len(costs)):
        best = -1
        for rank in range(world):
            if count[rank] < each and (best < 0 or load[rank] < load[best]):
                best = rank
        number[pack] = count[best] * world + best
        load[best] += costs[pack]
        count[best] += 1
    return number


@compiled
def _move(order: Integers, offsets: Integers, lengths: Integers, position: int, target: int) -> None:
    """Move the document at `position` of a pack into pack `target`, each pack staying in falling order."""
    document = order[position]
    place_at = offsets[target]
    while place_at < offsets[target + 1] and lengths[order[place_at]] > lengths[document]:
        place_at += 1
    if place_at <= position:
        for index in range(position, place_at, -1):
            order[index] = order[index - 1]
        order[place_at] = document
        for pack in range(target + 1, len(offsets)):
            if offsets[pack] > position:
                break
            offsets[pack] += 1
    else:
        for index in range(position, place_at - 1):
            order[index] = order[index + 1]
        order[place_at - 1] = document
        for pack in range(target, -1, -1):
            if offsets[pack] <= position:
                break
            offsets[pack] -= 1


@compiled
def _best_exchange(
    order: Integers,
    offsets: Integers,
    lengths: Integers,
    costs: Integers,
    tokens: Integers,
    dear: int,
    cheap: int,
    gap: int,
    capacity: int,
    max_documents: int,
) -> tuple[int, int, int]:
    """The move (−1 as second) or swap that brings two packs' groups closest; (gain, first, second) positions.

    Group costs differ by `gap` > 0. Giving x for y changes that to gap − 2·(cost x − cost y), so the gain,
    min(change, gap − change), is largest where the change is nearest to half the gap. Both packs are in
    falling order, so the best partner of each x moves one way only: two pointers.
    """
    gain, first, second = 0, -1, -1
    room = capacity - tokens[cheap]
    begin, end = offsets[cheap], offsets[cheap + 1]
    near, small = (
        begin,
        begin,
    )  # first y that makes the change at least half the gap; first y that is too short
    can_move = offsets[dear + 1] - offsets[dear] > 1 and end - begin < max_documents
    for x in range(offsets[dear], offsets[dear + 1]):
        length, cost = lengths[order[x]], costs[order[x]]
        while near < end and 2 * (cost - costs[order[near]]) < gap:
            near += 1
        while small < end and length - lengths[order[small]] <= room:
            small += 1
        for y in (min(near, small - 1), min(near, small) - 1):
            if begin <= y < end:
                change = cost - costs[order[y]]
                if min(change, gap - change) > gain:
                    gain, first, second = min(change, gap - change), x, y
        if can_move and length <= room and min(cost, gap - cost) > gain:
            gain, first, second = min(cost, gap - cost), x, -1
    return gain, first, second


@compiled
def exchange(
    order: Integers,
    offsets: Integers,
    lengths: Integers,
    costs: Integers,
    capacity: int,
    max_documents: int,
    world: int,
    first_slot: int,
    last_slot: int,
    target: int,
) -> int:
    """Lower the dearest rank of one meeting by moves and swaps of single documents, in place.

    Packs are micro-batch-major (slot · world + rank), each in falling order. A rank's cost is the sum over
    the slots of the meeting. The dearest rank trades with the cheapest ones, until it costs `target` at
    most, or no trade gains a millionth of the mean and a 64th of what it costs too much; no pack is emptied. Returns
    the dearest rank's cost.
    """
    packs = len(offsets) - 1
    tokens = np.zeros(packs, dtype=np.int64)
    load = np.zeros(world, dtype=np.int64)
    for pack in range(first_slot * world, last_slot * world):
        for position in range(offsets[pack], offsets[pack + 1]):
            tokens[pack] += lengths[order[position]]
            load[pack % world] += costs[order[position]]
    tiny = load.sum() // (world * _TINY)
    partners = max(_PARTNERS // (last_slot - first_slot), _FEWEST_PARTNERS)
    asked = np.full(world, -1, dtype=np.int64)  # the turn in which a rank was last asked
    for turn in range(_TURNS * world + 200):
        dearest = int(np.argmax(load))
        improved = False
        if load[dearest] <= target:
            break
        least = max(tiny, (load[dearest] - target) // _WORTH)
        for _ in range(partners):
            other = -1
            for rank in range(world):
                if asked[rank] < turn and (other < 0 or load[rank] < load[other]):
                    other = rank
            if other < 0:
                break
            asked[other] = turn
            gap = load[dearest] - load[other]
            if gap <= 2 * least + 1:
                break
            gain, first, second, dear, cheap = least, -1, -1, -1, -1
            for a in range(first_slot, last_slot):
                for b in range(first_slot, last_slot):
                    found, x, y = _best_exchange(
                        order, offsets, lengths, costs, tokens,
                        a * world + dearest, b * world + other, gap, capacity, max_documents,
                    )  # fmt: skip
                    if found > gain:
                        gain, first, second, dear, cheap = found, x, y, a * world + dearest, b * world + other
            if first < 0:
                continue
            given = order[first]
            taken = order[second] if second >= 0 else -1
            _move(order, offsets, lengths, first, cheap)
            change, shift = costs[given], lengths[given]
            if taken >= 0:
                second = offsets[cheap]
                while order[second] != taken:
                    second += 1
                _move(order, offsets, lengths, second, dear)
                change, shift = change - costs[taken], shift - lengths[taken]
            load[dearest] -= change
            load[other] += change
            tokens[dear] -= shift
            tokens[cheap] += shift
            improved = True
            break
        if not improved:
            break
    return load.max()
