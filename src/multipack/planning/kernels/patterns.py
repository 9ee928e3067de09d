"""Patterns, one at a time: the fullest pack that the documents left allow, and the best one for given weights.

Documents are a histogram: `values` (lengths, falling) and `left` (documents of each). Lengths that have run out are
skipped through `following`: following[i] = i while there are documents of length i, else a number further on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import compiled

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

TRY = 16
"""Words that are shifted in the time of trying a document, about."""


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
def _next_left(following: Integers, number: int) -> int:
    """The first length from `number` on of which there are documents; paths are shortened on the way."""
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
    """The longest length of at most `room` tokens, from `number` on, of which there are documents."""
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
    values: Integers,
    left: Integers,
    following: Integers,
    capacity: int,
    nodes: int,
    used: Integers,
    path: Integers,
    best: Integers,
) -> tuple[int, int, int]:
    """Depth first, longest documents first: the fullest pack with the longest document, or the first full one.

    About `nodes` documents are tried before it gives up; with 0 it is greedy.

    Returns:
        How many documents `best` holds, the room that they leave, and how many documents were tried.
    """
    path[0] = best[0] = _next_left(following, 0)
    used[path[0]] = 1
    depth, room, tried, number = 1, capacity - values[path[0]], 0, path[0]
    best_depth, best_room = 1, room
    while best_room > 0:
        number = len(values) if depth == len(path) else _next_that_fits(values, following, number, room)
        while number < len(values) and left[number] == used[number]:
            number = _next_left(following, number + 1)
        if number < len(values):
            path[depth] = number
            used[number] += 1
            depth, room, tried = depth + 1, room - values[number], tried + 1
            if room < best_room:
                best_depth, best_room = depth, room
                for place in range(depth):
                    best[place] = path[place]
        elif depth == 1 or tried >= nodes:
            break
        else:
            depth -= 1
            used[path[depth]] -= 1
            room, number = room + values[path[depth]], path[depth] + 1
    for place in range(depth):
        used[path[place]] = 0
    return best_depth, best_room, tried


@compiled
def _sums(
    values: Integers,
    left: Integers,
    following: Integers,
    room: int,
    most_work: int,
    reached: Words,
    by: Integers,
) -> tuple[int, int]:
    """All sums up to `room` that documents left can have, as bits: a sum's bit, shifted by a document.

    The first document (one of the longest left) is in the pack already. `by[s]` becomes the length
    whose document made the sum s first. After about `most_work` words it ends with the sums so far.

    Returns:
        The largest sum, and how many words were shifted.
    """
    words, highest, first = (room >> 6) + 1, 0, _next_left(following, 0)
    work = words
    for word in range(words):
        reached[word] = 0
    reached[0] = 1
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
                    total = word * 64 + _trailing_zeros(bits)
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
def fill(
    values: Integers,
    counts: Integers,
    capacity: int,
    max_documents: int,
    nodes: int,
    work: int,
    starts: Integers,
    numbers: Integers,
    copies: Integers,
    packs: Integers,
) -> int:
    """Packs one after another, each as full as the documents left allow, with the longest of them in it.

    The search of `_search` is short; where it fails, `_sums` gives the fullest pack exactly. When the work is
    done, what is left is packed greedily. A pattern is used as often as there are documents for it.

    Args:
        values: (distinct,) lengths, falling.
        counts: (distinct,) documents of each.
        capacity: tokens of a pack.
        max_documents: most documents of a pack.
        nodes: documents that a search tries.
        work: words that all sums together may shift, and `TRY` times the documents that all searches may try.
        starts: (documents + 1,) to be filled: where each pattern's runs begin.
        numbers: (documents,) to be filled: which length a run has.
        copies: (documents,) to be filled: how many documents of it.
        packs: (documents,) to be filled: how many packs are alike.

    Returns:
        How many patterns there are.
    """
    distinct, most = len(values), min(max_documents, capacity // values[-1])
    left, following = counts.copy(), np.arange(distinct + 1)
    used = np.zeros(distinct + 1, dtype=np.int64)
    path, best = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    reached, by = np.empty((capacity >> 6) + 1, dtype=np.uint64), np.empty(capacity + 1, dtype=np.int64)
    tries = work // TRY
    patterns = runs = 0
    starts[0] = 0
    while _next_left(following, 0) < distinct:
        most_tries = min(nodes, tries)
        documents, room, tried = _search(values, left, following, capacity, most_tries, used, path, best)
        tries = max(tries - tried, 0)
        if room > 0 and tried >= most_tries and work > 0:
            inside = capacity - values[best[0]]
            total, shifted = _sums(values, left, following, inside, work, reached, by)
            work -= shifted
            if inside - total < room:
                documents = _trace(values, total, by, documents, best)
        for place in range(documents):
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
    return patterns


@compiled
def _trace(values: Integers, total: int, by: Integers, documents: int, best: Integers) -> int:
    """Write the documents that make a sum behind the first one; unchanged if they are too many for a pack."""
    size, rest = 1, total
    while rest > 0:
        size, rest = size + 1, rest - values[by[rest]]
    if size > len(best):
        return documents
    place = size
    while total > 0:
        place -= 1
        best[place] = by[total]
        total -= values[by[total]]
    return size


@compiled
def knapsack(
    items: Integers,
    copies: Integers,
    values: Integers,
    weights: Integers,
    heaviest: NDArray[np.int64],
    taken: NDArray[np.bool_],
) -> None:
    """Fill `heaviest[c, r]`: the most that documents of at most r tokens weigh together, of which there are c at most.

    An item is `copies` documents of one length, taken or not. With one row (c = 0) the number of documents is free.

    Args:
        items: (items,) which length.
        copies: (items,) documents of it.
        values: (distinct,) lengths.
        weights: (distinct,) of a document of each length, at least 0.
        heaviest: (slots + 1, capacity + 1) zeros.
        taken: (items, slots + 1, capacity + 1) zeros: whether the best up to this item takes it.
    """
    slots, capacity = heaviest.shape[0] - 1, heaviest.shape[1] - 1
    for item in range(len(items)):
        size = copies[item] * values[items[item]]
        weight = copies[item] * weights[items[item]]
        documents = copies[item] if slots > 0 else 0
        if weight == 0:
            continue
        for slot in range(slots, documents - 1, -1):
            for room in range(capacity, size - 1, -1):
                sum_of_weights = heaviest[slot - documents, room - size] + weight
                if sum_of_weights > heaviest[slot, room]:
                    heaviest[slot, room] = sum_of_weights
                    taken[item, slot, room] = True


@compiled
def heaviest_packs(
    items: Integers,
    copies: Integers,
    values: Integers,
    counts: Integers,
    weights: Integers,
    taken: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """For each length, a heaviest pack that holds a document of it, and last the heaviest of all.

    Returns:
        (distinct + 1, distinct) documents of each length in each pack.
    """
    distinct, slots, capacity = len(values), taken.shape[1] - 1, taken.shape[2] - 1
    packs = np.zeros((distinct + 1, distinct), dtype=np.int64)
    for number in range(distinct + 1):
        slot, room = slots, capacity
        if number < distinct:
            packs[number, number] = 1
            room -= values[number]
            if slots > 0:
                slot -= 1
        for item in range(len(items) - 1, -1, -1):
            if taken[item, slot, room]:
                packs[number, items[item]] += copies[item]
                room -= copies[item] * values[items[item]]
                if slots > 0:
                    slot -= copies[item]
        if number < distinct:
            packs[number, number] = min(packs[number, number], counts[number])
    return packs
