"""Lengths as a histogram, bounds on the number of packs, and packs as patterns.

Packing needs the histogram of lengths only. Ten million documents have some thousand distinct lengths, so most of the
work does not depend on the number of documents. Equal packs are one *pattern*:

lengths        6 ×3, 3 ×7        capacity 12
pattern 0      2×6               1 pack
pattern 1      1×6, 2×3          1 pack
pattern 2      4×3               1 pack
pattern 3      1×3               1 pack
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from multipack.planning.kernels import fit as kernels
from multipack.planning.lengths import Integers


class Histogram(NamedTuple):
    """Number of documents of each length."""

    values: Integers  # (distinct,) lengths in tokens, falling
    counts: Integers  # (distinct,) documents of each length

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.values @ self.counts)


def count(lengths: Integers) -> Histogram:
    """The histogram of checked lengths."""
    # A table of all lengths may be larger than the documents.
    if int(lengths.max()) > 16 * len(lengths) + (1 << 16):
        values, counts = np.unique(lengths, return_counts=True)
    else:
        dense = np.bincount(lengths)
        values = np.flatnonzero(dense)
        counts = dense[values]
    return Histogram(values[::-1].copy(), counts[::-1].astype(np.int64))


def simple_bound(histogram: Histogram, capacity: int, max_documents: int) -> int:
    """A proven lower bound on the number of packs, in O(distinct lengths).

    The largest of ⌈tokens / capacity⌉, ⌈documents / max_documents⌉, and for every length a ≤ capacity / 2 the bound L2
    of Martello and Toth (1990): documents longer than capacity − a share no pack with a document of at least a tokens,
    documents above capacity / 2 share no pack with each other, and the others of at least a tokens fill their packs
    before they need further ones.
    """
    values, counts = histogram
    documents = np.concatenate([[0], np.cumsum(counts)])  # of the longest lengths
    tokens = np.concatenate([[0], np.cumsum(values * counts)])
    bound = max(-(-int(tokens[-1]) // capacity), -(-int(documents[-1]) // max_documents))
    above_half = int(np.searchsorted(-values, -(capacity // 2)))  # number of lengths above half the capacity
    shortest = values[above_half:]
    alone = np.searchsorted(-values, -(capacity - shortest))
    until = np.arange(above_half, len(values)) + 1
    room = (documents[above_half] - documents[alone]) * capacity - (tokens[above_half] - tokens[alone])
    rest = np.maximum(tokens[until] - tokens[above_half] - room, 0)
    by_length = documents[above_half] + -(-rest // capacity)
    return max(bound, int(documents[above_half]), int(by_length.max(initial=0)))


class Patterns(NamedTuple):
    """Packs of a histogram's documents. Pattern p has the runs starts[p] … starts[p + 1] − 1."""

    starts: Integers  # (patterns + 1,)
    numbers: Integers  # (runs,) index into the histogram's lengths
    copies: Integers  # (runs,) documents of that length in each pack
    packs: Integers  # (patterns,) number of packs

    @property
    def num_packs(self) -> int:
        """Number of packs of all patterns."""
        return int(self.packs.sum())

    def columns(self, distinct: int) -> Integers:
        """(distinct, patterns) documents of each length in a pack of each pattern."""
        table = np.zeros((distinct, len(self.packs)), dtype=np.int64)
        table[self.numbers, np.repeat(np.arange(len(self.packs)), np.diff(self.starts))] = self.copies
        return table

    @classmethod
    def of(cls, columns: Integers, packs: Integers) -> Patterns:
        """The patterns of columns, with the number of packs of each."""
        pattern, number = np.nonzero(columns.T)
        starts = np.searchsorted(pattern, np.arange(len(packs) + 1))
        return cls(starts, number, columns[number, pattern], packs)

    @classmethod
    def join(cls, first: Patterns, second: Patterns) -> Patterns:
        """The packs of both."""
        starts = np.concatenate([first.starts[:-1], second.starts + first.starts[-1]])
        return cls(starts, *(np.concatenate(pair) for pair in zip(first[1:], second[1:], strict=True)))


def best_fit(histogram: Histogram, capacity: int, max_documents: int) -> Patterns:
    """Exact best fit decreasing: each document, longest first, into the smallest room that fits.

    The operating system provides the pages of a zeroed table when they are first used, so that a capacity of many
    millions costs no more than the rooms that occur.
    """
    room = min(capacity, histogram.tokens)
    table = np.zeros(room + 1, dtype=np.int64)
    bits = np.zeros((room >> 6) + 1, dtype=np.uint64)
    opened, packs, newest, runs = kernels.best_fit(*histogram, room, max_documents, table, bits)
    order = np.argsort(opened)
    return Patterns(*kernels.unroll(order, newest, runs), packs[order])
