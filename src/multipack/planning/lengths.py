"""Lengths and packs as arrays: `Packs`, and checks whose errors name the documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning import LARGEST_CAPACITY
from multipack.ranges import check_integer as check_integer
from multipack.ranges import short as short

Integers = NDArray[np.int64]

_NAMED = 5  # offending documents that a message names; the others are counted


def offsets_of(sizes: NDArray[Any]) -> Integers:
    """(len + 1,) int64 cumulative sum of sizes, from 0."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


@dataclass(frozen=True, eq=False)
class Packs:
    """Packs as flat arrays: pack p holds the documents `order[offsets[p]:offsets[p + 1]]`.

    Attributes:
        order: (documents,) int64 document numbers, pack after pack.
        offsets: (packs + 1,) int64, from 0 to the number of documents.
        lower_bound: proven lower bound on the number of packs; None if not computed.
    """

    order: Integers
    offsets: Integers
    lower_bound: int | None = None

    @property
    def gap(self) -> int | None:
        """Packs above the lower bound: 0 if the packing is proven optimal, None without a bound."""
        return None if self.lower_bound is None else len(self) - self.lower_bound

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> Integers:
        """The document numbers of one pack; negative indices count from the end."""
        number = pack + len(self) if pack < 0 else pack
        if not 0 <= number < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[Integers]:
        return (self[pack] for pack in range(len(self)))

    def __repr__(self) -> str:
        return f"Packs({len(self):,} packs of {len(self.order):,} documents)"

    def sizes(self) -> Integers:
        """(packs,) documents of each pack."""
        return np.diff(self.offsets)

    def totals(self, values: ArrayLike) -> Integers:
        """(packs,) int64 sums over each pack of `values`, one value per document number (lengths, for example)."""
        return np.diff(offsets_of(np.asarray(values)[self.order])[self.offsets])


def packs_from(pack_of: Integers, packs: int) -> Packs:
    """`Packs` from the pack number of each document; the documents of a pack keep their order."""
    keys = pack_of.astype(np.uint16) if packs <= 1 << 16 else pack_of  # numpy sorts 16 bits by radix
    return Packs(np.argsort(keys, kind="stable"), offsets_of(np.bincount(pack_of, minlength=packs)))


def check_integers(name: str, values: ArrayLike) -> Integers:
    """A flat list of integers, possibly empty, as int64; `ValueError` for another shape or type."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be a flat list of integers: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a flat list of integers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64, copy=False)


def check_lengths(lengths: ArrayLike, capacity: int | None = None) -> Integers:
    """Lengths as a (documents,) int64 array.

    Args:
        lengths: a list or array of integers.
        capacity: if given, no document may be longer.

    Raises:
        ValueError: empty, not one-dimensional, not integers, below 1, or above the capacity; documents are named by
            number and length.
    """
    checked = check_integers("lengths", lengths)
    if checked.size == 0:
        raise ValueError("lengths is empty: there are no documents")
    if checked.min() < 1:  # also unsigned integers of 2^63 and above
        raise ValueError("every document needs at least 1 token: " + name_documents(checked, checked < 1))
    if capacity is not None:
        capacity = check_integer("capacity", capacity, most=LARGEST_CAPACITY)
        if (longest := int(checked.max())) > capacity:
            raise ValueError(
                f"{name_documents(checked, checked > capacity)}, but a pack holds capacity={capacity:,}; raise the"
                f" capacity to {longest:,}, or truncate, split or drop documents longer than {capacity:,} tokens first"
            )
    return checked


def check_targets(targets: ArrayLike, lengths: Integers) -> Integers:
    """Target counts as int64, between 0 and each document's length − 1.

    Raises:
        ValueError: another shape or type, or a count out of range; the first such document is named.
    """
    counts = check_integers("targets", targets)
    if counts.shape != lengths.shape:
        raise ValueError(f"targets must be {len(lengths):,} integers, one a document, got {len(counts):,}")
    wrong = np.flatnonzero((counts < 0) | (counts >= lengths))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"a document of l tokens has 0 … l − 1 targets: document {first} has {counts[first]} of"
            f" {lengths[first]} tokens ({len(wrong):,} documents are wrong)"
        )
    return counts


def check_weights(weights: ArrayLike, documents: int) -> NDArray[np.float64]:
    """Weights of documents as float64, finite and at least 0.

    Raises:
        ValueError: another shape or type, or a weight out of range; the first such document is named.
    """
    found = np.asarray(weights, dtype=np.float64)
    if found.shape != (documents,):
        raise ValueError(
            f"weights must be {documents:,} numbers, one a document, got an array of {found.shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"weights must be finite and at least 0: document {first} has {found[first]} ({len(wrong):,} are wrong)"
        )
    return found


def check_carried(carried: ArrayLike | None, documents: int) -> Integers:
    """Carried document numbers as int64, empty for None; `ValueError` if one is not the number of a document."""
    numbers = check_integers("carried", () if carried is None else carried)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= documents):
        raise ValueError(f"carried names documents outside 0 … {documents - 1}: {short(numbers.tolist())}")
    return numbers.astype(np.int64)


def name_documents(values: NDArray[Any], wrong: NDArray[np.bool_]) -> str:
    """`document 3 has 0 tokens, document 7 has −2 tokens and 12 more`."""
    numbers = np.flatnonzero(wrong)
    named = ", ".join(f"document {number} has {values[number]} tokens" for number in numbers[:_NAMED])
    return named + (f" and {len(numbers) - _NAMED:,} more" if len(numbers) > _NAMED else "")


def nothing_learned(documents: str, instead: str) -> ValueError:
    """The error for training documents without any target; `instead` says what to look at."""
    return ValueError(f"none of {documents} has a target token, and nothing would be learned: {instead}")
