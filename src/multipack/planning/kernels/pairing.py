"""Two packs of a step rearranged by meeting in the middle, as often as it helps.

Of two packs' documents, up to 2 · half may change sides. The sums over all 2^half choices from each half of them
are listed in rising order; one list is walked upwards and the other downwards, and whatever two sums come near
to half of what separates the ranks is looked at (Horowitz and Sahni 1974, "Computing partitions with
applications to the knapsack problem"). That is 2^(2·half) rearrangements for the price of 2^half:

    pack x   A C D F       documents that may change: A C | F b       sums of A, C: 0, A, C, A + C
    pack y   b e g                                                    sums of F, b: −b, 0, F − b, F

A rank's load is a pair of numbers. With `joint` they are tokens and squares, and both shall agree; else they are
cost and tokens, the cost shall agree and the tokens only fit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import compiled

Integers = NDArray[np.int64]

_LOOKS = 16  # pairs of sums that are looked at, for each sum of a list


@compiled
def _next(seed: int) -> int:
    """A linear congruential generator modulo 2^31 (the constants of ANSI C): its upper bits are used."""
    return (seed * 1103515245 + 12345) & 0x7FFFFFFF


@compiled
def _candidates(
    order: Integers, offsets: Integers, lengths: Integers, x: int, y: int, most: int, seed: int
) -> tuple[Integers, int]:
    """Positions of documents that may change sides: one of each length of a pack, at most `most`, at random.

    Returns the positions, rising, and the next seed.
    """
    found = np.empty(offsets[x + 1] - offsets[x] + offsets[y + 1] - offsets[y], dtype=np.int64)
    count = 0
    for pack in (x, y):
        last = -1
        for position in range(offsets[pack], offsets[pack + 1]):
            if lengths[order[position]] != last:
                last = lengths[order[position]]
                found[count] = position
                count += 1
    for index in range(min(most, count)):
        seed = _next(seed)
        other = index + (seed >> 8) % (count - index)
        found[index], found[other] = found[other], found[index]
    return np.sort(found[: min(most, count)]), seed


@compiled
def _sums(first: Integers, second: Integers) -> tuple[Integers, Integers, Integers]:
    """The sums of every subset, by rising `first` sum, with the `second` sums and the subsets as bits."""
    size = 1 << len(first)
    new, old = np.zeros((3, size), dtype=np.int64), np.zeros((3, size), dtype=np.int64)
    length = 1
    for item in range(len(first)):
        new, old = old, new
        plain, more = 0, 0  # next subset without the item, next one with it
        for index in range(2 * length):
            if more == length or (plain < length and old[0, plain] <= old[0, more] + first[item]):
                new[0, index], new[1, index], new[2, index] = old[0, plain], old[1, plain], old[2, plain]
                plain += 1
            else:
                new[0, index] = old[0, more] + first[item]
                new[1, index] = old[1, more] + second[item]
                new[2, index] = old[2, more] | (1 << item)
                more += 1
        length *= 2
    return new[0], new[1], new[2]


@compiled
def _closest(
    first: Integers,
    second: Integers,
    gap: int,
    other_gap: int,
    weight: int,
    joint: bool,
    low: int,
    high: int,
    fewest: int,
    most_documents: int,
    good: int,
    limit: int,
) -> tuple[int, int]:
    """The subset whose move leaves the least between two ranks, as (bits, what is left); (0, limit) if none.

    Moving a subset of sums (f, s) leaves gap − 2·f and other_gap − 2·s; what counts is the larger of
    |gap − 2·f| · weight and, if joint, |other_gap − 2·s|. Its tokens (f if joint, else s) must lie within low … high,
    and the documents that it moves, less those that it moves the other way, within fewest … most_documents.
    What is left is looked for below `good` first, and below 8 times as much while nothing is found; where ranks
    cannot be made alike, because of one long document say, the number of looks ends the search.
    """
    half = len(first) // 2
    a, b, bits = _sums(first[:half], second[:half])
    c, d, more_bits = _sums(first[half:], second[half:])
    best, chosen, bound = limit, 0, min(good, limit)
    seen = 0
    while True:
        best = bound
        start = len(c)
        for index in range(len(a)):
            reach = best // weight
            least = (gap - reach) // 2 - a[index]
            most = (gap + reach) // 2 - a[index]
            while start > 0 and c[start - 1] >= least:
                start -= 1
            here = start
            while here < len(c) and c[here] <= most and seen < _LOOKS * len(a):
                seen += 1
                left = abs(gap - 2 * (a[index] + c[here])) * weight
                total = b[index] + d[here]
                tokens = total
                if joint:
                    left = max(left, abs(other_gap - 2 * total))
                    tokens = a[index] + c[here]
                if left < best and low <= tokens <= high:
                    subset = bits[index] | (more_bits[here] << half)
                    documents = 0
                    for item in range(len(first)):
                        if subset >> item & 1:
                            documents += 1 if first[item] > 0 else -1
                    if fewest <= documents <= most_documents:
                        best, chosen = left, subset
                here += 1
        if chosen or bound == limit or seen == _LOOKS * len(a):
            break
        bound = min(8 * bound, limit)
    return chosen, best if chosen else limit


@compiled
def _change_sides(
    order: Integers, offsets: Integers, lengths: Integers, x: int, y: int, chosen: Integers, bits: int
) -> None:
    """Move the chosen documents of pack x to pack y and the other way round; both stay in falling order."""
    low, high = min(x, y), max(x, y)
    begin, end = offsets[low], offsets[high + 1]
    other = np.zeros(end - begin, dtype=np.bool_)
    for index in range(len(chosen)):
        if bits >> index & 1:
            other[chosen[index] - begin] = True
    between = order[offsets[low + 1] : offsets[high]].copy()
    old = order[begin:end].copy()
    write, middle = begin, begin
    for pack in (low, high):
        mine, theirs = offsets[low] - begin, offsets[high] - begin
        my_end, their_end = offsets[low + 1] - begin, offsets[high + 1] - begin
        stay = pack == low
        while True:  # merge what stays of one pack with what comes from the other
            while mine < my_end and other[mine] == stay:
                mine += 1
            while theirs < their_end and other[theirs] != stay:
                theirs += 1
            if mine == my_end and theirs == their_end:
                break
            if theirs == their_end or (mine < my_end and lengths[old[mine]] >= lengths[old[theirs]]):
                order[write] = old[mine]
                mine += 1
            else:
                order[write] = old[theirs]
                theirs += 1
            write += 1
        if pack == low:
            middle = write
            order[write : write + len(between)] = between
            write += len(between)
    shift = middle - offsets[low + 1]
    for pack in range(low + 1, high + 1):
        offsets[pack] += shift


@compiled
def _pair(
    order: Integers,
    offsets: Integers,
    lengths: Integers,
    costs: Integers,
    tokens: Integers,
    x: int,
    y: int,
    gap: int,
    other_gap: int,
    joint: bool,
    half: int,
    capacity: int,
    max_documents: int,
    good: int,
    seed: int,
) -> tuple[int, int, int]:
    """Rearrange packs x and y; returns what moved from x to y as (first sum, second sum), and the next seed."""
    rising, seed = _candidates(order, offsets, lengths, x, y, 2 * half, seed)
    positions = np.concatenate((rising[::2], rising[1::2]))  # each half has documents of both packs
    first, second = np.empty(len(positions), dtype=np.int64), np.empty(len(positions), dtype=np.int64)
    for index in range(len(positions)):
        document = order[positions[index]]
        sign = 1 if offsets[x] <= positions[index] < offsets[x + 1] else -1
        first[index] = sign * (lengths[document] if joint else costs[document])
        second[index] = sign * (lengths[document] * lengths[document] if joint else lengths[document])
    weight = 1000 if joint else 1
    now = max(abs(gap) * weight, abs(other_gap) if joint else 0)
    low, high = tokens[x] - capacity, capacity - tokens[y]
    fewest = max(offsets[x + 1] - offsets[x] - max_documents, 1 - (offsets[y + 1] - offsets[y]))
    most = min(max_documents - (offsets[y + 1] - offsets[y]), offsets[x + 1] - offsets[x] - 1)
    bits, left = _closest(first, second, gap, other_gap, weight, joint, low, high, fewest, most, good, now)
    if bits == 0 or left >= now:
        return 0, 0, seed
    moved, moved_other, of_tokens = 0, 0, 0
    for index in range(len(positions)):
        if bits >> index & 1:
            moved += first[index]
            moved_other += second[index]
            of_tokens += first[index] if joint else second[index]
    _change_sides(order, offsets, lengths, x, y, positions, bits)
    tokens[x] -= of_tokens
    tokens[y] += of_tokens
    return moved, moved_other, seed


@compiled
def _loads(
    order: Integers,
    offsets: Integers,
    lengths: Integers,
    costs: Integers,
    world: int,
    first_slot: int,
    last_slot: int,
    joint: bool,
) -> tuple[Integers, Integers, Integers]:
    """Tokens of each pack, and of each rank the two numbers that make its load."""
    tokens = np.zeros(len(offsets) - 1, dtype=np.int64)
    load, other = np.zeros(world, dtype=np.int64), np.zeros(world, dtype=np.int64)
    for pack in range(first_slot * world, last_slot * world):
        for position in range(offsets[pack], offsets[pack + 1]):
            length = lengths[order[position]]
            tokens[pack] += length
            load[pack % world] += length if joint else costs[order[position]]
            other[pack % world] += length * length if joint else length
    return tokens, load, other


@compiled
def level(
    order: Integers,
    offsets: Integers,
    lengths: Integers,
    costs: Integers,
    capacity: int,
    max_documents: int,
    world: int,
    first_slot: int,
    last_slot: int,
    joint: bool,
    half: int,
    attempts: int,
    target: int,
) -> None:
    """Rearrange pairs of packs of one meeting, in place, until its ranks agree or the attempts are used up.

    Packs are micro-batch-major (slot · world + rank), each in falling order. Without `joint` the dearest rank is
    rearranged with the cheapest (after failures with the next cheapest) until it costs `target` at most. With
    `joint`, neighbors in a hypercube of ranks come first, then the rank that is furthest from the mean and the one
    that is most opposite to it, or any one after a failure.
    """
    tokens, load, other = _loads(order, offsets, lengths, costs, world, first_slot, last_slot, joint)
    slots = last_slot - first_slot
    mean, other_mean = load.sum() // world, other.sum() // world
    good = 8_000 if joint else max(mean // 100_000, 1)
    seed, failures = 1, 0
    asked = np.zeros(world, dtype=np.bool_)
    cube = 0
    while joint and 1 << (cube + 1) <= world:
        cube += 1
    for attempt in range(attempts):
        seed = _next(seed)
        a = first_slot + (seed >> 8) % slots
        seed = _next(seed)
        b = first_slot + (seed >> 8) % slots
        if attempt < cube * (world // 2):
            bit, index = 1 << (attempt // (world // 2)), attempt % (world // 2)
            here = (index // bit) * 2 * bit + index % bit
            there = here | bit
            if there >= world:
                continue
        elif joint:
            here, furthest = 0, -1
            for rank in range(world):
                far = max(abs(load[rank] - mean) * 1000, abs(other[rank] - other_mean))
                if far > furthest:
                    here, furthest = rank, far
            by_tokens = abs(load[here] - mean) * 1000 >= abs(other[here] - other_mean)
            there, most = -1, 0
            for rank in range(world):
                apart = (load[here] - load[rank]) * 1000 if by_tokens else other[here] - other[rank]
                if (load[here] < mean) if by_tokens else (other[here] < other_mean):
                    apart = -apart
                if rank != here and (there < 0 or apart > most):
                    there, most = rank, apart
            if failures:
                seed = _next(seed)
                there = (here + 1 + (seed >> 8) % (world - 1)) % world
        else:
            here = int(np.argmax(load))
            if load[here] <= target or 2 * failures > attempts:
                return
            if failures % (world - 1) == 0:
                asked[:] = False
            there = -1  # the cheapest that was not asked since the last success
            for rank in range(world):
                if rank != here and not asked[rank] and (there < 0 or load[rank] < load[there]):
                    there = rank
            asked[there] = True
        moved, moved_other, seed = _pair(
            order, offsets, lengths, costs, tokens, a * world + here, b * world + there,
            load[here] - load[there], other[here] - other[there], joint, half, capacity, max_documents, good, seed,
        )  # fmt: skip
        failures = 0 if moved or moved_other else failures + 1
        load[here] -= moved
        load[there] += moved
        other[here] -= moved_other
        other[there] += moved_other
