"""A seeded order that is the same on every platform and with every version of numpy.

Each document gets a key that depends on (seed, epoch, its number) alone; the order is that of the keys.
Keys come from the output function of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
number generators"), so any one of them can be computed without the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK = 1 << 16
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

DOCUMENTS, BLOCKS, BATCHES = 0, 1, 2
"""Streams: independent keys for the order of documents, for what is random in a block, and for random batches."""


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * _FIRST & _MASK
    value = (value ^ (value >> 27)) * _SECOND & _MASK
    return value ^ (value >> 31)


def keys(seed: int, epoch: int, numbers: NDArray[np.int64], stream: int = DOCUMENTS) -> NDArray[np.uint64]:
    """A 64-bit key for each of `numbers` (not negative), as (len,) uint64."""
    start = seed
    for part in (epoch, stream):
        start = _mix(start + _GOLDEN) + part
    start = _mix(start + _GOLDEN)
    key = numbers.astype(np.uint64)
    key += np.uint64(1)
    key *= np.uint64(_GOLDEN)
    key += np.uint64(start)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        key ^= key >> np.uint64(shift)
        key *= np.uint64(factor)
    key ^= key >> np.uint64(31)
    return key


def permutation(seed: int, epoch: int, count: int, stream: int = DOCUMENTS) -> NDArray[np.int64]:
    """The numbers 0 … count − 1 in seeded order, as (count,) int64."""
    own = keys(seed, epoch, np.arange(count, dtype=np.int64), stream)
    order = np.argsort(
        own
    )  # several times as fast as a stable sort, and the same where no two keys are equal
    for start in range(0, count, _CHUNK):
        part = own[order[start : start + _CHUNK + 1]]
        if (part[1:] == part[:-1]).any():
            return np.argsort(own, kind="stable")
    return order


def falling(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of the documents, longest first, equal ones in their own order."""
    bits = len(lengths).bit_length()
    keys = (int(lengths.max()) - lengths) << bits
    keys |= np.arange(len(lengths), dtype=np.int64)
    keys.sort()  # no two are equal, so any sort gives this order
    keys &= (1 << bits) - 1
    return keys
