"""Pack documents into packs of at most `capacity` tokens.

lengths   5 3 4 2 6        capacity 8
next fit  |AAAAABBB|CCCCDD··|EEEEEE··|      in order, one open pack
best fit  |EEEEEEDD|AAAAABBB|CCCC····|      longest first, each into the smallest room that fits

Packing needs the histogram of lengths only. Ten million documents have some thousand distinct lengths, so most of the
work does not depend on the number of documents. Equal packs are one entry, a *pattern*:

lengths        6 ×3, 3 ×7        capacity 12
pattern 0      2×6               1 pack
pattern 1      1×6, 2×3          1 pack
pattern 2      4×3               1 pack
pattern 3      1×3               1 pack
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.kernels import packing as kernels
from multipack.planning.lengths import check_lengths, check_max_documents, check_seconds

Method = Literal["next_fit", "first_fit_decreasing", "best_fit_decreasing", "best_fit", "fewest"]


@dataclass(frozen=True, eq=False)
class Packs:
    """Packs as flat arrays: pack p holds the documents `order[offsets[p]:offsets[p + 1]]`.

    Attributes:
        order: (documents,) int64 document numbers, pack after pack.
        offsets: (packs + 1,) int64, from 0 to the number of documents.
        lower_bound: proven lower bound on the number of packs; None if not computed.
    """

    order: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lower_bound: int | None = None

    @property
    def gap(self) -> int | None:
        """Packs above the lower bound: 0 if the packing is proven optimal, None without a bound."""
        return None if self.lower_bound is None else len(self) - self.lower_bound

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> NDArray[np.int64]:
        """The document numbers of one pack; negative indices count from the end."""
        number = pack + len(self) if pack < 0 else pack
        if not 0 <= number < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[pack] for pack in range(len(self)))

    def __repr__(self) -> str:
        return f"Packs({len(self):,} packs of {len(self.order):,} documents)"

    def sizes(self) -> NDArray[np.int64]:
        """(packs,) documents of each pack."""
        return np.diff(self.offsets)

    def totals(self, values: ArrayLike) -> NDArray[np.int64]:
        """(packs,) int64 sums over each pack of `values`, one value per document number (lengths, for example)."""
        ends = np.zeros(len(self.order) + 1, dtype=np.int64)
        np.cumsum(np.asarray(values)[self.order], out=ends[1:])
        return np.diff(ends[self.offsets])


def packs_from(pack_of: NDArray[np.int64], packs: int) -> Packs:
    """`Packs` from the pack number of each document; the documents of a pack keep their order."""
    offsets = np.zeros(packs + 1, dtype=np.int64)
    np.cumsum(np.bincount(pack_of, minlength=packs), out=offsets[1:])
    return Packs(np.argsort(pack_of, kind="stable"), offsets)


def pack(
    lengths: ArrayLike,
    capacity: int,
    method: Method = "best_fit",
    max_documents: int | None = None,
    time_budget: float = 10.0,
) -> Packs:
    """Put every document into a pack of at most `capacity` tokens.

    Args:
        lengths: (documents,) tokens of each document.
        capacity: most tokens of a pack.
        method: `next_fit` keeps the order of the documents. `first_fit_decreasing` and `best_fit` (also
            `best_fit_decreasing`) take the longest first and need at most 11/9 of the fewest packs + 6/9 (Dósa 2007);
            best fit is exact: always the smallest room that fits. With `max_documents`, first fit in a mixed order
            replaces it where that needs fewer packs. `fewest` starts from best fit and searches for fewer packs and for
            a proof that there are none: see `fewest.py`.
        max_documents: most documents of a pack; None = no limit.
        time_budget: CPU seconds of this process after which `fewest` returns its best packing and bound so far. It is
            checked between rounds. Packs are reproducible if it is not exhausted.

    Returns:
        The packs and a proven lower bound on their number. The documents of a pack keep their order (next fit, first
        fit) or are sorted longest first, equal lengths by document number (best fit, fewest).

    Raises:
        ValueError: lengths that are not positive integers or exceed the capacity, an unknown method, limits below 1.
    """
    checked = check_lengths(lengths, capacity)
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(get_args(Method))}")
    limit = check_max_documents(max_documents, len(checked))
    histogram = count(checked)
    bound = simple_bound(histogram, capacity, limit)
    if method == "next_fit":
        return replace(packs_from(*kernels.next_fit(checked, capacity, limit)), lower_bound=bound)
    by_length = longest_first(checked)
    if method == "first_fit_decreasing":
        placed = np.empty_like(checked)
        placed[by_length], packs = kernels.first_fit(checked[by_length], capacity, limit)
        return replace(packs_from(placed, packs), lower_bound=bound)
    if method == "fewest":
        from multipack.planning.fewest import fewest  # imports SciPy

        patterns, bound = fewest(histogram, capacity, limit, check_seconds("time_budget", time_budget))
    else:
        patterns = best_fit(histogram, capacity, limit)
        if max_documents is not None and patterns.num_packs > bound:
            # Longest first fills packs with `limit` short documents that hold few tokens; a mixed order does not.
            mixed = np.argsort(np.random.Philox(0).random_raw(len(checked)), kind="stable")
            placed = np.empty_like(checked)
            placed[mixed], packs = kernels.first_fit(checked[mixed], capacity, limit)
            if packs < patterns.num_packs:
                return replace(packs_from(placed, packs), lower_bound=bound)
    return Packs(*kernels.hand_out(by_length, histogram.counts, *patterns), bound)


def minimum_packs(lengths: ArrayLike, capacity: int, max_documents: int | None = None) -> int:
    """A proven lower bound on the packs that these documents need, in O(documents + longest).

    Args:
        lengths: (documents,) tokens of each document.
        capacity: most tokens of a pack.
        max_documents: most documents of a pack; None = no limit.

    Raises:
        ValueError: lengths that are not positive integers or exceed the capacity, a limit below 1.
    """
    checked = check_lengths(lengths, capacity)
    return simple_bound(count(checked), capacity, check_max_documents(max_documents, len(checked)))


class Histogram(NamedTuple):
    """Number of documents of each length.

    Attributes:
        values: (distinct,) int64 lengths in tokens, falling.
        counts: (distinct,) int64 documents of each length.
    """

    values: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.values @ self.counts)


def count(lengths: NDArray[np.int64]) -> Histogram:
    """The histogram of checked lengths."""
    if _is_sparse(lengths):
        values, counts = np.unique(lengths, return_counts=True)
    else:
        dense = np.bincount(lengths)
        values = np.flatnonzero(dense)
        counts = dense[values]
    return Histogram(values[::-1].copy(), counts[::-1].astype(np.int64))


def longest_first(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(documents,) document numbers by falling length, equal lengths by rising number."""
    if _is_sparse(lengths):
        return np.argsort(-lengths, kind="stable")
    return kernels.descending(lengths, int(lengths.max()))


