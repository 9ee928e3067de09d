"""Placing the documents of a block into a fixed number of packs.

`Rooms` in the comments below is this structure: packs that have the same room left form a linked list,
and two levels of bits say which rooms occur, so that the tightest room of at least l tokens is found in a
few instructions:

    room     0  1  2  3  4  5  6  7 …
    head     −  7  −  −  2  −  −  9        first pack with that room
    after    pack 2 → 5 → 0                the next pack with the same room
    fine     0  1  0  0  1  0  0  1        one bit a room, 64 to a word
    coarse   1 …                           one bit a word of `fine`
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import compiled

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

_COLLECTIONS = 200  # times that the room of many packs is brought to one: what a block may spend on it


@compiled
def _trailing_zeros(word: Any) -> int:
    zeros = 0
    word = np.uint64(word)
    for width in (32, 16, 8, 4, 2, 1):
        mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        if word & mask == np.uint64(0):
            word >>= np.uint64(width)
            zeros += width
    return zeros


@compiled
def _put(room: int, pack: int, head: Integers, after: Integers, fine: Words, coarse: Words) -> None:
    """Add a pack to Rooms."""
    if head[room] < 0:
        fine[room >> 6] |= np.uint64(1) << np.uint64(room & 63)
        coarse[room >> 12] |= np.uint64(1) << np.uint64((room >> 6) & 63)
    after[pack] = head[room]
    head[room] = pack


@compiled
def _take_tightest(length: int, head: Integers, after: Integers, fine: Words, coarse: Words) -> int:
    """Remove a pack of the least room ≥ length from Rooms and return it; −1 if none."""
    word = length >> 6
    if word >= len(fine):
        return -1
    bits = fine[word] >> np.uint64(length & 63) << np.uint64(length & 63)
    if bits == np.uint64(0):
        upper = (word + 1) >> 6
        if upper >= len(coarse):
            return -1
        shift = np.uint64((word + 1) & 63)
        words = coarse[upper] >> shift << shift
        while words == np.uint64(0):
            upper += 1
            if upper >= len(coarse):
                return -1
            words = coarse[upper]
        word = upper * 64 + _trailing_zeros(words)
        bits = fine[word]
    room = word * 64 + _trailing_zeros(bits)
    pack = head[room]
    head[room] = after[pack]
    if head[room] < 0:
        fine[word] &= ~(np.uint64(1) << np.uint64(room & 63))
        if fine[word] == np.uint64(0):
            coarse[word >> 6] &= ~(np.uint64(1) << np.uint64(word & 63))
    return pack


@compiled
def _sift_down(heap: Integers, size: int, cost: Integers) -> None:
    """Restore a heap of packs, cheapest on top, after its top became dearer."""
    node, pack = 0, heap[0]
    while True:
        child = 2 * node + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            cost[heap[other]] < cost[heap[child]]
            or (cost[heap[other]] == cost[heap[child]] and heap[other] < heap[child])
        ):
            child = other
        below = heap[child]
        if cost[pack] < cost[below] or (cost[pack] == cost[below] and pack < below):
            break
        heap[node] = below
        node = child
    heap[node] = pack


@compiled
def place(
    lengths: Integers,
    costs: Integers,
    visit: Integers,
    packs: int,
    capacity: int,
    max_documents: int,
    spread: bool,
) -> Integers:
    """Place documents, in the order of `visit`, into a fixed number of packs; −1 for those that find no room.

    With `spread`, a document goes into the cheapest pack (longest processing time first, when documents come
    in falling order). A pack without room for the document at hand leaves the heap for good, and once the
    heap is empty the rest goes by best fit to the rooms that remain. Without `spread` it is best fit alone.
    Rooms that fit every document count as one room: their table need not be as long as the capacity.
    """
    after = np.empty(packs, dtype=np.int64)
    rooms = np.full(packs, capacity, dtype=np.int64)
    sizes = np.zeros(packs, dtype=np.int64)
    cost = np.zeros(packs, dtype=np.int64)
    heap = np.arange(packs)
    size = packs if spread else 0
    table = lengths.max()
    head = np.empty(0, dtype=np.int64)  # made when the heap is empty
    fine, coarse = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64)
    placed = np.full(len(lengths), -1, dtype=np.int64)
    for document in visit:
        length = lengths[document]
        pack = -1
        while size > 0 and pack < 0:
            top = heap[0]
            if rooms[top] >= length and sizes[top] < max_documents:
                pack = top
                cost[pack] += costs[document]
            else:
                size -= 1
                heap[0] = heap[size]
            if size > 0:
                _sift_down(heap, size, cost)
        if pack < 0:
            if len(head) == 0:
                head = np.full(table + 1, -1, dtype=np.int64)
                fine = np.zeros((table >> 6) + 1, dtype=np.uint64)
                coarse = np.zeros((table >> 12) + 1, dtype=np.uint64)
                for other in range(packs - 1, -1, -1):
                    if rooms[other] > 0 and sizes[other] < max_documents:
                        _put(min(rooms[other], table), other, head, after, fine, coarse)
            pack = _take_tightest(length, head, after, fine, coarse)
            if pack < 0:
                continue
            if rooms[pack] > length and sizes[pack] + 1 < max_documents:
                _put(min(rooms[pack] - length, table), pack, head, after, fine, coarse)
        placed[document] = pack
        rooms[pack] -= length
        sizes[pack] += 1
    return placed


@compiled
def place_by_slot(
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
def gather(
    placed: Integers,
    lengths: Integers,
    wanted: NDArray[np.bool_],
    packs: int,
    capacity: int,
    max_documents: int,
    spare: int,
) -> None:
    """Find places for documents that have none (−1 in `placed`), by gathering room that is scattered (in place).

        |AAAAAABB··|   A for C fills the first pack and leaves     |CCCCCCCBB·|
        |CCCCCCCDD·|   its room to the second                      |AAAAAADDEE|  ← E had no place

    Documents come in falling order. The roomiest pack gives the others, roomiest first, a longer document for a
    shorter one of theirs, the difference as near to their room as possible, until it has room for the longest
    `wanted` document that waits. Then, if `spare` is not negative, the same is done to fill up: the one or two
    documents, among all that wait, which fill the roomiest pack best find a place there, while `spare` tokens of
    all the room remain.
    """
    rooms = np.full(packs, capacity, dtype=np.int64)
    sizes = np.zeros(packs, dtype=np.int64)
    offsets = np.zeros(packs + 1, dtype=np.int64)
    for document in range(len(placed)):
        if placed[document] >= 0:
            rooms[placed[document]] -= lengths[document]
            sizes[placed[document]] += 1
    for pack in range(packs):
        offsets[pack + 1] = offsets[pack] + sizes[pack]
    members = np.empty(offsets[packs], dtype=np.int64)
    ends = offsets[:-1].copy()
    for document in range(len(placed)):
        if placed[document] >= 0:
            members[ends[placed[document]]] = document
            ends[placed[document]] += 1
    stuck = -1  # room of the roomiest pack when no exchange could enlarge it
    left = _COLLECTIONS
    for document in range(len(placed)):
        if placed[document] >= 0 or not wanted[document]:
            continue
        taker = _roomiest(rooms, sizes, max_documents)
        if taker < 0:
            return
        if rooms[taker] < lengths[document] and rooms[taker] != stuck and left > 0:
            left -= 1
            _collect(placed, lengths, members, offsets, rooms, taker, lengths[document])
            if rooms[taker] < lengths[document]:
                stuck = rooms[taker]
        if rooms[taker] >= lengths[document]:
            placed[document] = taker  # not among the members: later exchanges leave it where it is
            rooms[taker] -= lengths[document]
            sizes[taker] += 1
    while spare >= 0 and left > 0:
        left -= 1
        taker = _roomiest(rooms, sizes, max_documents)
        if taker < 0:
            return
        _collect(placed, lengths, members, offsets, rooms, taker, capacity)
        first, second = _filling(
            placed, lengths, min(rooms[taker], rooms.sum() - spare), sizes[taker] + 1 < max_documents
        )
        if first < 0:
            return
        for document in (first, second):
            if document >= 0:
                placed[document] = taker
                rooms[taker] -= lengths[document]
                sizes[taker] += 1


@compiled
def _roomiest(rooms: Integers, sizes: Integers, max_documents: int) -> int:
    """The pack with the most room that may take a document more; −1 if none may."""
    found = -1
    for pack in range(len(rooms)):
        if sizes[pack] < max_documents and (found < 0 or rooms[pack] > rooms[found]):
            found = pack
    return found


@compiled
def _collect(
    placed: Integers,
    lengths: Integers,
    members: Integers,
    offsets: Integers,
    rooms: Integers,
    taker: int,
    enough: int,
) -> None:
    """Pass the room of other packs, roomiest first, to one pack until it has enough."""
    for giver in np.argsort(-rooms, kind="mergesort"):
        if rooms[taker] >= enough or rooms[giver] == 0:
            return
        if giver != taker:
            _pass_room(placed, lengths, members, offsets, rooms, taker, giver)


@compiled
def _filling(placed: Integers, lengths: Integers, room: int, two: bool) -> tuple[int, int]:
    """The document, or the two, among those that wait which fill `room` best without exceeding it."""
    best, first, second = 0, -1, -1
    for document in range(len(placed)):
        if placed[document] < 0 and best < lengths[document] <= room:
            best, first = lengths[document], document
    long, short = 0, len(placed) - 1
    while two and long < short and best < room:  # two pointers over falling lengths
        if placed[long] >= 0:
            long += 1
        elif placed[short] >= 0:
            short -= 1
        else:
            total = lengths[long] + lengths[short]
            if total <= room:
                if total > best:
                    best, first, second = total, long, short
                short -= 1
            else:
                long += 1
    return first, second


@compiled
def _pass_room(
    placed: Integers,
    lengths: Integers,
    members: Integers,
    offsets: Integers,
    rooms: Integers,
    taker: int,
    giver: int,
) -> None:
    """Swap one document of two packs so that the giver's room becomes as small as can be, and the taker's grows."""
    best, first, second = 0, -1, -1
    y = offsets[giver]
    for x in range(offsets[taker], offsets[taker + 1]):
        length = lengths[members[x]]
        while y < offsets[giver + 1] and length - lengths[members[y]] <= rooms[giver]:
            y += 1
        # y is the first that is too short; the one before leaves the largest difference that fits
        if y > offsets[giver]:
            difference = length - lengths[members[y - 1]]
            if difference > best:
                best, first, second = difference, x, y - 1
                if best == rooms[giver]:
                    break
    if first < 0:
        return
    given, taken = members[first], members[second]
    placed[given], placed[taken] = giver, taker
    rooms[giver] -= best
    rooms[taker] += best
    while first + 1 < offsets[taker + 1] and lengths[members[first + 1]] > lengths[taken]:
        members[first] = members[first + 1]
        first += 1
    members[first] = taken
    while second > offsets[giver] and lengths[members[second - 1]] < lengths[given]:
        members[second] = members[second - 1]
        second -= 1
    members[second] = given


@compiled
def give_back(placed: Integers, lengths: Integers, packs: int, capacity: int) -> None:
    """Packs with too many tokens give back the shortest document that suffices, else the longest (in place).

    Documents come in falling order.
    """
    tokens = np.zeros(packs, dtype=np.int64)
    for document in range(len(placed)):
        if placed[document] >= 0:
            tokens[placed[document]] += lengths[document]
    for pack in range(packs):
        while tokens[pack] > capacity:
            given = -1
            for document in range(len(placed)):
                if placed[document] == pack and (given < 0 or lengths[document] >= tokens[pack] - capacity):
                    given = document
            placed[given] = -1
            tokens[pack] -= lengths[given]


@compiled
def fill_empty(placed: Integers, packs: int) -> None:
    """Move the shortest documents that have company into empty packs, while there are any (in place).

    Documents come in falling order.
    """
    sizes = np.zeros(packs, dtype=np.int64)
    for pack in placed:
        if pack >= 0:
            sizes[pack] += 1
    shortest = len(placed) - 1
    for empty in range(packs):
        if sizes[empty] > 0:
            continue
        while shortest >= 0 and (placed[shortest] < 0 or sizes[placed[shortest]] < 2):
            shortest -= 1
        if shortest < 0:
            return
        sizes[placed[shortest]] -= 1
        placed[shortest] = empty
        sizes[empty] = 1
        shortest -= 1


@compiled
def tally(placed: Integers, costs: Integers, packs: int) -> tuple[Integers, Integers]:
    """Cost and number of documents of each pack."""
    cost = np.zeros(packs, dtype=np.int64)
    sizes = np.zeros(packs, dtype=np.int64)
    for document in range(len(placed)):
        if placed[document] >= 0:
            cost[placed[document]] += costs[document]
            sizes[placed[document]] += 1
    return cost, sizes


@compiled
def in_packs(placed: Integers, offsets: Integers) -> Integers:
    """Documents pack after pack, each pack's in their own order, from where the packs begin."""
    order = np.empty(offsets[-1], dtype=np.int64)
    ends = offsets[:-1].copy()
    for document in range(len(placed)):
        if placed[document] >= 0:
            order[ends[placed[document]]] = document
            ends[placed[document]] += 1
    return order
