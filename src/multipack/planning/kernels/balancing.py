"""Balancing packs: which rank runs which, and documents that change places.

Single documents do where a pack holds many. Where it holds few, they seldom close a gap, and up to two documents of
one side change places with up to two of the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import compiled

Integers = NDArray[np.int64]

_PARTNERS = 64  # cheapest ranks that the dearest one tries to trade with; fewer where each has many packs
_FEWEST_PARTNERS = 4
_TINY = 1_000_000  # a trade gains this part of the mean at least
_WORTH = 64  # … and this part of what the dearest rank costs too much: pairs of packs do the fine work
_TURNS = 50  # trades for each rank at most; a few are the rule
_TURNS_OF_TWO = 4  # the same for trades of two documents; one is the rule
_CHOICES = 16  # documents of a pack that may be given in them


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
    target: int,
) -> int:
    """Lower the dearest rank of one meeting by moves and swaps of single documents, in place.

    Packs are micro-batch-major (slot · world + rank), each in falling order. A rank's cost is the sum over
    the slots of the meeting. The dearest rank trades with the cheapest ones, until it costs `target` at
    most, or no trade gains a millionth of the mean and a 64th of what it costs too much; no pack is emptied. Returns
    the dearest rank's cost.
    """
    packs = len(offsets) - 1
    tokens = np.zeros(packs, dtype=np.int64)
    load = np.zeros(world, dtype=np.int64)
    for pack in range(first_slot * world, last_slot * world):
        for position in range(offsets[pack], offsets[pack + 1]):
            tokens[pack] += lengths[order[position]]
            load[pack % world] += costs[order[position]]
    tiny = load.sum() // (world * _TINY)
    partners = max(_PARTNERS // (last_slot - first_slot), _FEWEST_PARTNERS)
    asked = np.full(world, -1, dtype=np.int64)  # the turn in which a rank was last asked
    for turn in range(_TURNS * world + 200):
        dearest = int(np.argmax(load))
        improved = False
        if load[dearest] <= target:
            break
        least = max(tiny, (load[dearest] - target) // _WORTH)
        for _ in range(partners):
            other = -1
            for rank in range(world):
                if asked[rank] < turn and (other < 0 or load[rank] < load[other]):
                    other = rank
            if other < 0:
                break
            asked[other] = turn
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
            break
    return load.max()


@compiled
def _loads(
    order: Integers, offsets: Integers, lengths: Integers, costs: Integers
) -> tuple[Integers, Integers]:
    """Tokens and cost of each pack."""
    tokens, load = np.zeros(len(offsets) - 1, dtype=np.int64), np.zeros(len(offsets) - 1, dtype=np.int64)
    for pack in range(len(offsets) - 1):
        for position in range(offsets[pack], offsets[pack + 1]):
            tokens[pack] += lengths[order[position]]
            load[pack] += costs[order[position]]
    return tokens, load


@compiled
def _choices(documents: Integers, lengths: Integers, stay: NDArray[np.bool_]) -> Integers:
    """The longest of a pack's documents (in falling order) that may leave it, at most two of each length."""
    found, count = np.empty(min(len(documents), _CHOICES), dtype=np.int64), 0
    for document in documents:
        alike = count >= 2 and lengths[found[count - 2]] == lengths[document]
        if count < len(found) and not stay[document] and not alike:
            found[count] = document
            count += 1
    return found[:count]


