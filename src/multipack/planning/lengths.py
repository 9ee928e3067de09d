"""Checks of lengths and other arguments. An error names the documents or the argument, and what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST_CAPACITY = 1 << 27
"""Most tokens of a pack: kernels index arrays of that size by tokens."""

_NAMED = 5  # offending documents that a message names; the others are counted


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int.

    Raises:
        ValueError: not a whole number, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def check_seconds(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
        ValueError: not a number, not finite, or not above 0.
    """
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number of seconds above 0, got {value!r}")
    return float(value)


def check_max_documents(max_documents: int | None, documents: int) -> int:
    """The limit of documents in a pack as an integer: all of them for None.

    Raises:
        ValueError: a limit below 1.
    """
    return documents if max_documents is None else check_integer("max_documents", max_documents)


def check_lengths(lengths: ArrayLike, capacity: int | None = None) -> NDArray[np.int64]:
    """Lengths as a (documents,) int64 array.

    Args:
        lengths: a list or array of integers.
        capacity: if given, no document may be longer.

    Raises:
        ValueError: empty, not one-dimensional, not integers, below 1, or above the capacity; documents are named by
            number and length.
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
        raise ValueError(f"lengths must be integers, got {array.dtype}{_first_fractions(array)}")
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
    named = ", ".join(f"document {number} has {values[number]} tokens" for number in numbers[:_NAMED])
    return named + (f" and {len(numbers) - _NAMED:,} more" if len(numbers) > _NAMED else "")


def _first_fractions(array: NDArray[Any]) -> str:
    """The documents of a float array that are not whole numbers, for a message."""
    if array.dtype.kind != "f":
        return ""
    fractions = ~(np.isfinite(array) & (array == np.floor(array)))
    return f": {name_documents(array, fractions)}" if fractions.any() else "; convert them with .astype(int)"
