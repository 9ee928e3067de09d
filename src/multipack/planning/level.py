"""Documents into packs by balancing: whatever can be made alike enough fits.

Placing one document after the other fails where few documents share nearly full packs. Making packs alike first,
whatever they hold, and then trading tokens between the fullest and the emptiest until none exceeds the capacity
often succeeds there: it is the multiprocessor-scheduling view of bin packing (Coffman, Garey, Johnson 1978, "An
application of bin-packing to multiprocessor scheduling", the other way round).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import balancing, pairing, placing

Integers = NDArray[np.int64]

HALF = 7
"""Documents of each half when two packs are rearranged."""

_FEW_DOCUMENTS = 8  # of a pack; with more, trades of single documents come as near


def few(lengths: Integers, packs: int, capacity: int) -> bool:
    """Whether so few documents share a pack that two of them must change places at once to make packs alike.

    Where one is longer than half a pack, it decides what the dearest pack costs, and no trade of others helps.
    """
    return len(lengths) <= packs * _FEW_DOCUMENTS and 2 * int(lengths.max(initial=0)) <= capacity


def trade(
    placed: Integers,
    lengths: Integers,
    costs: Integers,
    packs: int,
    capacity: int,
    max_documents: int,
    target: int,
    attempts: int = 0,
) -> None:
    """Documents (in falling order) change packs until none costs more than `target`, as far as that goes, in place.

    The dearest pack trades single documents with the cheapest ones; then, `attempts` times, two packs are
    rearranged. Documents without a pack (−1) stay without.
    """
    offsets = np.zeros(packs + 1, dtype=np.int64)
    np.cumsum(placing.tally(placed, costs, packs)[1], out=offsets[1:])
    order = placing.in_packs(placed, offsets)
    arguments = (order, offsets, lengths, costs, capacity, max_documents, packs, 0, 1)
    if balancing.exchange(*arguments, target) > target and packs > 1 and attempts:
        pairing.level(*arguments, False, HALF, attempts, target)
    placed[order] = np.repeat(np.arange(packs), np.diff(offsets))


def level_tokens(
    lengths: Integers, costs: Integers, packs: int, capacity: int, max_documents: int
) -> Integers:
    """Documents (in falling order) spread by cost whatever the capacity, then traded until no pack is overfull.

    Returns each document's pack; −1 for what packs that are still overfull give back.
    """
    visit, everything = np.arange(len(lengths), dtype=np.int64), int(lengths.sum())
    placed = placing.place(lengths, costs, visit, packs, everything, max_documents, True)
    trade(placed, lengths, lengths, packs, everything, max_documents, capacity, 4 * packs)
    placing.give_back(placed, lengths, packs, capacity)
    return placed


def trade_two(
    placed: Integers,
    lengths: Integers,
    costs: Integers,
    old: Integers | None,
    packs: int,
    capacity: int,
    max_documents: int,
    alike: int,
) -> None:
    """Packs of few documents (in falling order) are brought within 1/`alike` of their mean cost, in place.

    First by trades with documents that wait (−1): `old` ones keep their places, the others may have to wait instead.
    With None nobody's place is taken. Then by trades with each other.
    """
    group = np.where(placed < 0, packs, placed)  # those that wait are one more pack
    cost, sizes = placing.tally(group, costs, packs + 1)
    offsets = np.zeros(packs + 2, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    order = placing.in_packs(group, offsets)
    mean = int(cost[:packs].sum()) // packs
    close, limits = mean // alike, (capacity, max_documents)
    if sizes[packs] and old is not None:
        stay = np.zeros(len(placed), dtype=np.bool_)
        stay[old] = True
        coarse = 2 * close  # the rest is for trades between packs: the fewer documents wait the better
        balancing.exchange_waiting(order, offsets, lengths, costs, stay, *limits, mean, coarse)
    balancing.exchange_two(order, offsets, lengths, costs, *limits, 0, packs, close)
    group[order] = np.repeat(np.arange(packs + 1), np.diff(offsets))
    placed[:] = np.where(group == packs, -1, group)