@compiled
def _counterpart(
    theirs: Integers,
    lengths: Integers,
    costs: Integers,
    cost: int,
    gap: int,
    close: int,
    low: int,
    high: int,
    fewest: int,
    most: int,
    more_tokens: int,
    more_documents: int,
    weight: int,
) -> tuple[int, int, int, int]:
    """The best none, one or two of `theirs` (in falling order) for given documents, as (left, uneven, first, second).

    What is left, |gap − 2 · (cost − their cost)|, shall be least, but below `close` all is alike; then what is
    uneven, |more tokens + their tokens| + weight · |more documents + their number|. Their tokens lie within
    low … high, their number within fewest … most. A document that is not there is −1, and so is what is left
    where nothing suits.
    """
    best, best_uneven, first, second = -1, 0, -1, -1
    single, long, short = -1, 0, len(theirs) - 1
    while single < len(theirs) or long < short:
        x, y = single, -1  # none, then each alone
        if single == len(theirs):
            x, y = long, short  # then two, by two pointers
        taken, tokens, documents = 0, 0, 0
        if x >= 0:
            taken, tokens, documents = costs[theirs[x]], lengths[theirs[x]], 1
        if y >= 0:
            taken, tokens, documents = taken + costs[theirs[y]], tokens + lengths[theirs[y]], 2
        apart = gap - 2 * (cost - taken)
        if y < 0:
            single += 1
        elif apart > 0:
            long += 1
        else:
            short -= 1
        if low <= tokens <= high and fewest <= documents <= most:
            left = max(abs(apart), close)
            uneven = abs(more_tokens + tokens) + weight * abs(more_documents + documents)
            if best < 0 or left < best or (left == best and uneven < best_uneven):
                best, best_uneven = left, uneven
                first, second = theirs[x] if x >= 0 else -1, theirs[y] if y >= 0 else -1
    return best, best_uneven, first, second


@compiled
def _best_trade(
    own: Integers,
    theirs: Integers,
    lengths: Integers,
    costs: Integers,
    gap: int,
    close: int,
    room: int,
    their_room: int,
    counts: tuple[int, int, int, int],
    more_tokens: int,
    more_documents: int,
    weight: int,
) -> tuple[int, tuple[int, int, int, int]]:
    """The best none, one or two of `own` to give for none, one or two of `theirs`: (left, the four documents).

    See `_counterpart`. A side may take so many tokens more as it has room. `counts` are the documents by which each
    side may shrink, own and theirs, and by which each may grow.
    """
    best, uneven, chosen = -1, 0, (-1, -1, -1, -1)
    for x in range(-1, len(own)):
        for y in range(x, len(own) if x >= 0 else 0):
            cost, tokens, documents = 0, 0, 0
            if x >= 0:
                cost, tokens, documents = costs[own[x]], lengths[own[x]], 1
            if y > x:
                cost, tokens, documents = cost + costs[own[y]], tokens + lengths[own[y]], 2
            left, rest, first, second = _counterpart(
                theirs, lengths, costs, cost, gap, close, tokens - their_room, tokens + room,
                documents - min(counts[0], counts[3]), documents + min(counts[1], counts[2]),
                more_tokens - tokens, more_documents - documents, weight,
            )  # fmt: skip
            if left >= 0 and (best < 0 or left < best or (left == best and rest < uneven)):
                best, uneven = left, rest
                chosen = (own[x] if x >= 0 else -1, own[y] if y > x else -1, first, second)
    return best, chosen


@compiled
def _trade(
    order: Integers,
    offsets: Integers,
    lengths: Integers,
    costs: Integers,
    tokens: Integers,
    load: Integers,
    pack: int,
    other: int,
    chosen: tuple[int, int, int, int],
) -> None:
    """Let the first two documents go from a pack to another, and the last two the other way (−1 is none), in place."""
    for index in range(4):
        document = chosen[index]
        if document < 0:
            continue
        source, target = (pack, other) if index < 2 else (other, pack)
        position = offsets[source]
        while order[position] != document:
            position += 1
        _move(order, offsets, lengths, position, target)
        tokens[source] -= lengths[document]
        tokens[target] += lengths[document]
        load[source] -= costs[document]
        load[target] += costs[document]


