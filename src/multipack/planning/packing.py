"""Documents into packs of at most `capacity` tokens: lengths in, flat arrays out.

lengths   5 3 4 2 6        capacity 8
next fit  |AAAAABBB|CCCCDD··|EEEEEE··|      order kept, one pack open
best fit  |EEEEEEDD|AAAAABBB|CCCC····|      longest first, each into the tightest room
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.kernels import packing as kernels

Method = Literal["next_fit", "first_fit_decreasing", "best_fit_decreasing", "best_fit"]

LARGEST_CAPACITY = 1 << 27
"""Most tokens of a pack: rooms are looked up in arrays of that size."""

_FIRST = 5  # offending documents that a message names before it counts the rest


@dataclass(frozen=True, eq=False)
class Packs:
    """Packs as flat arrays: pack p holds the documents `order[offsets[p]:offsets[p + 1]]`.

    Attributes:
        order: (documents,) int64 document numbers, pack after pack.
        offsets: (packs + 1,) int64, from 0 to the number of documents.
    """

    order: NDArray[np.int64]
    offsets: NDArray[np.int64]

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
    lengths: ArrayLike, capacity: int, method: Method = "best_fit", max_documents: int | None = None
) -> Packs:
    """Put every document into a pack of at most `capacity` tokens.

    Args:
        lengths: (documents,) tokens of each document.
        capacity: most tokens of a pack.
        method: `next_fit` keeps the documents' order; `first_fit_decreasing` and `best_fit_decreasing`
            (also called `best_fit`) take the longest first and need at most 11/9 of the fewest packs + 6/9
            (Dósa 2007); best fit is exact: always the tightest room.
        max_documents: most documents of a pack; None = no limit.

    Returns:
        The packs, each with its documents in rising number.

    Raises:
        ValueError: lengths that are no positive integers or exceed the capacity, an unknown method.
    """
    checked = check_lengths(lengths, capacity)
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(get_args(Method))}")
    limit = check_max_documents(max_documents, len(checked))
    room = min(capacity, int(checked.sum()))
    if method == "next_fit":
        placed, count = kernels.next_fit(checked, room, limit)
        return packs_from(placed, count)
    order = kernels.descending(checked)
    kernel = kernels.first_fit if method == "first_fit_decreasing" else kernels.best_fit
    placed_in_order, count = kernel(checked[order], room, limit)
    placed = np.empty_like(placed_in_order)
    placed[order] = placed_in_order
    return packs_from(placed, count)


def check_max_documents(max_documents: int | None, documents: int) -> int:
    """The limit as an integer: the number of documents where there is none.

    Raises:
        ValueError: a limit below 1.
    """
    if max_documents is None:
        return documents
    return check_integer("max_documents", max_documents)


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int.

    Raises:
        ValueError: no whole number, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def check_lengths(lengths: ArrayLike, capacity: int | None = None) -> NDArray[np.int64]:
    """Lengths as a (documents,) int64 array.

    Args:
        lengths: a list or array of integers.
        capacity: when given, no document may be longer.

    Raises:
        ValueError: empty, not one-dimensional, not integers, below 1, or above the capacity; offending
            documents are named by number and length.
    """
    try:
        array = np.asarray(lengths)
    except ValueError as error:
        raise ValueError(f"lengths must be a flat list of integers: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        raise ValueError("lengths is empty: there are no documents")
    if array.dtype.kind not in "iu":
        raise ValueError(f"lengths must be integers, got {array.dtype}{_first_fraction(array)}")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"lengths must be below 2^63, got {array.max()}")
    checked = array.astype(np.int64, copy=False)
    if checked.min() < 1:
        raise ValueError("every document needs at least 1 token: " + name_documents(checked, checked < 1))
    if capacity is not None:
        capacity = check_integer("capacity", capacity)
        if capacity > LARGEST_CAPACITY:
            raise ValueError(f"capacity={capacity:,} exceeds the largest supported, {LARGEST_CAPACITY:,}")
        if checked.max() > capacity:
            raise ValueError(
                f"{name_documents(checked, checked > capacity)}, but a pack holds capacity={capacity:,};"
                f" raise the capacity to {checked.max():,}, or truncate, split or drop longer documents first"
            )
    return checked


def name_documents(values: NDArray[Any], wrong: NDArray[np.bool_]) -> str:
    """`document 3 has 0 tokens, document 7 has −2 tokens and 12 more`."""
    numbers = np.flatnonzero(wrong)
    named = ", ".join(f"document {number} has {values[number]} tokens" for number in numbers[:_FIRST])
    return named + (f" and {len(numbers) - _FIRST:,} more" if len(numbers) > _FIRST else "")


def _first_fraction(array: NDArray[Any]) -> str:
    """Which documents of a float array are no whole numbers, for a message."""
    if array.dtype.kind != "f":
        return ""
    odd = ~(np.isfinite(array) & (array == np.floor(array)))
    return f": {name_documents(array, odd)}" if odd.any() else "; convert them with .astype(int)"
