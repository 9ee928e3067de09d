"""Lengths in units of several tokens, where there are too many distinct ones for the pattern LP.

Rounded *up*, every pattern of the coarse problem fits the real documents: it gives packs, but its bound is none of the
real problem's. Rounded *down*, every real pack is a pattern of the coarse problem: it gives no packs, but its bound is
proven for the real one.

    tokens               1000   1490   2017            capacity 4,500
    units of 100 above     10     15     21                        45
    units of 100 below     10     14     20                        45
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels.packing import hand_out
from multipack.planning.lengths import Histogram
from multipack.planning.patterns import Patterns


class Grid(NamedTuple):
    """A problem in units of `size` tokens; with size 1 it is the real problem.

    Attributes:
        histogram: documents of each coarse length.
        capacity: units of a pack.
        size: tokens of a unit.
        numbers: (distinct,) for each real length, which coarse length it has become; one more than the last where it
            is left out.
    """

    histogram: Histogram
    capacity: int
    size: int
    numbers: NDArray[np.int64]

    @classmethod
    def below(cls, real: Histogram, capacity: int, size: int) -> Grid:
        """Lengths and capacity rounded down: what is impossible here is impossible.

        Documents that fit into a pack have Σ ⌊l / size⌋ ≤ ⌊capacity / size⌋. Those shorter than a unit are left out.
        """
        histogram, numbers = _merged(real.values // size, real.counts)
        return cls(histogram, capacity // size, size, numbers)

    @classmethod
    def above(cls, real: Histogram, capacity: int, size: int) -> Grid:
        """Lengths rounded up, capacity down: what fits here fits.

        A document longer than the capacity then counts as that: it is alone in its pack.
        """
        units = capacity // size
        values = np.minimum(-(-real.values // size), units)
        histogram, numbers = _merged(values, real.counts)
        return cls(histogram, units, size, numbers)

    def refine(self, coarse: Patterns, real: Histogram) -> Patterns:
        """Coarse packs of `above` with real documents in them, the longest of each coarse length first."""
        if self.size == 1:
            return coarse
        units = np.zeros(len(self.histogram.values), dtype=np.int64)
        np.add.at(units, self.numbers, real.counts)
        numbers = np.repeat(np.arange(len(real.counts)), real.counts)  # one for each document, longest first
        order, offsets = hand_out(numbers, units, *coarse)
        return Patterns(offsets, order, np.ones_like(order), np.ones(len(offsets) - 1, dtype=np.int64))


def _merged(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[Histogram, NDArray[np.int64]]:
    """A histogram of falling lengths, of which some are equal or 0 now, and each length's number in it."""
    first = np.flatnonzero(np.diff(values, prepend=values[0] + 1))  # where the next coarse length begins
    numbers = np.repeat(np.arange(len(first)), np.diff(first, append=len(values)))
    kept = first[values[first] > 0]
    return Histogram(values[kept], np.add.reduceat(counts, first)[: len(kept)]), numbers
