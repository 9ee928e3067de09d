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
def _take_tightest(
    length: int, head: Integers, after: Integers, fine: Words, coarse: Words
) -> tuple[int, int]:
    """Remove a pack of the least room ≥ length from Rooms and return it with its room; (−1, 0) if none."""
    word = length >> 6
    if word >= len(fine):
        return -1, 0
    bits = fine[word] >> np.uint64(length & 63) << np.uint64(length & 63)
    if bits == np.uint64(0):
        upper = (word + 1) >> 6
        if upper >= len(coarse):
            return -1, 0
        shift = np.uint64((word + 1) & 63)
        words = coarse[upper] >> shift << shift
        while words == np.uint64(0):
            upper += 1
            if upper >= len(coarse):
                return -1, 0
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
    return pack, room


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
    lengths: Integers, costs: Integers, packs: int, capacity: int, max_documents: int, spread: bool
) -> Integers:
    """Place documents, in the order given, into a fixed number of packs; −1 for those that find no room.

    With `spread`, a document goes into the cheapest pack (longest processing time first, when documents come
    in falling order). A pack without room for the document at hand leaves the heap for good, and once the
    heap is empty the rest goes by best fit to the rooms that remain. Without `spread` it is best fit alone.
    """
    head = np.full(capacity + 1, -1, dtype=np.int64)
    fine = np.zeros((capacity >> 6) + 1, dtype=np.uint64)
    coarse = np.zeros((capacity >> 12) + 1, dtype=np.uint64)
    after = np.empty(packs, dtype=np.int64)
    rooms = np.full(packs, capacity, dtype=np.int64)
    sizes = np.zeros(packs, dtype=np.int64)
    cost = np.zeros(packs, dtype=np.int64)
    heap = np.arange(packs)
    size = packs
    if not spread:
        size = 0
        for pack in range(packs - 1, -1, -1):
            _put(capacity, pack, head, after, fine, coarse)
    placed = np.full(len(lengths), -1, dtype=np.int64)
    for document in range(len(lengths)):
        length = lengths[document]
        pack = -1
        while size > 0 and pack < 0:
            top = heap[0]
            if rooms[top] >= length and sizes[top] < max_documents:
                pack = top
                cost[pack] += costs[document]
            else:
                if rooms[top] > 0 and sizes[top] < max_documents:
                    _put(rooms[top], top, head, after, fine, coarse)
                size -= 1
                heap[0] = heap[size]
            if size > 0:
                _sift_down(heap, size, cost)
        if pack < 0:
            pack, room = _take_tightest(length, head, after, fine, coarse)
            if pack < 0:
                continue
            if room > length and sizes[pack] + 1 < max_documents:
                _put(room - length, pack, head, after, fine, coarse)
        placed[document] = pack
        rooms[pack] -= length
        sizes[pack] += 1
    return placed


@compiled
def fill_empty(placed: Integers, lengths: Integers, packs: int) -> None:
    """Move the shortest documents that have company into empty packs, while there are any (in place)."""
    sizes = np.zeros(packs, dtype=np.int64)
    for pack in placed:
        if pack >= 0:
            sizes[pack] += 1
    order = np.argsort(lengths, kind="mergesort")  # stable: ties the same everywhere
    shortest = 0
    for empty in range(packs):
        if sizes[empty] > 0:
            continue
        while shortest < len(order) and (placed[order[shortest]] < 0 or sizes[placed[order[shortest]]] < 2):
            shortest += 1
        if shortest == len(order):
            return
        document = order[shortest]
        sizes[placed[document]] -= 1
        placed[document] = empty
        sizes[empty] = 1
        shortest += 1
