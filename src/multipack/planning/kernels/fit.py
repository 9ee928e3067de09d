"""Kernels that pack all documents: next fit, first fit, best fit.

Best fit works on the histogram. Packs of equal contents are one *group*: consecutive packs in the order in which they
were opened.

    group     packs  room  contents
    0         0–3    17    2×15
    1         4      32    1×15                  the last document of 15 tokens opened pack 4
    2         5–9    9     1×14, 2×12

Groups of equal room form a *queue*. A bit marks each queue that is not empty, so that the smallest room of at least
l tokens is found 64 rooms at a time:

    room      0  1  2  3  4  5  6  7 …
    last      −  7  −  −  2  −  −  9             the queue's last group; after[last] is its first
    after     group 2 → 5 → 0 → 2                the next group of the same queue, circular
    bits      0  1  0  0  1  0  0  1             one bit a room, 64 to a word
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import Compiled
from multipack.planning.lengths import Integers

Words = NDArray[np.uint64]


@Compiled
def _enqueue(room: int, group: int, last: Integers, after: Integers, bits: Words) -> None:
    """Append a group to the queue of a room. Groups count from 1, so that a table of zeros is empty."""
    if last[room] == 0:
        bits[room >> 6] |= np.uint64(1) << np.uint64(room & 63)
        after[group] = group
    else:
        after[group] = after[last[room]]
        after[last[room]] = group
    last[room] = group


@Compiled
def _dequeue(room: int, last: Integers, after: Integers, bits: Words) -> None:
    """Remove the first group of the queue of a room."""
    first = after[last[room]]
    if first != last[room]:
        after[last[room]] = after[first]
        return
    last[room] = 0
    bits[room >> 6] &= ~(np.uint64(1) << np.uint64(room & 63))


@Compiled
def _smallest_room(length: int, last: Integers, bits: Words) -> int:
    """The smallest room ≥ length whose queue is not empty; −1 if there is none."""
    room = length
    while room < len(last):
        if bits[room >> 6] >> np.uint64(room & 63) == 0:
            room = (room | 63) + 1
        elif last[room] == 0:
            room += 1
        else:
            return room
    return -1


@Compiled
def next_fit(lengths: Integers, capacity: int, max_documents: int) -> tuple[Integers, int]:
    """Each document into the open pack, or into a new one. Returns each document's pack, and the number of packs."""
    packs = np.empty(len(lengths), dtype=np.int64)
    pack, room, free = -1, 0, 0
    for document in range(len(lengths)):
        if lengths[document] > room or free == 0:
            pack, room, free = pack + 1, capacity, max_documents
        packs[document] = pack
        room -= lengths[document]
        free -= 1
    return packs, pack + 1


@Compiled
def first_fit(lengths: Integers, capacity: int, max_documents: int) -> tuple[Integers, int]:
    """Each document into the first pack with room, found in a tree of the largest room below each node."""
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