@compiled
def exchange_two(
    order: Integers,
    offsets: Integers,
    lengths: Integers,
    costs: Integers,
    capacity: int,
    max_documents: int,
    first: int,
    last: int,
    close: int,
) -> int:
    """Bring the packs first … last − 1 nearer to their mean by trades of up to two documents for up to two, in place.

    Each pack is in falling order. The pack that is furthest from the mean makes the trade after which the further one
    of it and its partner is nearest, until all are within `close` or the dearest finds no partner; no pack is
    emptied. Returns the dearest pack's cost.
    """
    tokens, load = _loads(order, offsets, lengths, costs)
    mean = load[first:last].sum() // (last - first)
    nobody, alone = np.zeros(len(lengths), dtype=np.bool_), np.zeros(len(load), dtype=np.bool_)
    for _ in range(_TURNS_OF_TWO * (last - first)):
        pack, far = -1, close
        for other in range(first, last):
            if not alone[other] and abs(load[other] - mean) > far:
                pack, far = other, abs(load[other] - mean)
        if pack < 0:
            break
        own = _choices(order[offsets[pack] : offsets[pack + 1]], lengths, nobody)
        size = offsets[pack + 1] - offsets[pack]
        best, partner, chosen = 2 * far, -1, (-1, -1, -1, -1)
        for other in range(first, last):
            both = abs(load[pack] + load[other] - 2 * mean)
            if other == pack or both >= best:
                continue
            theirs = order[offsets[other] : offsets[other + 1]]
            counts = (size - 1, len(theirs) - 1, max_documents - size, max_documents - len(theirs))
            left, found = _best_trade(
                own, theirs, lengths, costs, load[pack] - load[other], 0,
                capacity - tokens[pack], capacity - tokens[other], counts, 0, 0, 0,
            )  # fmt: skip
            if 0 <= left < best - both:
                best, partner, chosen = both + left, other, found  # twice how far the further one is
                if best <= 2 * close:
                    break
        if partner >= 0:
            _trade(order, offsets, lengths, costs, tokens, load, pack, partner, chosen)
            alone[partner] = False
        elif load[pack] > mean:
            break
        alone[pack] = partner < 0
    return load[first:last].max()


@compiled
def exchange_waiting(
    order: Integers,
    offsets: Integers,
    lengths: Integers,
    costs: Integers,
    stay: NDArray[np.bool_],
    capacity: int,
    max_documents: int,
    target: int,
    close: int,
) -> None:
    """Bring packs to a cost by trades of up to two of their documents for up to two that wait, in place.

    The last pack is of the documents that wait; each is in falling order. Of the others, those that are further than
    `close` from `target` trade once each, the furthest first, but documents that shall `stay` do not leave. Of the
    trades that come close, one is made that keeps the tokens and the number of all documents that do not wait:
    otherwise two short ones would take the place of a long one more often than the other way round, and the last
    steps would be of long ones.
    """
    tokens, load = _loads(order, offsets, lengths, costs)
    packs = len(load) - 1
    weight = tokens[:packs].sum() // max(offsets[packs], 1)
    unlimited, more_tokens, more_documents = tokens.sum(), 0, 0
    for pack in np.argsort(-np.abs(load[:packs] - target), kind="mergesort"):
        far = abs(load[pack] - target)
        if far <= close:
            break
        own = _choices(order[offsets[pack] : offsets[pack + 1]], lengths, stay)
        size, count = offsets[pack + 1] - offsets[pack], offsets[packs + 1] - offsets[packs]
        left, chosen = _best_trade(
            own, order[offsets[packs] : offsets[packs + 1]], lengths, costs, 2 * (load[pack] - target), 2 * close,
            capacity - tokens[pack], unlimited, (size - 1, count, max_documents - size, 2),
            more_tokens, more_documents, weight,
        )  # fmt: skip
        if 0 <= left < 2 * far:
            more_tokens -= tokens[pack]
            more_documents -= size
            _trade(order, offsets, lengths, costs, tokens, load, pack, packs, chosen)
            more_tokens += tokens[pack]
            more_documents += offsets[pack + 1] - offsets[pack]