def _is_sparse(lengths: NDArray[np.int64]) -> bool:
    """Whether a table over all lengths would cost more than sorting the documents."""
    return int(lengths.max()) > 16 * len(lengths) + (1 << 16)


def simple_bound(histogram: Histogram, capacity: int, max_documents: int) -> int:
    """A proven lower bound on the number of packs, in O(distinct lengths).

    The largest of ⌈tokens / capacity⌉, ⌈documents / max_documents⌉, and for every length a ≤ capacity / 2 the bound L2
    of Martello and Toth (1990): documents longer than capacity − a share no pack with a document of at least a tokens,
    those above capacity / 2 share no pack with each other, and the others of at least a tokens fill the room that these
    leave before they need packs of their own.
    """
    values, counts = histogram
    documents = np.concatenate([[0], np.cumsum(counts)])  # of the longest lengths
    tokens = np.concatenate([[0], np.cumsum(values * counts)])
    bound = max(-(-int(tokens[-1]) // capacity), -(-int(documents[-1]) // max_documents))
    above_half = int(
        np.searchsorted(-values, -(capacity // 2))
    )  # number of lengths above half of the capacity
    shortest = values[above_half:]
    alone = np.searchsorted(-values, -(capacity - shortest))
    until = np.arange(above_half, len(values)) + 1
    room = (documents[above_half] - documents[alone]) * capacity - (tokens[above_half] - tokens[alone])
    rest = np.maximum(tokens[until] - tokens[above_half] - room, 0)
    by_length = documents[above_half] + -(-rest // capacity)
    return max(bound, int(documents[above_half]), int(by_length.max(initial=0)))


class Patterns(NamedTuple):
    """Packs of a histogram's documents. Pattern p has the runs starts[p] … starts[p + 1] − 1.

    Attributes:
        starts: (patterns + 1,) int64.
        numbers: (runs,) int64 index into the histogram's lengths.
        copies: (runs,) int64 documents of that length in each pack.
        packs: (patterns,) int64 number of packs.
    """

    starts: NDArray[np.int64]
    numbers: NDArray[np.int64]
    copies: NDArray[np.int64]
    packs: NDArray[np.int64]

    @property
    def num_packs(self) -> int:
        """Number of packs of all patterns."""
        return int(self.packs.sum())

    def documents(self, distinct: int) -> NDArray[np.int64]:
        """(distinct,) documents of each length in all packs."""
        times = np.repeat(self.packs, np.diff(self.starts))
        total = np.zeros(distinct, dtype=np.int64)
        np.add.at(total, self.numbers, times * self.copies)
        return total

    @classmethod
    def empty(cls) -> Patterns:
        """No packs."""
        none = np.zeros(0, dtype=np.int64)
        return cls(np.zeros(1, dtype=np.int64), none, none, none)

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
    bits = tuple(np.zeros((room >> shift) + 1, dtype=np.uint64) for shift in (6, 12, 18))
    opened, packs, newest, runs = kernels.best_fit(*histogram, room, max_documents, table, bits)
    order = np.argsort(opened)
    return Patterns(*kernels.unroll(order, newest, runs), packs[order])