@Compiled
def best_fit(
    values: Integers, counts: Integers, capacity: int, max_documents: int, last: Integers, bits: Words
) -> tuple[Integers, Integers, Integers, Integers]:
    """Exact best fit decreasing on a histogram: every document into the smallest room that fits, or into a new pack.

    A document of v tokens in the smallest room r ≥ v leaves r − v. If that is still at least v, it is the smallest room
    for the next document of v tokens, since no room was between v and r. So the documents of one length fill ⌊r / v⌋
    places of a pack at once, and groups of equal packs one after another. Equal rooms wait in a queue.
    `values` are (distinct,) lengths, falling, with `counts` documents of each; `last` and `bits` are zeros for
    capacity + 1 rooms.

    Returns:
        (groups,) first pack of each group; (groups,) its number of packs; (groups,) its latest run; (runs, 3) index of
        the length, documents of it, and the previous run of the pack or −1.
    """
    limit = 2 * len(values) + 2  # a length splits one group into three or opens two
    # Of each group: its first pack, packs, documents that still fit into each, latest run; the next group of its room.
    opened, packs, slots, newest, after = np.empty((5, limit), dtype=np.int64)
    runs = np.empty((counts.sum(), 3), dtype=np.int64)  # each run places at least one document
    groups, num_runs, num_packs, shortest = 1, 0, 0, values[-1]
    for number in range(len(values)):
        value, left = values[number], counts[number]
        while left > 0:
            room = _smallest_room(value, last, bits)
            if room >= 0:
                group = after[last[room]]
            else:
                group, groups = groups, groups + 1
                each = min(capacity // value, max_documents)
                opened[group], packs[group] = num_packs, (left + each - 1) // each
                slots[group], newest[group] = max_documents, -1
                num_packs += packs[group]
            inside = capacity if room < 0 else room
            each = min(inside // value, slots[group])
            whole = min(packs[group], left // each)
            part = left - whole * each if whole < packs[group] else 0
            changed = whole + (part > 0)
            first, free, before = opened[group], slots[group], newest[group]
            left -= whole * each + part
            if changed < packs[group]:  # the other packs of the group are unchanged
                opened[group] += changed
                packs[group] -= changed
                group = 0
            elif room >= 0:
                _dequeue(room, last, after, bits)
            for size, copies in ((whole, each), (changed - whole, part)):
                if size == 0:
                    continue
                if group == 0:
                    group, groups = groups, groups + 1
                runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2] = number, copies, before
                opened[group], packs[group] = first, size
                slots[group], newest[group] = free - copies, num_runs
                if slots[group] > 0 and inside - copies * value >= shortest:
                    _enqueue(inside - copies * value, group, last, after, bits)
                first += size
                num_runs += 1
                group = 0
    return opened[1:groups], packs[1:groups], newest[1:groups], runs[:num_runs]


@Compiled
def unroll(order: Integers, newest: Integers, runs: Integers) -> tuple[Integers, Integers, Integers]:
    """The runs of the groups, in the given order, as flat arrays.

    Returns:
        (groups + 1,) offsets of the groups' runs; (runs,) index of the length, longest first; (runs,) documents of it.
    """
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    for pattern in range(len(order)):
        depth, run = 0, newest[order[pattern]]
        while run >= 0:
            depth, run = depth + 1, runs[run, 2]
        starts[pattern + 1] = starts[pattern] + depth
    numbers = np.empty(starts[-1], dtype=np.int64)
    copies = np.empty(starts[-1], dtype=np.int64)
    for pattern in range(len(order)):
        run = newest[order[pattern]]
        for place in range(starts[pattern + 1] - 1, starts[pattern] - 1, -1):
            numbers[place], copies[place], run = runs[run, 0], runs[run, 1], runs[run, 2]
    return starts, numbers, copies


@Compiled
def hand_out(
    by_length: Integers,
    counts: Integers,
    starts: Integers,
    numbers: Integers,
    copies: Integers,
    packs: Integers,
) -> tuple[Integers, Integers]:
    """Fill patterns with documents, pack after pack. Places for more documents than there are stay empty.

    `by_length` are document numbers by falling length, `counts` the documents of each length; the others are the fields
    of `Patterns`.

    Returns:
        (documents,) document numbers, pack after pack, and (packs + 1,) offsets of packs; no pack is empty.
    """
    cursors = np.empty(len(counts), dtype=np.int64)
    ends = np.empty(len(counts), dtype=np.int64)
    end, most = 0, 0
    for number in range(len(counts)):
        cursors[number] = end
        end += counts[number]
        ends[number] = end
    for pattern in range(len(packs)):
        most += packs[pattern]
    order = np.empty(len(by_length), dtype=np.int64)
    offsets = np.zeros(most + 1, dtype=np.int64)
    made, place = 0, 0
    for pattern in range(len(packs)):
        for _ in range(packs[pattern]):
            for run in range(starts[pattern], starts[pattern + 1]):
                number = numbers[run]
                cursor = cursors[number]
                stop = min(cursor + copies[run], ends[number])
                for source in range(cursor, stop):
                    order[place] = by_length[source]
                    place += 1
                cursors[number] = stop
            if place > offsets[made]:
                made += 1
                offsets[made] = place
    return order[:place], offsets[: made + 1]
