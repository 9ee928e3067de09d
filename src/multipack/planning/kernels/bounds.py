"""What no arrangement of a step's documents can beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import compiled

Integers = NDArray[np.int64]


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
