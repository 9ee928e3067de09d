"""One step's documents, arranged for the ranks that are there: a pure function of documents, world and sync.

    own packs (P = 3)        world 2, two micro-batches
    |AAAAAABB|               micro-batch 0   |AAAAAA··|CCCCCC··|      rank 0, rank 1
    |CCCCCCDD|               micro-batch 1   |BBDD····|EEEE····|
    |EEEE····|

Fixed packs dealt to a world that does not divide their number leave ranks idle; the same documents arranged
afresh do not. The step's own packs, which always fit, are the answer where no other is better.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import balancing, placing
from multipack.planning.packing import Packs, packs_from

Sync = Literal["micro", "step", "pipeline"]

Integers = NDArray[np.int64]


def meetings(costs: Integers, world: int, sync: Sync) -> Integers:
    """What each rank brings to each meeting, (meetings, ranks), from packs in micro-batch-major order.

    Ranks meet at every micro-batch (`micro`: sharded parameters are gathered there; `pipeline`: so that
    stages keep step) or once a step (`step`: the gradients are averaged).
    """
    table = costs.reshape(-1, world)
    return table.sum(axis=0, keepdims=True) if sync == "step" else table


def objective(costs: Integers, world: int, sync: Sync) -> int:
    """The cost that a step takes: over its meetings, the sum of the dearest rank's."""
    return int(meetings(costs, world, sync).max(axis=1).sum())


def deal(
    lengths: Integers,
    costs: Integers,
    own: Integers,
    *,
    world: int,
    micro_batches: int,
    capacity: int,
    max_documents: int,
    sync: Sync,
) -> Packs:
    """Arrange documents into world × micro_batches packs, micro-batch-major, alike in cost where ranks meet.

    Args:
        lengths: (documents,) tokens of the step's documents.
        costs: (documents,) their costs, rising with length.
        own: (documents,) a packing that fits: each document's pack, of at most world × micro_batches.
        world: ranks.
        micro_batches: packs of each rank.
        capacity: most tokens of a pack.
        max_documents: most documents of a pack.
        sync: where ranks meet.

    Returns:
        `Packs` of numbers into `lengths`. No pack is empty while there are enough documents. The objective is
        never above that of the own packs, in which documents were moved to packs that would be empty.
    """
    packs = world * micro_batches
    placed = own.copy()
    if packs > int(own.max()) + 1:
        placing.fill_empty(placed, lengths, packs)
    if world == 1:
        return packs_from(placed, packs)
    options = [placed]
    order = np.argsort(-lengths, kind="stable")
    room = min(capacity, int(lengths.sum()))
    spread = placing.place(lengths[order], costs[order], packs, room, max_documents, True)
    if spread.min() >= 0:
        fresh = np.empty_like(spread)
        fresh[order] = spread
        options.insert(0, fresh)
    best, least = placed, -1
    for option in options:
        number = _arrange(option, lengths, costs, world, micro_batches, capacity, max_documents, sync)
        totals = np.zeros(packs, dtype=np.int64)
        np.add.at(totals, number, costs)
        reached = objective(totals, world, sync)
        if least < 0 or reached < least:
            best, least = number, reached
    return packs_from(best, packs)


def _arrange(
    placed: Integers,
    lengths: Integers,
    costs: Integers,
    world: int,
    micro_batches: int,
    capacity: int,
    max_documents: int,
    sync: Sync,
) -> Integers:
    """Give packs their micro-batch and rank, then let the dearest rank of each meeting trade documents."""
    packs = world * micro_batches
    totals = np.zeros(packs, dtype=np.int64)
    np.add.at(totals, placed, costs)
    falling = np.argsort(-totals, kind="stable")
    number = np.empty(packs, dtype=np.int64)
    if sync == "step":
        number[falling] = balancing.assign_ranks(totals[falling], world, micro_batches)
    else:
        number[falling] = np.arange(packs)  # alike in cost, so together in one micro-batch
    placed = number[placed]
    order = np.lexsort((-lengths, placed))
    offsets = np.zeros(packs + 1, dtype=np.int64)
    np.cumsum(np.bincount(placed, minlength=packs), out=offsets[1:])
    slots = [(0, micro_batches)] if sync == "step" else [(m, m + 1) for m in range(micro_batches)]
    for first, last in slots:
        balancing.exchange(order, offsets, lengths, costs, capacity, max_documents, world, first, last)
    result = np.empty_like(placed)
    result[order] = np.repeat(np.arange(packs), np.diff(offsets))
    return result
