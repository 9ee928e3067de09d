"""Documents by falling length: a counting sort, or a sort of keys where the lengths are too many for a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import Compiled
from multipack.planning.lengths import Integers


@Compiled
def _count_out(lengths: Integers, longest: int, order: NDArray[Any]) -> None:
    """Write document numbers by falling length, equal lengths by rising number, with a table of all lengths."""
    starts = np.zeros(longest + 2, dtype=np.int64)
    for length in lengths:
        starts[longest - length + 1] += 1
    for bucket in range(1, longest + 2):
        starts[bucket] += starts[bucket - 1]
    for document in range(len(lengths)):
        bucket = longest - lengths[document]
        order[starts[bucket]] = document
        starts[bucket] += 1


def longest_first(lengths: Integers, small: bool = False) -> NDArray[Any]:
    """(documents,) document numbers by falling length, equal lengths by rising number.

    Lengths are 0 or more. The numbers are int64, or int32 where they fit if `small`: half the memory to write and read.
    """
    longest = int(lengths.max(initial=0))
    numbers = np.int32 if small and len(lengths) < 1 << 31 else np.int64
    # Counting 10 million documents takes 0.07 to 0.1 s, numpy's sort 0.16 to 0.7 s: AVX-512 makes it faster on some
    # processors and slower on others. The sort is faster where the table is much longer than the documents.
    if longest <= 8 * len(lengths):
        order = np.empty(len(lengths), numbers)
        _count_out(lengths, longest, order)
        return order
    bits = len(lengths).bit_length()
    keys = (longest - lengths) << bits
    keys |= np.arange(len(lengths), dtype=np.int64)  # keys differ, so that every sort gives the same order
    keys.sort()
    keys &= (1 << bits) - 1
    return keys.astype(numbers, copy=False)
