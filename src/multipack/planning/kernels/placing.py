"""Place documents into a fixed number of packs: spread by cost, with room gathered for the rest.

Documents are numbered in descending order of length; `placed` holds the pack of each, −1 for none.
"""

from __future__ import annotations

import numpy as np

from multipack.planning.kernels import Compiled, balancing
from multipack.planning.lengths import Integers


@Compiled
def spread(
    lengths: Integers, costs: Integers, visit: Integers, packs: int, capacity: int, max_documents: int
) -> Integers:
    """Place documents, in the order of `visit`, into a fixed number of packs; −1 for those that do not fit.

    A document goes into the pack of least cost: longest processing time first (Graham 1969), when documents come in
    falling order. A pack without room for the document at hand leaves the heap for good. Once the heap is empty, each
    document goes into the pack of least cost that has room for it.
    """
    rooms = np.full(packs, capacity, dtype=np.int64)
    sizes, cost = np.zeros(packs, dtype=np.int64), np.zeros(packs, dtype=np.int64)
    heap, size = np.arange(packs), packs
    placed = np.full(len(lengths), -1, dtype=np.int64)
    for document in visit:
        length, pack = lengths[document], -1
        while size > 0 and pack < 0:
            top = heap[0]
            if rooms[top] >= length and sizes[top] < max_documents:
                pack = top
                cost[top] += costs[document]
            else:
                size -= 1
                top = heap[size]
            node = 0  # the top became more costly, or was replaced: restore the heap
            while 2 * node + 1 < size:
                child = 2 * node + 1
                left, right = heap[child], heap[min(child + 1, size - 1)]
                if cost[right] < cost[left] or (cost[right] == cost[left] and right < left):
                    child, left = child + 1, right
                if cost[top] < cost[left] or (cost[top] == cost[left] and top < left):
                    break
                heap[node] = left
                node = child
            heap[node] = top
        if pack < 0:
            for other in range(packs):
                fits = rooms[other] >= length and sizes[other] < max_documents
                if fits and (pack < 0 or cost[other] < cost[pack]):
                    pack = other
            if pack < 0:
                continue
            cost[pack] += costs[document]
        placed[document] = pack
        rooms[pack] -= length
        sizes[pack] += 1
    return placed


@Compiled
def _spread_each(
    lengths: Integers, costs: Integers, offsets: Integers, packs: int, capacity: int, max_documents: int
) -> Integers:
    """`spread` for consecutive parts of the documents, each with its own packs."""
    placed = np.empty(len(lengths), dtype=np.int64)
    for part in range(len(offsets) - 1):
        start, stop = offsets[part], offsets[part + 1]
        visit = np.arange(stop - start)
        placed[start:stop] = spread(
            lengths[start:stop], costs[start:stop], visit, packs, capacity, max_documents
        )
    return placed


def sums(placed: Integers, values: Integers, packs: int) -> Integers:
    """(packs,) int64 sum of `values` (one a document) over each pack; documents without a pack (−1) do not count."""
    total = np.zeros(packs, dtype=np.int64)
    inside = placed >= 0
    np.add.at(total, placed[inside], values[inside])
    return total


def fill_empty(placed: Integers, packs: int) -> None:
    """Move the shortest documents that share a pack into empty packs, while there are any, in place.

    Documents are in falling order.
    """
    sizes = np.bincount(placed[placed >= 0], minlength=packs)
    empty = np.flatnonzero(sizes == 0).tolist()
    for document in range(len(placed) - 1, -1, -1):
        if not empty:
            return
        if placed[document] >= 0 and sizes[placed[document]] > 1:
            sizes[placed[document]] -= 1
            placed[document] = empty.pop(0)


def place(
    lengths: Integers,
    costs: Integers,
    packs: int,
    capacity: int,
    max_documents: int,
    visit: Integers | None = None,
    spare: int = 0,
) -> Integers:
    """(documents,) pack of each document, −1 for none: spread by cost, then room gathered for what did not fit.

    `lengths` and `costs` are falling. Documents are spread in the order of `visit`, by default the longest first. All
    others, left or not in `visit`, fill gaps while more than `spare` tokens are free; see `balancing.gather`.
    """
    if visit is None:
        visit = np.arange(len(lengths), dtype=np.int64)
    placed = spread(lengths, costs, visit, packs, capacity, max_documents)
    if placed.min() < 0:
        balancing.gather(placed, lengths, packs, capacity, max_documents, spare)
    fill_empty(placed, packs)
    return placed


def place_inside(
    lengths: Integers,
    costs: Integers,
    ranks: Integers,
    num_ranks: int,
    packs: int,
    capacity: int,
    max_documents: int,
) -> Integers:
    """`place` on every rank: (documents,) pack of each document among the packs of its rank; −1 for none.

    `ranks` are the ranks of the documents, −1 for none.
    """
    keys = (ranks + 1).astype(np.uint16) if num_ranks < 1 << 16 else ranks  # which numpy sorts by radix
    placed, order = np.full_like(ranks, -1), np.argsort(keys, kind="stable")
    offsets = np.searchsorted(ranks[order], np.arange(num_ranks + 1))
    order, offsets = order[offsets[0] :], offsets - offsets[0]
    placed[order] = _spread_each(lengths[order], costs[order], offsets, packs, capacity, max_documents)
    left = order[placed[order] < 0]
    used = np.bincount((ranks * packs + placed)[placed >= 0], minlength=num_ranks * packs)
    unused = np.flatnonzero(used.reshape(num_ranks, packs).min(axis=1) == 0)
    for rank in np.union1d(ranks[left], unused):
        own = order[offsets[rank] : offsets[rank + 1]]
        if len(own) > 1:
            placed[own] = place(lengths[own], costs[own], packs, capacity, max_documents)
    return placed
