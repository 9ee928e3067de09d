"""Lengths of documents: checked once, and counted.

A histogram says all that packing needs to know: how many documents there are of each length. Ten million
documents have some thousand lengths, so what works on the histogram does not feel how many there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.kernels import packing as kernels

LARGEST_CAPACITY = 1 << 27
"""Most tokens of a pack: rooms are looked up in arrays of that size."""

_FIRST = 5  # offending documents that a message names before it counts the rest


class Histogram(NamedTuple):
    """How many documents there are of each length.

    Attributes:
        values: (distinct,) int64 lengths in tokens, falling.
        counts: (distinct,) int64 documents of each length, at least 1.
    """

    values: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def documents(self) -> int:
        """Documents in all."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return int(self.values @ self.counts)


def count(lengths: NDArray[np.int64]) -> Histogram:
    """The histogram of checked lengths: O(documents + longest), or by sorting where lengths are few and large."""
    if is_sparse(lengths):
        values, counts = np.unique(lengths, return_counts=True)
    else:
        dense = kernels.count(lengths, int(lengths.max()))
        values = np.flatnonzero(dense)
        counts = dense[values]
    return Histogram(values[::-1].copy(), counts[::-1].astype(np.int64))


def longest_first(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(documents,) document numbers by falling length, equal lengths by rising number."""
    if is_sparse(lengths):
        return np.argsort(-lengths, kind="stable")
    return kernels.descending(lengths, int(lengths.max()))


def is_sparse(lengths: NDArray[np.int64]) -> bool:
    """Whether a table as long as the longest document would cost more than sorting the documents."""
    return int(lengths.max()) > 16 * len(lengths) + (1 << 16)


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


def check_seconds(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
        ValueError: no number, not finite, or not above 0.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.number)
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"{name} must be a finite number of seconds above 0, got {value!r}")
    return float(value)


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
