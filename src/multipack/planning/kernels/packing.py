"""Packing all documents, each into a pack of its own choice: next fit, first fit, best fit.

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
def descending(lengths: Integers) -> Integers:
    """Document numbers by falling length, equal lengths in their own order (a counting sort)."""
    longest = lengths.max()
    starts = np.zeros(longest + 2, dtype=np.int64)
    for length in lengths:
        starts[longest - length + 1] += 1
    for bucket in range(1, longest + 2):
        starts[bucket] += starts[bucket - 1]
    order = np.empty(len(lengths), dtype=np.int64)
    for document in range(len(lengths)):
        bucket = longest - lengths[document]
        order[starts[bucket]] = document
        starts[bucket] += 1
    return order


@compiled
def next_fit(lengths: Integers, capacity: int, max_documents: int) -> tuple[Integers, int]:
    """Each document into the open pack, or into a new one: keeps order. Returns packs and their number."""
    packs = np.empty(len(lengths), dtype=np.int64)
    pack, room, free = -1, 0, 0
    for document in range(len(lengths)):
        if lengths[document] > room or free == 0:
            pack, room, free = pack + 1, capacity, max_documents
        packs[document] = pack
        room -= lengths[document]
        free -= 1
    return packs, pack + 1


@compiled
def first_fit(lengths: Integers, capacity: int, max_documents: int) -> tuple[Integers, int]:
    """Each document into the first pack with room: a tree of the largest room below each node."""
    leaves = 1
    while leaves < len(lengths):
        leaves *= 2
    tree = np.full(2 * leaves, capacity, dtype=np.int64)
    sizes = np.zeros(leaves, dtype=np.int64)
    packs = np.empty(len(lengths), dtype=np.int64)
    used = 0
    for document in range(len(lengths)):
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < lengths[document]:
                node += 1
        pack = node - leaves
        packs[document] = pack
        used = max(used, pack + 1)
        sizes[pack] += 1
        tree[node] = tree[node] - lengths[document] if sizes[pack] < max_documents else 0
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return packs, used


@compiled
def best_fit(lengths: Integers, capacity: int, max_documents: int) -> tuple[Integers, int]:
    """Each document into the pack whose room is tightest, or into a new one. O(documents + capacity)."""
    head = np.full(capacity + 1, -1, dtype=np.int64)
    fine = np.zeros((capacity >> 6) + 1, dtype=np.uint64)
    coarse = np.zeros((capacity >> 12) + 1, dtype=np.uint64)
    after = np.empty(len(lengths), dtype=np.int64)
    sizes = np.zeros(len(lengths), dtype=np.int64)
    packs = np.empty(len(lengths), dtype=np.int64)
    used = 0
    for document in range(len(lengths)):
        pack, room = _take_tightest(lengths[document], head, after, fine, coarse)
        if pack < 0:
            pack, room = used, capacity
            used += 1
        packs[document] = pack
        sizes[pack] += 1
        room -= lengths[document]
        if room > 0 and sizes[pack] < max_documents:
            _put(room, pack, head, after, fine, coarse)
    return packs, used
