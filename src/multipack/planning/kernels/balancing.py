"""Rearrange pairs of packs: `even_out` makes the loads of ranks equal, `gather` makes room for documents in no pack.

Two packs are rearranged by meeting in the middle (Horowitz and Sahni 1974, "Computing partitions with applications to
the knapsack problem"): of up to 2 · half documents, the sums over all subsets of each half are listed in ascending
order; one list is traversed upwards and the other downwards, and pairs of sums close to the wanted one are compared.

    pack x   A C D F       documents that may move: A C | F b         sums of A, C: 0, A, C, A + C
    pack y   b e g                                                    sums of F, b: −b, 0, F − b, F

Documents are numbered in descending order of length. Packs are micro-batch-major: pack slot · ranks + rank. A document
has two loads, both of which are balanced (the second may be 0), and the loads of a rank are sums over its packs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import Compiled
from multipack.planning.lengths import Integers

_LOOKS = 16  # pairs of sums that are compared, for each sum of a list
_COLLECTIONS = 200  # times that free tokens of many packs are brought into one, in a window
_TRIES = 4  # successive collections that were not enough for a document, after which no more are made
_GIVERS = 128  # packs that give their free tokens in one collection
_SLACK = 4096  # a pack that gives free tokens keeps 1/4096 of the capacity
_GATHER_HALF = 6  # documents in a half when free tokens pass between packs; one more after a failure


# numba's disk caches of the kernels below have this class's name: a renamed one leaves caches that cannot be read.
class State(NamedTuple):
    """Packs and their sums, which every move updates. The documents of a pack are a linked list, longest first."""

    placed: Integers  # (documents,) pack of each document, −1 for none
    lengths: Integers  # (documents,) tokens, descending
    loads: Integers  # (2, documents) loads of each document
    head: Integers  # (packs,) first document of each pack, or −1
    after: Integers  # (documents,) next document of the pack, or −1
    tokens: Integers  # (packs,) tokens of each pack
    sizes: Integers  # (packs,) documents of each pack
    totals: Integers  # (2, ranks) loads of each rank
    capacity: int  # maximum tokens of a pack
    max_documents: int  # maximum documents of a pack
    seed: Integers  # (1,) state of the random numbers that draw documents


@Compiled
def _state(
    placed: Integers,
    lengths: Integers,
    loads: Integers,
    packs: int,
    ranks: int,
    capacity: int,
    max_documents: int,
) -> State:
    """The state of packs, which shares `placed` with the caller."""
    head, after = np.full(packs, -1, dtype=np.int64), np.full(len(placed), -1, dtype=np.int64)
    tokens, sizes = np.zeros(packs, dtype=np.int64), np.zeros(packs, dtype=np.int64)
    totals = np.zeros((2, ranks), dtype=np.int64)
    for document in range(len(placed) - 1, -1, -1):
        pack = placed[document]
        if pack >= 0:
            after[document] = head[pack]
            head[pack] = document
            tokens[pack] += lengths[document]
            sizes[pack] += 1
            totals[0, pack % ranks] += loads[0, document]
            totals[1, pack % ranks] += loads[1, document]
    seed = np.ones(1, dtype=np.int64)
    return State(placed, lengths, loads, head, after, tokens, sizes, totals, capacity, max_documents, seed)


@Compiled
def _move(state: State, document: int, target: int) -> None:
    """Move a document, with or without a pack, into another one, whose list stays in descending order of length."""
    placed, head, after = state.placed, state.head, state.after
    source, ranks = placed[document], state.totals.shape[1]
    if source >= 0 and head[source] == document:
        head[source] = after[document]
    elif source >= 0:
        before = head[source]
        while after[before] != document:
            before = after[before]
        after[before] = after[document]
    if head[target] < 0 or head[target] > document:
        after[document] = head[target]
        head[target] = document
    else:
        before = head[target]
        while after[before] >= 0 and after[before] < document:
            before = after[before]
        after[document] = after[before]
        after[before] = document
    placed[document] = target
    for pack, sign in ((source, -1), (target, 1)):
        if pack < 0:
            continue
        state.tokens[pack] += sign * state.lengths[document]
        state.sizes[pack] += sign
        state.totals[0, pack % ranks] += sign * state.loads[0, document]
        state.totals[1, pack % ranks] += sign * state.loads[1, document]


@Compiled
def _random(state: State) -> int:
    """A number below 2^23: high bits of a linear congruential generator modulo 2^31 (the constants of ANSI C)."""
    state.seed[0] = (state.seed[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return state.seed[0] >> 8


@Compiled
def _candidates(state: State, x: int, y: int, half: int) -> Integers:
    """Documents of two packs that may move: one of each length and load of a pack, at most 2 · half, drawn at random.

    They are interleaved, so that both halves of the list hold documents of both packs.
    """
    lengths, loads, after, count = state.lengths, state.loads, state.after, 0
    for pack in (x, y):
        document, last, load = state.head[pack], -1, -1
        while document >= 0:
            count += 1 if lengths[document] != last or loads[0, document] != load else 0
            last, load = lengths[document], loads[0, document]
            document = after[document]
    size = min(2 * half, count)
    found = np.empty(size, dtype=np.int64)
    taken = 0
    for pack in (x, y):
        document, last, load = state.head[pack], -1, -1
        while document >= 0:
            if lengths[document] != last or loads[0, document] != load:
                # Selection sampling (Knuth, vol. 2, 3.4.2, algorithm S), which keeps the order.
                if _random(state) % count < size - taken:
                    found[taken // 2 + (taken % 2) * ((size + 1) // 2)] = document
                    taken += 1
                count -= 1
            last, load = lengths[document], loads[0, document]
            document = after[document]
    return found


@Compiled
def _subset_sums(state: State, documents: Integers, y: int) -> Integers:
    """(4, 2^n): sums over all subsets of documents, ascending by the first row.

    Rows are both loads, tokens, and the subset as bits. Documents of pack y count as negative.
    """
    size, shape = 1, (4, 1 << len(documents))
    new, old = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for item in range(len(documents)):
        new, old = old, new
        document = documents[item]
        sign = -1 if state.placed[document] == y else 1
        values = (
            sign * state.loads[0, document],
            sign * state.loads[1, document],
            sign * state.lengths[document],
            1 << item,
        )
        without, with_item = 0, 0
        for index in range(2 * size):
            plain = without < size and (with_item == size or old[0, without] <= old[0, with_item] + values[0])
            source = without if plain else with_item
            for row in range(4):
                new[row, index] = old[row, source] + (0 if plain else values[row])
            without += 1 if plain else 0
            with_item += 0 if plain else 1
        size *= 2
    return new


@Compiled
def _best_subset(state: State, found: Integers, x: int, y: int, gap: int, other_gap: int) -> int:
    """Find the documents of packs x and y that, moved to the other pack, lower the load of x by half of a gap.

    The best move leaves the smallest gap: the larger of |gap − 2 · first load| and |other_gap − 2 ·
    second load|. The number of pairs of sums that are compared is limited.

    Returns:
        The documents as bits; 0 if no move was found that lowers the gap.
    """
    half = len(found) // 2
    low, high = _subset_sums(state, found[:half], y), _subset_sums(state, found[half:], y)
    size, other_size = 1 << half, 1 << (len(found) - half)
    least_tokens, most_tokens = state.tokens[x] - state.capacity, state.capacity - state.tokens[y]
    fewest = max(state.sizes[x] - state.max_documents, 1 - state.sizes[y])
    most = min(state.max_documents - state.sizes[y], state.sizes[x] - 1)
    best, chosen, looks, start = max(abs(gap), abs(other_gap)), 0, 0, other_size
    for index in range(size):
        least_sum, most_sum = (gap - best) // 2 - low[0, index], (gap + best) // 2 - low[0, index]
        while start > 0 and high[0, start - 1] >= least_sum:
            start -= 1
        here = start
        while here < other_size and high[0, here] <= most_sum and looks < _LOOKS * size:
            looks += 1
            remaining = max(
                abs(gap - 2 * (low[0, index] + high[0, here])),
                abs(other_gap - 2 * (low[1, index] + high[1, here])),
            )
            tokens = low[2, index] + high[2, here]
            if remaining < best and least_tokens <= tokens <= most_tokens:
                subset, documents = low[3, index] | (high[3, here] << half), 0
                for item in range(len(found)):
                    if subset >> item & 1:
                        documents += 1 if state.placed[found[item]] == x else -1
                if fewest <= documents <= most:
                    best, chosen = remaining, subset
            here += 1
    return chosen


@Compiled
def _rearrange(state: State, x: int, y: int, gap: int, other_gap: int, half: int) -> bool:
    """Move documents between packs x and y as `_best_subset` finds; whether any moved."""
    found = _candidates(state, x, y, half)
    bits = _best_subset(state, found, x, y, gap, other_gap)
    for item in range(len(found)):
        if bits >> item & 1:
            _move(state, found[item], y if state.placed[found[item]] == x else x)
    return bits > 0


class PackLimits(NamedTuple):
    """The packs of `even_out`."""

    capacity: int  # maximum tokens of a pack
    max_documents: int  # maximum documents of a pack
    ranks: int  # number of ranks, at least 2
    slots: int  # packs of each rank


class Exchanges(NamedTuple):
    """How far `even_out` searches."""

    half: int  # documents in each half when two packs are rearranged; time and memory are 2^half
    attempts: int  # pairs of packs that are rearranged
    failures: int  # successive failures at which to stop
    excess: int  # of the largest load over the mean, at which ranks count as balanced


def even_out(
    placed: Integers, lengths: Integers, loads: Integers, limits: PackLimits, search: Exchanges
) -> None:
    """Rearrange pairs of packs, in place, until the ranks are balanced.

    The rank whose load exceeds the mean most is rearranged with the rank where that load is least; after a failure with
    the next one. No pack becomes empty.

    `placed`, `lengths` and `loads` are fields of `State`.
    """
    # As numbers: see `State`.
    _even_out(placed, lengths, loads, *limits, *search)


@Compiled
def _even_out(
    placed: Integers,
    lengths: Integers,
    loads: Integers,
    capacity: int,
    max_documents: int,
    ranks: int,
    slots: int,
    half: int,
    attempts: int,
    failures: int,
    excess: int,
) -> None:
    """`even_out`, with the fields of its limits and its search."""
    state = _state(placed, lengths, loads, ranks * slots, ranks, capacity, max_documents)
    mean = np.zeros(2, dtype=np.int64)
    for row in range(2):
        for rank in range(ranks):
            mean[row] += state.totals[row, rank]
        mean[row] //= ranks
    tried = np.zeros(ranks, dtype=np.bool_)
    failed = 0
    for _ in range(attempts):
        here, by, most = 0, 0, state.totals[0, 0] - mean[0]
        for row in range(2):
            for rank in range(ranks):
                if state.totals[row, rank] - mean[row] > most:
                    here, by, most = rank, row, state.totals[row, rank] - mean[row]
        if most <= excess or failed == failures:
            return
        there = -1
        for rank in range(ranks):
            tried[rank] = tried[rank] and failed % (ranks - 1) > 0
            less = there < 0 or state.totals[by, rank] < state.totals[by, there]
            if less and rank != here and not tried[rank]:
                there = rank
        tried[there] = True
        x, y = _random(state) % slots * ranks + here, _random(state) % slots * ranks + there
        gap = state.totals[0, here] - state.totals[0, there]
        other_gap = state.totals[1, here] - state.totals[1, there]
        failed = 0 if _rearrange(state, x, y, gap, other_gap, half) else failed + 1


@Compiled
def _emptiest(state: State, skipped: NDArray[np.bool_], max_documents: int) -> int:
    """The pack with the fewest tokens that is not skipped and holds fewer documents; −1 if there is none."""
    found = -1
    for pack in range(len(state.tokens)):
        less = found < 0 or state.tokens[pack] < state.tokens[found]
        if less and not skipped[pack] and state.sizes[pack] < max_documents:
            found = pack
    return found


@Compiled
def _collect(state: State, taker: int, enough: int, half: int) -> None:
    """Pass the free tokens of other packs, emptiest first, to one pack until it has enough."""
    done = np.zeros(len(state.tokens), dtype=np.bool_)
    done[taker] = True
    for _ in range(_GIVERS):
        giver = _emptiest(state, done, len(state.placed) + 1)
        room = state.capacity - state.capacity // _SLACK - state.tokens[giver]
        missing = enough - (state.capacity - state.tokens[taker])
        if missing <= 0 or giver < 0 or room <= 0:
            return
        done[giver] = True
        other_gap = state.totals[1, taker] - state.totals[1, giver]
        _rearrange(state, taker, giver, 2 * min(room, missing), other_gap, half)


@Compiled
def gather(
    placed: Integers, lengths: Integers, packs: int, capacity: int, max_documents: int, spare: int
) -> None:
    """Place documents that fit into no pack, in place: free tokens of all packs move into one of them.

    Where each of three packs has 2 free tokens, a document of 6 tokens fits into none of them. Two exchanges of an 8
    for a 6 fill the first two packs and leave 6 free tokens in the third:

        pack 0   8 8 6 ··         8 8 8             8 8 8
        pack 1   8 8 6 ··   ──▶   8 8 6 ··    ──▶   8 8 8
        pack 2   8 8 6 ··         8 6 6 ····        6 6 6 ······

    Documents get a place longest first, and only while more than `spare` tokens of all packs stay free. `placed` and
    `lengths` are fields of `State`.
    """
    loads, nothing = np.zeros((2, len(placed)), dtype=np.int64), np.zeros(packs, dtype=np.bool_)
    for document in range(len(placed)):
        loads[0, document] = lengths[document]
    state = _state(placed, lengths, loads, packs, packs, capacity, max_documents)
    failed, left, free = 0, _COLLECTIONS, packs * capacity - spare
    for pack in range(packs):
        free -= state.tokens[pack]
    for document in range(len(placed)):
        if placed[document] >= 0 or lengths[document] > free:
            continue
        taker = _emptiest(state, nothing, max_documents)
        while taker >= 0 and state.tokens[taker] + lengths[document] > capacity:
            if failed == _TRIES or left == 0:
                break
            _collect(state, taker, lengths[document], _GATHER_HALF + failed)
            failed, left, taker = failed + 1, left - 1, _emptiest(state, nothing, max_documents)
        if taker < 0:
            return
        if state.tokens[taker] + lengths[document] <= capacity:
            _move(state, document, taker)
            failed, free = 0, free - lengths[document]
