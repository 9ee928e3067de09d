"""Kernels that make patterns: the fullest pack of the remaining documents, and the heaviest pack for given weights.

The remaining documents are a histogram: `values` (lengths, falling) and `left` (documents of each). Lengths without
documents are skipped through `following`: following[i] = i if length i has documents, else a later index.
"""

from __future__ import annotations

import numpy as np

from multipack.planning.kernels import Compiled
from multipack.planning.lengths import Integers


@Compiled
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


@Compiled
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


@Compiled
def _search(
    values: Integers, left: Integers, following: Integers, capacity: int, nodes: int, best: Integers
) -> tuple[int, int]:
    """The fullest pack with the longest document: depth first, longest documents first, until a pack is full.

    Gives up after about `nodes` documents; with 0 it is greedy. The lengths of the pack are written to `best`.

    Returns:
        The number of documents in `best`, and the number of documents tried.
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
    return best_depth, tried


@Compiled
def fill(
    values: Integers, counts: Integers, capacity: int, max_documents: int, nodes: int, tries: int
) -> tuple[Integers, Integers, Integers, Integers]:
    """Packs one after another, each as full as the remaining documents allow, with the longest of them in it.

    A pattern is used as often as there are documents for it. After all tries, packs are filled greedily.

    The search for one pack tries about `nodes` documents, all searches `tries`. Counts may be 0.

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
    patterns, runs = 0, 0
    while _next_left(following, 0) < distinct:
        size, tried = _search(values, left, following, capacity, min(nodes, tries), best)
        tries = max(tries - tried, 0)
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


@Compiled
def knapsack(values: Integers, weights: Integers, capacity: int, max_documents: int) -> tuple[int, Integers]:
    """The packs of greatest weight, by dynamic programming over tokens.

    A length may occur in a pack any number of times. If `max_documents` can bind, there is a table of rooms for each
    number of documents; otherwise one table suffices.

    `values` are lengths, falling; `weights`, at least 0, are the weights of a document of each length.

    Returns:
        The greatest weight, and (distinct + 1, distinct) documents of each length in packs: for each length a heaviest
        pack that holds a document of it, then the heaviest of all.
    """
    distinct, binds = len(values), max_documents < capacity // values[-1]
    layers = max_documents if binds else 1
    heaviest = np.zeros((layers + 1, capacity + 1), dtype=np.int64)
    # A length in the heaviest pack; −1: a free token.
    last = np.full((layers + 1, capacity + 1), -1, dtype=np.int32)
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
