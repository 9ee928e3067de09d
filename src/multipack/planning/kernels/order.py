"""Documents by falling length: a counting sort, or a sort of keys where the lengths are too many for a table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import compiled

Integers = NDArray[np.int64]


@compiled
def _counted(lengths: Integers, longest: int) -> Integers:
    """Document numbers by falling length, equal lengths by rising number, with a table of all lengths to `longest`."""
    starts = np.zeros(longest + 2, dtype=np.int64)
    for length in lengths:
        starts[longest - length + 1] += 1
    for bucket in range(1, longest + 2):
        starts[bucket] += starts[bucket - 1]
    order = np.empty(len(lengths), dtype=np.int64)
    for document in range(len(lengths)):
        bucket = longest - lengths[document]
        order[starts[bucket]] = document
        starts[bucket] += 1
    return order


def longest_first(lengths: Integers) -> Integers:
    """(documents,) document numbers by falling length, equal lengths by rising number.

    Lengths are 0 or more.
    """
    longest = int(lengths.max(initial=0))
    # Counting 10 million documents takes 0.1 s on every processor. numpy's sort takes 0.16 s with AVX-512 and 0.7 s
    # without, but less than the table where the table is much longer than the documents.
    if longest <= 8 * len(lengths):
        return _counted(lengths, longest)
    bits = len(lengths).bit_length()
    keys = (longest - lengths) << bits
    keys |= np.arange(len(lengths), dtype=np.int64)  # keys differ, so that every sort gives the same order
    keys.sort()
    keys &= (1 << bits) - 1
    return keys
