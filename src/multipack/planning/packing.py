"""Documents into packs of at most `capacity` tokens: lengths in, flat arrays out.

lengths   5 3 4 2 6        capacity 8
next fit  |AAAAABBB|CCCCDD··|EEEEEE··|      order kept, one pack open
best fit  |EEEEEEDD|AAAAABBB|CCCC····|      longest first, each into the tightest room
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.bounds import simple_bound
from multipack.planning.kernels import packing as kernels
from multipack.planning.lengths import (
    check_integer,
    check_lengths,
    check_max_documents,
    check_seconds,
    count,
    longest_first,
)
from multipack.planning.patterns import best_fit

__all__ = ["Method", "Packs", "check_integer", "check_lengths", "pack", "packs_from"]

Method = Literal["next_fit", "first_fit_decreasing", "best_fit_decreasing", "best_fit", "fewest"]


@dataclass(frozen=True, eq=False)
class Packs:
    """Packs as flat arrays: pack p holds the documents `order[offsets[p]:offsets[p + 1]]`.

    Attributes:
        order: (documents,) int64 document numbers, pack after pack.
        offsets: (packs + 1,) int64, from 0 to the number of documents.
        lower_bound: no packing of these documents has fewer packs (proven); None where nobody has looked.
    """

    order: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lower_bound: int | None = None

    @property
    def gap(self) -> int | None:
        """Packs beyond the proven lower bound; 0 says that there cannot be fewer, None that no bound is known."""
        return None if self.lower_bound is None else len(self) - self.lower_bound

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> NDArray[np.int64]:
        """The document numbers of one pack; negative numbers count from the end."""
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
        """(packs,) int64: the sum of `values` (one a document number, such as lengths) over each pack."""
        ends = np.zeros(len(self.order) + 1, dtype=np.int64)
        np.cumsum(np.asarray(values)[self.order], out=ends[1:])
        return np.diff(ends[self.offsets])


def packs_from(placed: NDArray[np.int64], packs: int) -> Packs:
    """`Packs` from each document's pack number; documents of a pack keep their own order."""
    offsets = np.zeros(packs + 1, dtype=np.int64)
    np.cumsum(np.bincount(placed, minlength=packs), out=offsets[1:])
    return Packs(np.argsort(placed, kind="stable"), offsets)


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
        method: `next_fit` keeps the documents' order. `first_fit_decreasing` and `best_fit` (also called
            `best_fit_decreasing`) take the longest first and need at most 11/9 of the fewest packs + 6/9
            (Dósa 2007); best fit is exact: always the tightest room. `fewest` begins with best fit and
            searches for fewer packs and for a proof that there cannot be fewer: see `fewest.py`.
        max_documents: most documents of a pack; None = no limit.
        time_budget: CPU seconds of this process after which `fewest` returns what it has, and the bound that it has
            proven; it looks at the clock between its rounds. Packs are reproducible where it was not needed.

    Returns:
        The packs and a proven lower bound on their number. The documents of a pack stand in their own order
        (next fit, first fit) or longest first, equal lengths in rising number (best fit, fewest).

    Raises:
        ValueError: lengths that are no positive integers or exceed the capacity, an unknown method, limits that are
            not positive.
    """
    checked = check_lengths(lengths, capacity)
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(get_args(Method))}")
    limit = check_max_documents(max_documents, len(checked))
    histogram = count(checked)
    bound = simple_bound(histogram, capacity, limit)
    if method == "next_fit":
        placed, packs = kernels.next_fit(checked, capacity, limit)
        return replace(packs_from(placed, packs), lower_bound=bound)
    by_length = longest_first(checked)
    if method == "first_fit_decreasing":
        placed = np.empty_like(checked)
        placed[by_length], packs = kernels.first_fit(checked[by_length], capacity, limit)
        return replace(packs_from(placed, packs), lower_bound=bound)
    if method == "fewest":
        from multipack.planning.fewest import fewest  # loads SciPy

        patterns, bound = fewest(histogram, capacity, limit, check_seconds("time_budget", time_budget))
    else:
        patterns = best_fit(histogram, capacity, limit)
    return Packs(*kernels.hand_out(by_length, histogram.counts, *patterns), bound)
