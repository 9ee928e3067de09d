"""How few packs there can be: bounds that no packing beats.

Each is the value of a *weight* u(l) for documents such that no pack that fits weighs more than 1: then
Σ u(l) over all documents, rounded up, is proven. (Such weights are the solutions of the dual of the pattern LP,
which `fewest.py` solves for the best of them.)

    u(l) = l / capacity            tokens
    u(l) = 1 / max_documents       documents
    u(l) = 1 if 2·l > capacity     documents that exclude each other
    L2 of Martello and Toth        1 above capacity − a, 0 below a, and in between what the long leave to the rest
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from multipack.planning.lengths import Histogram, check_lengths, check_max_documents, count


def minimum_packs(lengths: ArrayLike, capacity: int, max_documents: int | None = None) -> int:
    """A proven lower bound on the packs that these documents need, in O(documents + longest).

    Args:
        lengths: (documents,) tokens of each document.
        capacity: most tokens of a pack.
        max_documents: most documents of a pack; None = no limit.

    Raises:
        ValueError: lengths that are no positive integers or exceed the capacity, a limit below 1.
    """
    checked = check_lengths(lengths, capacity)
    return simple_bound(count(checked), capacity, check_max_documents(max_documents, len(checked)))


def simple_bound(histogram: Histogram, capacity: int, max_documents: int) -> int:
    """The largest of the bounds of this page, in O(distinct lengths).

    ⌈tokens / capacity⌉, ⌈documents / max_documents⌉, and for every length a ≤ capacity / 2 the bound L2 of
    Martello and Toth (1990): documents longer than capacity − a are alone among those of at least a
    tokens, those above capacity / 2 exclude each other, and the rest of at least a tokens must fill what these leave.
    """
    values, counts = histogram.values, histogram.counts
    documents = np.concatenate([[0], np.cumsum(counts)])  # of the longest lengths
    tokens = np.concatenate([[0], np.cumsum(values * counts)])
    bound = max(-(-int(tokens[-1]) // capacity), -(-int(documents[-1]) // max_documents))
    above_half = int(np.searchsorted(-values, -(capacity // 2)))  # lengths above half of the capacity
    least = values[above_half:]
    alone = np.searchsorted(-values, -(capacity - least))
    until = np.arange(above_half, len(values)) + 1
    left = (documents[above_half] - documents[alone]) * capacity - (tokens[above_half] - tokens[alone])
    rest = np.maximum(tokens[until] - tokens[above_half] - left, 0)
    by_length = documents[above_half] + -(-rest // capacity)
    return max(bound, int(documents[above_half]), int(by_length.max(initial=0)))
