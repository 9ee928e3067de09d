"""The inner loops of planning: plain loops over flat arrays, compiled.

All of them live in this one file because numba's disk cache notices a changed file, but not a change in a
function that another file's kernel calls. Lengths and costs are int64; a document's pack is its number in an
int64 array, −1 where it has none. Every loop is deterministic: ties go to the lower number.

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
) -> None:
    """Lower the dearest rank of one meeting by moves and swaps of single documents, in place.

    Packs are micro-batch-major (slot · world + rank), each in falling order. A rank's cost is the sum over
    the slots of the meeting. The dearest rank trades with the others, cheapest first, until it cannot gain a
    millionth of the mean any more; no pack is emptied.
    """
    packs = len(offsets) - 1
    tokens = np.zeros(packs, dtype=np.int64)
    load = np.zeros(world, dtype=np.int64)
    for pack in range(first_slot * world, last_slot * world):
        for position in range(offsets[pack], offsets[pack + 1]):
            tokens[pack] += lengths[order[position]]
            load[pack % world] += costs[order[position]]
    least = max(load.sum() // (world * 1_000_000), 0)
    for _ in range(50 * world + 200):
        dearest = int(np.argmax(load))
        improved = False
        for other in np.argsort(load, kind="mergesort"):
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
            return


@compiled
def dearest_bound(lengths: Integers, packs: int, capacity: int, linear: int, quadratic: int) -> int:
    """A proven lower bound on the cost of the dearest of `packs` packs of these documents (falling order).

    Some k packs hold the k longest documents, and at least T − (packs − k)·capacity tokens in all, of which
    the rest costs least when it is made of the shortest documents; for every k, the mean of those k packs
    is a bound. k = packs is the mean of all.
    """
    documents = len(lengths)
    tokens_of_shortest = np.zeros(documents + 1, dtype=np.int64)
    squares_of_shortest = np.zeros(documents + 1, dtype=np.int64)
    for index in range(documents):
        length = lengths[documents - 1 - index]
        tokens_of_shortest[index + 1] = tokens_of_shortest[index] + length
        squares_of_shortest[index + 1] = squares_of_shortest[index] + length * (length + 1)
    total = tokens_of_shortest[documents]
    bound, longest_tokens, squares_of_longest = 0, 0, 0
    for k in range(1, packs + 1):
        if k <= documents:
            longest_tokens += lengths[k - 1]
            squares_of_longest += lengths[k - 1] * (lengths[k - 1] + 1)
        tokens = max(total - (packs - k) * capacity, longest_tokens)
        missing = tokens - longest_tokens
        whole = np.searchsorted(tokens_of_shortest, missing, side="right") - 1
        squares = squares_of_longest + squares_of_shortest[whole]
        if whole < documents:
            part = missing - tokens_of_shortest[whole]
            squares += part * (lengths[documents - 1 - whole] + 1)
        cost = linear * tokens + quadratic * squares
        bound = max(bound, (cost + k - 1) // k)
    return bound
