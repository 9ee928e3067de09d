"""Kernels that make patterns: the fullest pack of the remaining documents, and the heaviest pack for given weights.

The remaining documents are a histogram: `values` (lengths, falling) and `left` (documents of each). Lengths without
documents are skipped through `following`: following[i] = i if length i has documents, else a later index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import compiled
from multipack.planning.kernels.fit import trailing_zeros

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

WORK_PER_TRY = 16
"""Words that are shifted in the time of trying a document (approximately)."""


@compiled
def _next_left(following: Integers, number: int) -> int:
    """The first length with documents, from `number` on. Shortens the paths that it follows."""
    end = number
    while following[end] != end:
        end = following[end]
    while following[number] != end:
        step = following[number]
        following[number] = end
        number = step
    return end


@compiled
def _next_that_fits(values: Integers, following: Integers, number: int, room: int) -> int:
    """The longest length of at most `room` tokens with documents, from `number` on."""
    low, high = number, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= room:
            high = middle
        else:
            low = middle + 1
    return _next_left(following, low)


@compiled
def _search(
    values: Integers, left: Integers, following: Integers, capacity: int, nodes: int, best: Integers
) -> tuple[int, int, int]:
    """The fullest pack with the longest document: depth first, longest documents first, until a pack is full.

    Gives up after about `nodes` documents; with 0 it is greedy. The lengths of the pack are written to `best`.

    Returns:
        The number of documents in `best`, the room that they leave, and the number of documents tried.
    """
    path = np.empty(len(best), dtype=np.int64)
    used = np.zeros(len(best), dtype=np.int64)  # documents of path[depth]'s length in the path so far
    path[0] = best[0] = _next_left(following, 0)
    used[0] = 1
    depth, room, tried, number = 1, capacity - values[path[0]], 0, path[0]
    best_depth, best_room = 1, room
    while best_room > 0:
        number = len(values) if depth == len(path) else _next_that_fits(values, following, number, room)
        if number < len(values) and number == path[depth - 1] and left[number] == used[depth - 1]:
            number = _next_left(following, number + 1)
        if number < len(values):
            path[depth] = number
            used[depth] = used[depth - 1] + 1 if number == path[depth - 1] else 1
            depth, room, tried = depth + 1, room - values[number], tried + 1
            if room < best_room:
                best_depth, best_room = depth, room
                best[:depth] = path[:depth]
        elif depth == 1 or tried >= nodes:
            break
        else:
            depth -= 1
            room, number = room + values[path[depth]], path[depth] + 1
    return best_depth, best_room, tried


@compiled
def _sums(
    values: Integers, left: Integers, following: Integers, room: int, most_work: int, by: Integers
) -> tuple[int, int]:
    """All sums up to `room` of remaining documents, as a set of bits that is shifted by each document.

    One of the longest documents is in the pack already. `by[s]` is set to the length whose document made the sum s
    first. Ends with the sums so far after about `most_work` words.

    Returns:
        The largest sum, and the number of words shifted.
    """
    words, highest, first = (room >> 6) + 1, 0, _next_left(following, 0)
    reached = np.zeros(words, dtype=np.uint64)
    reached[0] = 1
    work = words
    number = _next_that_fits(values, following, first, room)
    while number < len(values) and highest < room and work < most_work:
        value = values[number]
        whole, part = value >> 6, np.uint64(value & 63)
        for _ in range(min(left[number] - (number == first), room // value)):
            before = highest
            is_new = False
            top = min(words - 1, (before + value) >> 6)
            work += top - whole + 1
            for word in range(top, whole - 1, -1):
                bits = reached[word - whole] << part
                if part > 0 and word > whole:
                    bits |= reached[word - whole - 1] >> (np.uint64(64) - part)
                bits &= ~reached[word]
                while bits != 0:
                    total = word * 64 + trailing_zeros(bits)
                    bits &= bits - np.uint64(1)
                    if total <= room:
                        reached[word] |= np.uint64(1) << np.uint64(total & 63)
                        by[total] = number
                        highest = max(highest, total)
                        is_new = True
            if not is_new or highest == room:
                break
        number = _next_left(following, number + 1)
    return highest, work


@compiled
def _trace(values: Integers, total: int, by: Integers, documents: int, best: Integers) -> int:
    """Write the documents of a sum after the first document of `best`; returns the number of documents.

    Too many documents for a pack leave `best` and `documents` unchanged.
    """
    size, rest = 1, total
    while rest > 0:
        size, rest = size + 1, rest - values[by[rest]]
    if size > len(best):
        return documents
    for place in range(size - 1, 0, -1):
        best[place] = by[total]
        total -= values[by[total]]
    return size


@compiled
def fill(
    values: Integers, counts: Integers, capacity: int, max_documents: int, nodes: int, work: int
) -> tuple[Integers, Integers, Integers, Integers]:
    """Packs one after another, each as full as the remaining documents allow, with the longest of them in it.

    `_search` is short; where it fails, `_sums` finds the fullest pack exactly. When the work is done, the remaining
    documents are packed greedily. A pattern is used as often as there are documents for it.

    Args:
        values: (distinct,) lengths, falling.
        counts: (distinct,) documents of each, also 0.
        capacity: tokens of a pack.
        max_documents: most documents of a pack.
        nodes: documents that a search tries.
        work: limit of the words that all sums shift, and of `WORK_PER_TRY` times the documents that all searches try.

    Returns:
        The fields of `Patterns`: starts (patterns + 1,), numbers (runs,), copies (runs,), packs (patterns,).
    """
    distinct, documents = len(values), counts.sum()
    left, following = counts.copy(), np.arange(distinct + 1)
    for number in range(distinct):
        if left[number] == 0:
            following[number] = number + 1
    starts = np.zeros(documents + 1, dtype=np.int64)
    numbers, copies = np.empty(documents, dtype=np.int64), np.empty(documents, dtype=np.int64)
    packs = np.empty(documents, dtype=np.int64)
    best = np.empty(min(max_documents, capacity // values[-1]), dtype=np.int64)
    by = np.empty(capacity + 1, dtype=np.int64)
    tries, patterns, runs = work // WORK_PER_TRY, 0, 0
    while _next_left(following, 0) < distinct:
        most_tries = min(nodes, tries)
        size, room, tried = _search(values, left, following, capacity, most_tries, best)
        tries = max(tries - tried, 0)
        if room > 0 and tried >= most_tries and work > 0:
            inside = capacity - values[best[0]]
            total, shifted = _sums(values, left, following, inside, work, by)
            work -= shifted
            if inside - total < room:
                size = _trace(values, total, by, size, best)
        for place in range(size):
            if place == 0 or best[place] != best[place - 1]:
                numbers[runs], copies[runs] = best[place], 0
                runs += 1
            copies[runs - 1] += 1
        times = left[best[0]]
        for run in range(starts[patterns], runs):
            times = min(times, left[numbers[run]] // copies[run])
        for run in range(starts[patterns], runs):
            number = numbers[run]
            left[number] -= times * copies[run]
            if left[number] == 0:
                following[number] = number + 1
        packs[patterns] = times
        patterns += 1
        starts[patterns] = runs
    return starts[: patterns + 1].copy(), numbers[:runs].copy(), copies[:runs].copy(), packs[:patterns].copy()


@compiled
def knapsack(values: Integers, weights: Integers, capacity: int, max_documents: int) -> tuple[int, Integers]:
    """The packs of greatest weight, by dynamic programming over tokens.

    A length may occur in a pack any number of times. If `max_documents` can bind, there is a table of rooms for each
    number of documents; otherwise one table suffices.

    Args:
        values: (distinct,) lengths, falling.
        weights: (distinct,) weight of a document of each length, at least 0.
        capacity: tokens of a pack.
        max_documents: most documents of a pack.

    Returns:
        The greatest weight, and (distinct + 1, distinct) documents of each length in packs: for each length a heaviest
        pack that holds a document of it, then the heaviest of all.
    """
    distinct, binds = len(values), max_documents < capacity // values[-1]
    layers = max_documents if binds else 1
    heaviest = np.zeros((layers + 1, capacity + 1), dtype=np.int64)
    last = np.full(
        (layers + 1, capacity + 1), -1, dtype=np.int32
    )  # a length in the heaviest pack; −1: a free token
    for layer in range(1, layers + 1):
        before = layer - 1 if binds else layer
        for room in range(values[-1], capacity + 1):
            best, number = heaviest[layer, room - 1], -1
            for candidate in range(distinct - 1, -1, -1):
                if values[candidate] > room:
                    break
                total = heaviest[before, room - values[candidate]] + weights[candidate]
                if total > best:
                    best, number = total, candidate
            heaviest[layer, room], last[layer, room] = best, number
    packs = np.zeros((distinct + 1, distinct), dtype=np.int64)
    for number in range(distinct + 1):
        layer, room = layers, capacity
        if number < distinct:
            packs[number, number] = 1
            room -= values[number]
            layer -= 1 if binds else 0
        while room > 0 and layer > 0:
            taken = last[layer, room]
            if taken < 0:
                room -= 1
                continue
            packs[number, taken] += 1
            room -= values[taken]
            layer -= 1 if binds else 0
    return heaviest[layers, capacity], packs
