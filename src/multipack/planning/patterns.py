"""Packs that are alike, as one entry: a *pattern* says how many documents of each length a pack holds.

lengths        6 ×3, 3 ×7        capacity 12
pattern 0      2×6               1 pack
pattern 1      1×6, 2×3          1 pack
pattern 2      4×3               1 pack
pattern 3      1×3               1 pack
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import packing, patterns
from multipack.planning.lengths import Histogram


class Patterns(NamedTuple):
    """Packs of a histogram's documents as flat arrays: pattern p has the runs starts[p] … starts[p + 1] − 1.

    Attributes:
        starts: (patterns + 1,) int64.
        numbers: (runs,) int64, which of the histogram's lengths.
        copies: (runs,) int64, how many documents of that length in each pack.
        packs: (patterns,) int64, how many packs are alike.
    """

    starts: NDArray[np.int64]
    numbers: NDArray[np.int64]
    copies: NDArray[np.int64]
    packs: NDArray[np.int64]

    @property
    def num_packs(self) -> int:
        """Packs in all."""
        return int(self.packs.sum())

    def demand(self, distinct: int) -> NDArray[np.int64]:
        """(distinct,) documents of each length that all packs hold."""
        times = np.repeat(self.packs, np.diff(self.starts))
        total = np.zeros(distinct, dtype=np.int64)
        np.add.at(total, self.numbers, times * self.copies)
        return total


def join(parts: list[Patterns]) -> Patterns:
    """The packs of several, one after another; all number the same lengths."""
    begins = np.cumsum([0] + [len(part.numbers) for part in parts])
    starts = [part.starts[:-1] + begin for part, begin in zip(parts, begins[:-1], strict=True)]
    return Patterns(
        np.concatenate([*starts, begins[-1:]]),
        np.concatenate([part.numbers for part in parts]),
        np.concatenate([part.copies for part in parts]),
        np.concatenate([part.packs for part in parts]),
    )


def best_fit(histogram: Histogram, capacity: int, max_documents: int) -> Patterns:
    """Exact best fit decreasing; see the kernel of that name for the argument.

    The system gives memory to a table where it is first touched, so that a capacity of many millions costs what
    the documents' rooms cost.
    """
    room = min(capacity, histogram.tokens)
    last = np.zeros(room + 1, dtype=np.int64)
    fine, coarse, top = (np.zeros((room >> bits) + 1, dtype=np.uint64) for bits in (6, 12, 18))
    runs = np.empty((histogram.documents, 3), dtype=np.int64)
    opened, packs, newest = packing.best_fit(*histogram, room, max_documents, last, fine, coarse, top, runs)
    order = np.argsort(opened)
    return Patterns(*packing.unroll(order, newest, runs), packs[order])


def fill(histogram: Histogram, capacity: int, max_documents: int, nodes: int, work: int) -> Patterns:
    """Packs made one after another, each as full as the documents left allow.

    Best fit takes what comes and finds small gaps at its end that nothing fits; this looks for documents that fill
    each pack to the last token, beginning with the longest, so that what remains for the end are short documents,
    which fill anything (minimum bin slack: Gupta and Ho 1999; with the longest fixed: Fleszar and Hindi 2002).

    Args:
        histogram: the documents.
        capacity: most tokens of a pack.
        max_documents: most documents of a pack.
        nodes: documents that the search for one pack tries.
        work: all searches together, in 64-bit words shifted; a billion takes about a second.
    """
    room, documents = min(capacity, histogram.tokens), histogram.documents
    starts = np.empty(documents + 1, dtype=np.int64)
    numbers, copies, packs = (np.empty(documents, dtype=np.int64) for _ in range(3))
    made = patterns.fill(*histogram, room, max_documents, nodes, work, starts, numbers, copies, packs)
    runs = starts[made]
    return Patterns(
        starts[: made + 1].copy(), numbers[:runs].copy(), copies[:runs].copy(), packs[:made].copy()
    )
