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
