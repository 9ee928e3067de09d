"""Balancing the packs of a step: which rank runs which, and documents that change places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import compiled

Integers = NDArray[np.int64]

_PARTNERS = 64  # cheapest ranks that the dearest one tries to trade with; fewer where each has many packs


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
def by_slot(
    lengths: Integers, costs: Integers, world: int, slots: int, capacity: int, max_documents: int
) -> Integers:
    """Documents (in falling order) to packs, one micro-batch after the other; −1 for those that find no room.

    A micro-batch lasts as long as its dearest pack. So each takes the longest documents that are left, into its
    cheapest pack, as long as no pack becomes dearer than the longest of them alone, or than the mean that all
    packs still to be filled must have; once no pack has room for a document, shorter ones fill the tightest rooms.
    Returns pack numbers, slot · world + rank.
    """
    placed = np.full(len(lengths), -1, dtype=np.int64)
    left = costs.sum()
    for slot in range(slots):
        rooms = np.full(world, capacity, dtype=np.int64)
        free = np.full(world, max_documents, dtype=np.int64)
        load = np.zeros(world, dtype=np.int64)
        heap, size = np.arange(world), world
        limit, roomiest = -1, capacity
        for document in range(len(lengths)):
            if placed[document] >= 0:
                continue
            length, cost = lengths[document], costs[document]
            if limit < 0:
                limit = max(cost, -(-left // (world * (slots - slot))))
                if slot == slots - 1:
                    limit = left
            while size > 0 and (rooms[heap[0]] < length or free[heap[0]] == 0):
                size -= 1  # no room for this one: it leaves the heap for good
                heap[0] = heap[size]
                _sift_down(heap, size, load)
            pack = -1
            if size > 0:
                if load[heap[0]] + cost <= limit:
                    pack = heap[0]
            elif length <= roomiest:
                roomiest = 0
                for other in range(world):
                    if free[other] > 0 and load[other] + cost <= limit:
                        roomiest = max(roomiest, rooms[other])
                        if rooms[other] >= length and (pack < 0 or rooms[other] < rooms[pack]):
                            pack = other
            if pack < 0:
                continue
            placed[document] = slot * world + pack
            rooms[pack] -= length
            free[pack] -= 1
            load[pack] += cost
            left -= cost
            if size > 0:
                _sift_down(heap, size, load)
    return placed


@compiled
def _sift_down(heap: Integers, size: int, load: Integers) -> None:
    """Restore a heap of packs, cheapest on top and ties to the lower number, after its top became dearer."""
    if size == 0:
        return
    node, pack = 0, heap[0]
    while 2 * node + 1 < size:
        child = 2 * node + 1
        if child + 1 < size and (load[heap[child + 1]], heap[child + 1]) < (load[heap[child]], heap[child]):
            child += 1
        if (load[pack], pack) < (load[heap[child]], heap[child]):
            break
        heap[node] = heap[child]
        node = child
    heap[node] = pack


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
    tiny = load.sum() // (world * 1_000_000)
    for _ in range(50 * world + 200):
        dearest = int(np.argmax(load))
        improved = False
        if load[dearest] <= target:
            break
        least = max(tiny, (load[dearest] - target) // 64)
        for other in np.argsort(load, kind="mergesort")[: max(_PARTNERS // (last_slot - first_slot), 4)]:
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
