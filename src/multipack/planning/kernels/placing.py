"""Placing documents into a fixed number of packs: `place`, from kernels that spread by cost and gather room.

Documents are numbered by falling length; `placed` holds each one's pack, −1 for none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import compiled

Integers = NDArray[np.int64]

_COLLECTIONS = 200  # times that free tokens of many packs are brought into one, in a window
_GIVERS = 128  # packs that give their free tokens in one of them


@compiled
def spread(
    lengths: Integers,
    costs: Integers,
    visit: Integers,
    packs: int,
    capacity: int,
    max_documents: int,
) -> Integers:
    """Place documents, in the order of `visit`, into a fixed number of packs; −1 for those that do not fit.

    A document goes into the pack of least cost: longest processing time first (Graham 1969), when documents come in
    falling order. A pack without room for the document at hand leaves the heap for good. Once the heap is empty, the
    rest goes by first fit into the remaining rooms, found in a tree of the largest room below each node.
    """
    rooms = np.full(packs, capacity, dtype=np.int64)
    sizes, cost = np.zeros(packs, dtype=np.int64), np.zeros(packs, dtype=np.int64)
    heap, size = np.arange(packs), packs
    leaves = 1
    while leaves < packs:
        leaves *= 2
    tree = np.zeros(2 * leaves, dtype=np.int64)
    placed = np.full(len(lengths), -1, dtype=np.int64)
    for document in visit:
        length, pack = lengths[document], -1
        while size > 0 and pack < 0:
            top = heap[0]
            if rooms[top] >= length and sizes[top] < max_documents:
                pack = top
                cost[top] += costs[document]
            else:
                size -= 1
                top = heap[size]
            node = 0  # the top became more costly, or was replaced: restore the heap
            while 2 * node + 1 < size:
                child = 2 * node + 1
                left, right = heap[child], heap[min(child + 1, size - 1)]
                if cost[right] < cost[left] or (cost[right] == cost[left] and right < left):
                    child, left = child + 1, right
                if cost[top] < cost[left] or (cost[top] == cost[left] and top < left):
                    break
                heap[node] = left
                node = child
            heap[node] = top
            if size == 0 and pack < 0:
                for other in range(packs):
                    tree[leaves + other] = rooms[other] if sizes[other] < max_documents else 0
                for inner in range(leaves - 1, 0, -1):
                    tree[inner] = max(tree[2 * inner], tree[2 * inner + 1])
        node = 1
        if pack < 0:
            if tree[1] < length:
                continue
            while node < leaves:
                node = 2 * node if tree[2 * node] >= length else 2 * node + 1
            pack = node - leaves
        placed[document] = pack
        rooms[pack] -= length
        sizes[pack] += 1
        if node > 1 or leaves == 1:
            tree[node] = rooms[pack] if sizes[pack] < max_documents else 0
            while node > 1:
                node //= 2
                tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return placed


@compiled
def _roomiest(rooms: Integers, skipped: NDArray[np.bool_]) -> int:
    """The pack with the most free tokens that is not skipped; −1 if there is none."""
    found = -1
    for pack in range(len(rooms)):
        if not skipped[pack] and (found < 0 or rooms[pack] > rooms[found]):
            found = pack
    return found


@compiled
def _total(values: Integers) -> int:
    total = 0
    for value in values:
        total += value
    return total


@compiled
def _pass_room(
    taker: int,
    giver: int,
    placed: Integers,
    lengths: Integers,
    rooms: Integers,
    head: Integers,
    after: Integers,
) -> None:
    """Swap one document of two packs so that the giver's room shrinks as far as possible and the taker's grows."""
    best, first, second = 0, -1, -1
    x, y, before = head[taker], head[giver], -1
    while x >= 0 and best < rooms[giver]:
        while y >= 0 and lengths[x] - lengths[y] <= rooms[giver]:
            y, before = after[y], y
        # y is the first that is too short; the one before leaves the largest difference that fits
        if before >= 0 and lengths[x] - lengths[before] > best:
            best, first, second = lengths[x] - lengths[before], x, before
        x = after[x]
    if first < 0:
        return
    for document, pack in ((first, taker), (second, giver)):  # unlink
        if head[pack] == document:
            head[pack] = after[document]
        else:
            other = head[pack]
            while after[other] != document:
                other = after[other]
            after[other] = after[document]
    for document, pack in ((first, giver), (second, taker)):  # link, in falling order
        placed[document] = pack
        if head[pack] < 0 or head[pack] > document:
            after[document] = head[pack]
            head[pack] = document
        else:
            other = head[pack]
            while after[other] >= 0 and after[other] < document:
                other = after[other]
            after[document] = after[other]
            after[other] = document
    rooms[giver] -= best
    rooms[taker] += best


@compiled
def _collect(
    taker: int,
    enough: int,
    placed: Integers,
    lengths: Integers,
    rooms: Integers,
    head: Integers,
    after: Integers,
) -> None:
    """Pass the room of other packs, roomiest first, to one pack until it has enough."""
    done = np.zeros(len(rooms), dtype=np.bool_)
    done[taker] = True
    for _ in range(_GIVERS):
        giver = _roomiest(rooms, done)
        if rooms[taker] >= enough or giver < 0 or rooms[giver] == 0:
            return
        done[giver] = True
        _pass_room(taker, giver, placed, lengths, rooms, head, after)


@compiled
def _filling(placed: Integers, lengths: Integers, room: int, two: bool) -> tuple[int, int]:
    """The document without a pack, or the two, that fill `room` best without exceeding it; −1 for none."""
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
            if best < total <= room:
                best, first, second = total, long, short
            if total <= room:
                short -= 1
            else:
                long += 1
    return first, second


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
    """Find places for documents that have none by gathering scattered free tokens, in place.

        |AAAAAABB··|   A for C fills the first pack and leaves     |CCCCCCCBB·|
        |CCCCCCCDD·|   its room to the second                      |AAAAAADDEE|  ← E had no place

    The roomiest pack gets shorter documents of the others for longer ones of its own, each difference as close to the
    other's room as possible, until it has room for the longest `wanted` document without a pack.

    Then, if `spare` is not negative, packs are filled up in the same way: the one or two documents without a pack,
    wanted or not, that fill the roomiest pack best find a place there, while more than `spare` tokens are free.

    Args:
        placed: (documents,) pack of each, or −1.
        lengths: (documents,) tokens, falling.
        wanted: (documents,) must be placed if possible; the others only fill up.
        packs: packs.
        capacity: maximum tokens of a pack.
        max_documents: maximum documents of a pack.
        spare: free tokens of all packs together to keep; −1 = do not fill up.
    """
    rooms, sizes = np.full(packs, capacity, dtype=np.int64), np.zeros(packs, dtype=np.int64)
    head, after = np.full(packs, -1, dtype=np.int64), np.full(len(placed), -1, dtype=np.int64)
    for document in range(len(placed) - 1, -1, -1):
        pack = placed[document]
        if pack >= 0:
            rooms[pack] -= lengths[document]
            sizes[pack] += 1
            after[document] = head[pack]
            head[pack] = document
    full = np.zeros(packs, dtype=np.bool_)
    for pack in range(packs):
        full[pack] = sizes[pack] >= max_documents
    stuck, left = -1, _COLLECTIONS  # stuck: room of the roomiest pack when no swap could enlarge it
    for document in range(len(placed)):
        if placed[document] >= 0 or not wanted[document]:
            continue
        taker = _roomiest(rooms, full)
        if taker < 0:
            return
        if rooms[taker] < lengths[document] and rooms[taker] != stuck and left > 0:
            left -= 1
            _collect(taker, lengths[document], placed, lengths, rooms, head, after)
            if rooms[taker] < lengths[document]:
                stuck = rooms[taker]
        if rooms[taker] >= lengths[document]:
            placed[document] = taker  # not linked: later swaps leave it where it is
            rooms[taker] -= lengths[document]
            sizes[taker] += 1
            full[taker] = sizes[taker] >= max_documents
    while spare >= 0 and left > 0:
        left -= 1
        taker = _roomiest(rooms, full)
        if taker < 0:
            return
        _collect(taker, capacity, placed, lengths, rooms, head, after)
        first, second = _filling(
            placed, lengths, min(rooms[taker], _total(rooms) - spare), sizes[taker] + 1 < max_documents
        )
        if first < 0:
            return
        for document in (first, second):
            if document >= 0:
                placed[document] = taker
                rooms[taker] -= lengths[document]
                sizes[taker] += 1
        full[taker] = sizes[taker] >= max_documents


def falling(lengths: Integers) -> Integers:
    """Numbers of the documents, longest first, equal lengths by rising number."""
    bits = len(lengths).bit_length()
    keys = (int(lengths.max(initial=0)) - lengths) << bits
    keys |= np.arange(len(lengths), dtype=np.int64)
    keys.sort()
    keys &= (1 << bits) - 1
    return keys


def sums(placed: Integers, values: Integers, packs: int) -> Integers:
    """(packs,) int64 sum of `values` (one a document) over each pack; documents without a pack (−1) do not count."""
    total = np.zeros(packs, dtype=np.int64)
    inside = placed >= 0
    np.add.at(total, placed[inside], values[inside])
    return total


def fill_empty(placed: Integers, packs: int) -> None:
    """Move the shortest documents that share a pack into empty packs, while there are any, in place.

    Documents are in falling order.
    """
    sizes = np.bincount(placed[placed >= 0], minlength=packs)
    empty = np.flatnonzero(sizes == 0).tolist()
    for document in range(len(placed) - 1, -1, -1):
        if not empty:
            return
        if placed[document] >= 0 and sizes[placed[document]] > 1:
            sizes[placed[document]] -= 1
            placed[document] = empty.pop(0)


def place(
    lengths: Integers,
    costs: Integers,
    packs: int,
    capacity: int,
    max_documents: int,
    visit: Integers | None = None,
    wanted: NDArray[np.bool_] | None = None,
    spare: int = -1,
) -> Integers:
    """(documents,) pack of each document, −1 for none: spread by cost, then room gathered for what did not fit.

    Args:
        lengths: (documents,) falling.
        costs: (documents,) falling.
        packs: packs.
        capacity: maximum tokens of a pack.
        max_documents: maximum documents of a pack.
        visit: documents in the order in which they choose; None = longest first.
        wanted: (documents,) to be placed; the others only fill gaps. None = all.
        spare: free tokens to keep when gaps are filled; −1 = do not fill gaps.
    """
    if visit is None:
        visit = np.arange(len(lengths), dtype=np.int64)
    if wanted is None:
        wanted = np.ones(len(lengths), dtype=np.bool_)
    placed = spread(lengths, costs, visit, packs, capacity, max_documents)
    if placed.min() < 0:
        gather(placed, lengths, wanted, packs, capacity, max_documents, spare)
    fill_empty(placed, packs)
    return placed
