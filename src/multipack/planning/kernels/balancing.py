"""Balance packs between ranks: documents are moved or swapped, or two packs are rearranged as a whole.

Documents are numbered in descending order of length; `placed` holds the pack of each, −1 for none. Packs are
micro-batch-major:
pack slot · world + rank. A rank's load is the sum over its packs. In the kernels the documents of a pack form a
linked list, longest first: `head[pack]` is the first, `after[document]` the next, −1 the end.

`exchange` works on single documents. Where a pack holds few of them, `rearrange` solves two packs at once by meeting in
the middle (Horowitz and Sahni 1974, "Computing partitions with applications to the knapsack problem"): of up to
2 · half documents, the sums over all subsets of each half are listed in ascending order; one list is traversed upwards
and the other downwards, and pairs of sums close to half of the load difference are compared.

    pack x   A C D F       documents that may move: A C | F b         sums of A, C: 0, A, C, A + C
    pack y   b e g                                                    sums of F, b: −b, 0, F − b, F
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import compiled

Integers = NDArray[np.int64]

_PARTNERS = 64  # least loaded ranks that the most loaded one tries; fewer where each has many packs
_FEWEST_PARTNERS = 4
_TINY = 1_000_000  # a swap gains at least 1/1,000,000 of the mean load
_WORTH = 64  # … and 1/64 of the excess over the target: `rearrange` does the rest
_TURNS = 50  # swaps for each rank at most; a few are typical
_LOOKS = 16  # pairs of sums that are compared, for each sum of a list
_SQUARES = 1000  # with `joint`, a difference of one token counts as much as this many squares


@compiled
def _link(placed: Integers, packs: int) -> tuple[Integers, Integers]:
    """The linked lists of all packs: (packs,) `head` and (documents,) `after`."""
    head, after = np.full(packs, -1, dtype=np.int64), np.full(len(placed), -1, dtype=np.int64)
    for document in range(len(placed) - 1, -1, -1):
        pack = placed[document]
        if pack >= 0:
            after[document] = head[pack]
            head[pack] = document
    return head, after


@compiled
def _move(document: int, target: int, placed: Integers, head: Integers, after: Integers) -> None:
    """Move a document into another pack, whose list stays in descending order of length."""
    source = placed[document]
    if head[source] == document:
        head[source] = after[document]
    else:
        before = head[source]
        while after[before] != document:
            before = after[before]
        after[before] = after[document]
    placed[document] = target
    if head[target] < 0 or head[target] > document:
        after[document] = head[target]
        head[target] = document
    else:
        before = head[target]
        while after[before] >= 0 and after[before] < document:
            before = after[before]
        after[document] = after[before]
        after[before] = document


@compiled
def _best_swap(
    mine: int,
    theirs: int,
    after: Integers,
    lengths: Integers,
    costs: Integers,
    gap: int,
    room: int,
    can_move: bool,
    least: int,
) -> tuple[int, int, int]:
    """Find the swap of two documents, or the move of one, that brings two loads closest to each other.

    Loads differ by `gap` > 0. Swapping x for y changes this to gap − 2·(cost x − cost y), so the gain, min(change,
    gap − change), is largest if the change is nearest to half of the gap. Both lists are in descending order, so the
    best y only advances as x becomes shorter, and two pointers suffice.

    Args:
        mine: first document of the more loaded pack.
        theirs: first document of the other pack.
        after: (documents,) next document in the pack.
        lengths: (documents,) tokens.
        costs: (documents,) costs.
        gap: difference of the loads.
        room: free tokens of the other pack.
        can_move: whether a document may move without another one in return.
        least: gain that a swap must exceed.

    Returns:
        (gain, x, y); y = −1 for a move, x = −1 if none exceeds `least`.
    """
    gain, first, second = least, -1, -1
    near, near_before = theirs, -1  # first y for which the change is at least half of the gap
    short, short_before = theirs, -1  # first y that is too short to make room for x
    x = mine
    while x >= 0:
        while near >= 0 and 2 * (costs[x] - costs[near]) < gap:
            near, near_before = after[near], near
        while short >= 0 and lengths[x] - lengths[short] <= room:
            short, short_before = after[short], short
        fits = near >= 0 and (short < 0 or near < short)
        for y in (near if fits else short_before, near_before if fits else -1):
            if y >= 0:
                change = costs[x] - costs[y]
                if min(change, gap - change) > gain:
                    gain, first, second = min(change, gap - change), x, y
        if can_move and lengths[x] <= room and min(costs[x], gap - costs[x]) > gain:
            gain, first, second = min(costs[x], gap - costs[x]), x, -1
        x = after[x]
    return gain, first, second


@compiled
def exchange(
    placed: Integers,
    lengths: Integers,
    costs: Integers,
    capacity: int,
    max_documents: int,
    world: int,
    slots: int,
    target: int,
) -> int:
    """Lower the load of the most loaded rank by moves and swaps of single documents, in place.

    The most loaded rank exchanges documents with the least loaded ones until its load is at most `target`, or until no
    exchange gains enough. No pack becomes empty.

    Args:
        placed: (documents,) pack of each document, or −1.
        lengths: (documents,) tokens, descending.
        costs: (documents,) costs, descending.
        capacity: maximum tokens of a pack.
        max_documents: maximum documents of a pack.
        world: ranks.
        slots: packs of each rank.
        target: load at which to stop.

    Returns:
        The load of the most loaded rank.
    """
    packs = world * slots
    head, after = _link(placed, packs)
    tokens, sizes = np.zeros(packs, dtype=np.int64), np.zeros(packs, dtype=np.int64)
    load = np.zeros(world, dtype=np.int64)
    total = 0
    for document in range(len(placed)):
        pack = placed[document]
        if pack >= 0:
            tokens[pack] += lengths[document]
            sizes[pack] += 1
            load[pack % world] += costs[document]
            total += costs[document]
    tiny = total // (world * _TINY)
    partners = max(_PARTNERS // slots, _FEWEST_PARTNERS)
    asked = np.full(world, -1, dtype=np.int64)  # the turn in which a rank was tried last
    most = 0
    for turn in range(_TURNS * world + 200):
        most = 0
        for rank in range(world):
            if load[rank] > load[most]:
                most = rank
        if load[most] <= target:
            break
        least = max(tiny, (load[most] - target) // _WORTH)
        x, y, other = -1, -1, -1
        for _ in range(partners):
            other = -1
            for rank in range(world):
                if asked[rank] < turn and (other < 0 or load[rank] < load[other]):
                    other = rank
            if other < 0 or load[most] - load[other] <= 2 * least + 1:
                break
            asked[other] = turn
            gap, gain, theirs = load[most] - load[other], least, -1
            for a in range(most, packs, world):
                for b in range(other, packs, world):
                    can_move = sizes[a] > 1 and sizes[b] < max_documents
                    found, given, taken = _best_swap(
                        head[a], head[b], after, lengths, costs, gap, capacity - tokens[b], can_move, gain
                    )
                    if given >= 0:
                        gain, x, y, theirs = found, given, taken, b
            if x >= 0:
                mine = placed[x]
                _move(x, theirs, placed, head, after)
                change, shift, count = costs[x], lengths[x], 1
                if y >= 0:
                    _move(y, mine, placed, head, after)
                    change, shift, count = change - costs[y], shift - lengths[y], 0
                load[most] -= change
                load[other] += change
                tokens[mine] -= shift
                tokens[theirs] += shift
                sizes[mine] -= count
                sizes[theirs] += count
                break
        if x < 0:
            break
    return load[most]


@compiled
def _random(seed: int) -> int:
    """The next state of a linear congruential generator modulo 2^31 (the constants of ANSI C)."""
    return (seed * 1103515245 + 12345) & 0x7FFFFFFF


@compiled
def _subset_sums(first: Integers, second: Integers) -> Integers:
    """(3, 2^n): the sums of `first` over all subsets, ascending; their sums of `second`; the subsets as bits."""
    new, old = (
        np.zeros((3, 1 << len(first)), dtype=np.int64),
        np.zeros((3, 1 << len(first)), dtype=np.int64),
    )
    size = 1
    for item in range(len(first)):
        new, old = old, new
        without, with_item = 0, 0
        for index in range(2 * size):
            plain = without < size and (
                with_item == size or old[0, without] <= old[0, with_item] + first[item]
            )
            source = without if plain else with_item
            new[0, index] = old[0, source] + (0 if plain else first[item])
            new[1, index] = old[1, source] + (0 if plain else second[item])
            new[2, index] = old[2, source] + (0 if plain else 1 << item)
            without += 1 if plain else 0
            with_item += 0 if plain else 1
        size *= 2
    return new


@compiled
def _best_subset(
    first: Integers, second: Integers, gap: int, other_gap: int, joint: bool, limits: Integers, good: int
) -> int:
    """Find the subset of documents whose move to the other pack minimizes the load difference.

    Moving a subset with sums (f, s) leaves the differences gap − 2·f and other_gap − 2·s. Without `joint` the first is
    minimized; with it the larger of both, the first weighted. The search is first for a difference below `good`, then
    below 8 times that bound, and so on; it is limited by the number of pairs compared.

    Args:
        first: (n,) signed loads of the documents, negative for those of the other pack.
        second: (n,) the same for the second load.
        gap: difference of the first loads.
        other_gap: difference of the second loads.
        joint: whether both loads are balanced.
        limits: (4,) minimum and maximum net number of tokens to move, then of documents.
        good: a sufficiently small difference.

    Returns:
        The subset as bits; 0 if none lowers the difference.
    """
    weight = _SQUARES if joint else 1
    half = len(first) // 2
    low, high = _subset_sums(first[:half], second[:half]), _subset_sums(first[half:], second[half:])
    size, other_size = 1 << half, 1 << (len(first) - half)
    most = max(abs(gap) * weight, abs(other_gap) if joint else 0)
    chosen, looks, bound = 0, 0, min(good, most)
    while True:
        best, start = bound, other_size
        for index in range(size):
            reach = best // weight
            least_sum = (gap - reach) // 2 - low[0, index]
            most_sum = (gap + reach) // 2 - low[0, index]
            while start > 0 and high[0, start - 1] >= least_sum:
                start -= 1
            here = start
            while here < other_size and high[0, here] <= most_sum and looks < _LOOKS * size:
                looks += 1
                sum_first, sum_second = low[0, index] + high[0, here], low[1, index] + high[1, here]
                left = abs(gap - 2 * sum_first) * weight
                if joint:
                    left = max(left, abs(other_gap - 2 * sum_second))
                tokens = sum_first if joint else sum_second
                if left < best and limits[0] <= tokens <= limits[1]:
                    subset = low[2, index] | (high[2, here] << half)
                    documents = 0
                    for item in range(len(first)):
                        if subset >> item & 1:
                            documents += 1 if first[item] > 0 else -1
                    if limits[2] <= documents <= limits[3]:
                        best, chosen = left, subset
                here += 1
        if chosen or bound == most or looks == _LOOKS * size:
            return chosen
        bound = min(8 * bound, most)


@compiled
def _candidates(
    x: int, y: int, half: int, seed: int, lengths: Integers, head: Integers, after: Integers
) -> tuple[Integers, int]:
    """Documents of two packs that may move: one of each length of a pack, at most 2 · half, drawn at random.

    They are interleaved, so that both halves of the list hold documents of both packs.

    Returns:
        The documents, and the next seed.
    """
    count = 0
    for pack in (x, y):
        document, last = head[pack], -1
        while document >= 0:
            count += 1 if lengths[document] != last else 0
            last = lengths[document]
            document = after[document]
    size = min(2 * half, count)
    found = np.empty(size, dtype=np.int64)
    taken = 0
    for pack in (x, y):
        document, last = head[pack], -1
        while document >= 0:
            if lengths[document] != last:
                seed = _random(seed)
                # Selection sampling (Knuth, vol. 2, 3.4.2, algorithm S), which keeps the order.
                if (seed >> 8) % count < size - taken:
                    found[taken // 2 + (taken % 2) * ((size + 1) // 2)] = document
                    taken += 1
                count -= 1
            last = lengths[document]
            document = after[document]
    return found, seed


@compiled
def _opposite(load: Integers, other: Integers, mean: int, other_mean: int) -> tuple[int, int]:
    """For `joint`: the rank furthest from the mean loads, and the rank that differs most in the opposite direction."""
    here, furthest = 0, -1
    for rank in range(len(load)):
        far = max(abs(load[rank] - mean) * _SQUARES, abs(other[rank] - other_mean))
        if far > furthest:
            here, furthest = rank, far
    by_first = abs(load[here] - mean) * _SQUARES >= abs(other[here] - other_mean)
    below = load[here] < mean if by_first else other[here] < other_mean
    there, most = -1, 0
    for rank in range(len(load)):
        apart = load[here] - load[rank] if by_first else other[here] - other[rank]
        apart = -apart if below else apart
        if rank != here and (there < 0 or apart > most):
            there, most = rank, apart
    return here, there


@compiled
def rearrange(
    placed: Integers,
    lengths: Integers,
    costs: Integers,
    capacity: int,
    max_documents: int,
    world: int,
    slots: int,
    joint: bool,
    half: int,
    attempts: int,
    target: int,
) -> None:
    """Rearrange pairs of packs, in place, until the ranks are balanced or the attempts are used up.

    Without `joint` a rank's load is its cost: the most loaded rank is rearranged with the least loaded one (after
    failures with the next) until its load is at most `target`. With `joint` loads are tokens and sums of squares:
    first neighbors in a hypercube of ranks, then the rank furthest from the mean and the one most opposite to it,
    or a random one after a failure.

    Args:
        placed: (documents,) pack of each document; every document has one.
        lengths: (documents,) tokens, descending.
        costs: (documents,) costs, descending.
        capacity: maximum tokens of a pack.
        max_documents: maximum documents of a pack.
        world: ranks.
        slots: packs of each rank.
        joint: whether to balance tokens and squares instead of costs.
        half: number of documents in each half of the search, which takes time and memory of 2^half.
        attempts: number of pairs of packs to try.
        target: load at which to stop, without `joint`.
    """
    packs = world * slots
    head, after = _link(placed, packs)
    tokens, sizes = np.zeros(packs, dtype=np.int64), np.zeros(packs, dtype=np.int64)
    load, other = np.zeros(world, dtype=np.int64), np.zeros(world, dtype=np.int64)
    for document in range(len(placed)):
        pack, length = placed[document], lengths[document]
        tokens[pack] += length
        sizes[pack] += 1
        load[pack % world] += length if joint else costs[document]
        other[pack % world] += length * length if joint else length
    mean, other_mean = 0, 0
    for rank in range(world):
        mean += load[rank]
        other_mean += other[rank]
    mean, other_mean = mean // world, other_mean // world
    good = 8 * _SQUARES if joint else max(mean // 100_000, 1)
    asked = np.zeros(world, dtype=np.bool_)
    limits = np.empty(4, dtype=np.int64)
    seed, failures, cube = 1, 0, 0
    while joint and 1 << (cube + 1) <= world:
        cube += 1
    for attempt in range(attempts):
        if joint and attempt < cube * (world // 2):
            bit, index = 1 << (attempt // (world // 2)), attempt % (world // 2)
            here = (index // bit) * 2 * bit + index % bit
            there = here | bit
            if there >= world:
                continue
        elif joint:
            here, there = _opposite(load, other, mean, other_mean)
            if failures:
                seed = _random(seed)
                there = (here + 1 + (seed >> 8) % (world - 1)) % world
        else:
            here, there = 0, -1
            for rank in range(world):
                here = rank if load[rank] > load[here] else here
            if load[here] <= target or 2 * failures > attempts:
                return
            for rank in range(world):
                asked[rank] = asked[rank] and failures % (world - 1) > 0
            for rank in range(world):
                if rank != here and not asked[rank] and (there < 0 or load[rank] < load[there]):
                    there = rank
            asked[there] = True
        seed = _random(seed)
        x = (seed >> 8) % slots * world + here
        seed = _random(seed)
        y = (seed >> 8) % slots * world + there
        found, seed = _candidates(x, y, half, seed, lengths, head, after)
        first, second = np.empty(len(found), dtype=np.int64), np.empty(len(found), dtype=np.int64)
        for index in range(len(found)):
            sign, length = 1 if placed[found[index]] == x else -1, lengths[found[index]]
            first[index] = sign * (length if joint else costs[found[index]])
            second[index] = sign * (length * length if joint else length)
        limits[0], limits[1] = tokens[x] - capacity, capacity - tokens[y]
        limits[2] = max(sizes[x] - max_documents, 1 - sizes[y])
        limits[3] = min(max_documents - sizes[y], sizes[x] - 1)
        gap, other_gap = load[here] - load[there], other[here] - other[there]
        bits = _best_subset(first, second, gap, other_gap, joint, limits, good)
        failures = 0 if bits else failures + 1
        for index in range(len(found)):
            if bits >> index & 1:
                sign = 1 if first[index] > 0 else -1
                _move(found[index], y if sign > 0 else x, placed, head, after)
                load[here] -= first[index]
                load[there] += first[index]
                other[here] -= second[index]
                other[there] += second[index]
                shift = first[index] if joint else second[index]
                tokens[x] -= shift
                tokens[y] += shift
                sizes[x] -= sign
                sizes[y] += sign
