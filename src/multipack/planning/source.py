"""Documents that keep arriving: read one after the other, counted, checked, and no further than is asked.

    source      d0 d1 d2 d3 d4 d5 d6 d7 d8 …        positions count from 0, over all shards
    shard 1/2      d1    d3    d5    d7             a reader of a shard passes over the others' documents
    read           d1    d3 ×  d5                   until there are enough slots; × was longer than a pack

What was read and not handed over, because the source raised in between, is kept for the next time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

Overlong = Literal["error", "drop"]
Resume = Literal["reread", "items"]

NAMED = 1000
"""Dropped documents whose positions are kept; the others are counted."""


@dataclass(frozen=True, eq=False)
class Flight:
    """Documents in flight: read, and not handed out yet.

    Attributes:
        positions: (documents,) int64 places in the source.
        lengths: (documents,) int64 tokens.
        targets: (documents,) int64 target tokens, or None for length − 1.
        items: (documents,) the documents themselves as an array of objects; None where only lengths are read.
    """

    positions: Integers
    lengths: Integers
    targets: Integers | None = None
    items: NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, numbers: Integers | slice) -> Flight:
        """Some of them."""
        return Flight(
            self.positions[numbers],
            self.lengths[numbers],
            None if self.targets is None else self.targets[numbers],
            None if self.items is None else self.items[numbers],
        )

    @classmethod
    def empty(cls, targets: bool, items: bool) -> Flight:
        """No document."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none if targets else None, np.empty(0, dtype=np.object_) if items else None)

    @classmethod
    def joined(cls, parts: list[Flight]) -> Flight:
        """All documents of these, at least one, in turn."""
        if len(parts) == 1:
            return parts[0]
        targets = [part.targets for part in parts if part.targets is not None]
        items = [part.items for part in parts if part.items is not None]
        return cls(
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate(targets) if targets else None,
            np.concatenate(items) if items else None,
        )


@dataclass(frozen=True)
class Dropped:
    """Documents that were passed over because they exceed a pack.

    Attributes:
        documents: how many.
        tokens: of all of them.
        first: positions of the first 1,000.
    """

    documents: int = 0
    tokens: int = 0
    first: tuple[int, ...] = ()

    def more(self, positions: Integers, lengths: Integers) -> Dropped:
        """These, and the given ones."""
        named = self.first + tuple(positions[: NAMED - len(self.first)].tolist())
        return Dropped(self.documents + len(positions), self.tokens + int(lengths.sum()), named)


class Source:
    """An iterable, an iterator or a function of the position, opened where reading begins.

    Args:
        documents: what is iterated; a function gets the position to begin at.
        resume: `items`: whatever is opened goes on where the last reader stopped.
        seekable: whether `documents[i]` is the i-th document, where there is such a thing.
    """

    def __init__(self, documents: Any, resume: Resume, seekable: bool) -> None:
        if not callable(documents) and not hasattr(documents, "__iter__"):
            raise ValueError(
                f"documents must be an iterable or a function of the position, got {type(documents).__name__}"
            )
        self.documents = documents
        self._resume = resume
        self._seekable = seekable
        self._iterator: Iterator[Any] | None = None
        self._used = False
        self._error: Exception | None = None

    def open(self, start: int) -> int:
        """Begin at a position; returns where reading begins in fact: there, or before.

        Raises:
            ValueError: an iterator that was read before.
        """
        documents = self.documents
        self._iterator = None
        begin = start if self._resume == "items" else 0
        if not hasattr(documents, "__iter__"):
            self._iterator, begin = iter(documents(start)), start
        elif iter(documents) is documents:
            if self._used:
                why = "raised an error" if self._error else "was read before"
                raise ValueError(
                    f"documents is an iterator that {why}, and cannot be read again: give a list, a data set, or a"
                    " function that takes a position and returns an iterator from there"
                ) from self._error
            self._iterator = documents
        elif start > begin and self._seekable and _has_places(documents):
            begin = min(start, len(documents))
            self._iterator = (documents[place] for place in range(begin, len(documents)))
        else:
            self._iterator = iter(documents)
        self._used, self._error = True, None
        return begin

    @property
    def is_open(self) -> bool:
        """Whether there is something to read from: not at first, and not after an error."""
        return self._iterator is not None

    def __next__(self) -> Any:
        assert self._iterator is not None
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:  # what an iterator gives after an error may not be the next document
            self._iterator, self._error = None, error
            raise


def _has_places(documents: Any) -> bool:
    return (
        hasattr(documents, "__getitem__")
        and hasattr(documents, "__len__")
        and not isinstance(documents, Mapping)
    )


@dataclass(frozen=True)
class Limits:
    """What a reader hands over.

    Attributes:
        capacity: most slots of a document.
        align: a document takes a multiple of so many slots.
        overlong: what becomes of longer ones.
        rank: the shard that is read: positions rank, rank + world, …
        world: shards.
    """

    capacity: int
    align: int
    overlong: Overlong
    rank: int
    world: int

    def slots(self, lengths: Integers) -> Integers:
        """(documents,) slots that documents of these lengths take."""
        return lengths if self.align == 1 else -(-lengths // self.align) * self.align

    def refuse(self, position: int, length: int) -> ValueError:
        """What is said of a document that no pack holds, or that holds nothing."""
        if length < 1:
            return ValueError(
                f"every document needs at least 1 token: the one at position {position:,} of the source has {length:,};"
                " leave such documents out before"
            )
        aligned = "" if self.align == 1 else f" with align={self.align}"
        return ValueError(
            f"the document at position {position:,} of the source has {length:,} tokens, but a pack holds"
            f" capacity={self.capacity:,}{aligned}; raise the capacity, cut such documents before, or set"
            " overlong='drop' to leave them out, counted"
        )


class Reader(ABC):
    """Reads a source from a position on.

    Attributes:
        position: documents of the source that were looked at, all shards, those dropped included.
        dropped: those of them that were too long.
        ended: the source has no more.
    """

    def __init__(
        self, source: Source, targets: Callable[[Any], Any] | None, limits: Limits, rereads: bool
    ) -> None:
        self._source, self._targets, self._limits = source, targets, limits
        self._rereads = rereads  # documents in flight are read again when reading goes on after a restart
        self.position, self.dropped, self.ended = 0, Dropped(), False
        self._count = self._slots = 0  # documents that are ready for the next call of `read`, and their slots
        self._stop: int | None = None  # how many it shall hand over, once it has enough slots

    def start(self, position: int, dropped: Dropped, ended: bool, flight: Flight) -> Flight:
        """Go on at a position; returns the documents in flight, which were read before, with their items.

        Raises:
            ValueError: the source is shorter than it was, or documents in flight have other lengths.
        """
        self.position, self.dropped, self.ended = position, dropped, ended
        if self._rereads and len(flight):
            self._open(int(flight.positions.min()))
            return self._recall(flight, position)
        if not ended:
            self._open(position)
        return flight

    def read(self, slots: int, documents: int, ahead: int, most: int) -> Flight:
        """Read until there are so many slots or documents, then `ahead` documents more; `most` in all.

        Fewer are returned at the end of the source only.
        """
        while self._count < most:
            if self._stop is None and (self._slots >= slots or self._count >= documents):
                self._stop = self._count + ahead
            if self._stop is not None and self._count >= self._stop:
                break
            if not self._source.is_open:
                self._open(self.position)
            limit = most if self._stop is None else min(most, self._stop)
            if not self._more(slots - self._slots, min(limit, documents if self._stop is None else limit)):
                self.ended = True
                break
        self._count = self._slots = 0
        self._stop = None
        return self._collected()

    def checked_targets(self, counts: Any, positions: Integers, lengths: Integers) -> Integers:
        """Target counts as int64, between 0 and each document's length − 1."""
        array = np.asarray(counts)
        if array.shape != lengths.shape or array.dtype.kind not in "iu":
            raise ValueError(
                f"targets must return whole numbers, one a document, got {array.dtype} of shape {array.shape} for"
                f" {len(lengths):,} documents from position {positions[0]:,} on"
            )
        wrong = np.flatnonzero((array < 0) | (array >= lengths))
        if len(wrong):
            at = wrong[0]
            raise ValueError(
                f"a document of l tokens has 0 … l − 1 targets: targets gave {array[at]} for the document of"
                f" {lengths[at]} tokens at position {positions[at]:,} of the source"
            )
        return array.astype(np.int64)

    @abstractmethod
    def _open(self, position: int) -> None:
        """Open the source so that the document at this position is the next one."""

    @abstractmethod
    def _more(self, slots: int, documents: int) -> bool:
        """Make one document or more ready, until there are so many slots more or `documents` in all; False = end."""

    @abstractmethod
    def _collected(self) -> Flight:
        """Hand over what is ready."""

    @abstractmethod
    def _recall(self, flight: Flight, position: int) -> Flight:
        """Read up to `position`, picking up the documents in flight."""


def changed(position: int, length: int, before: int) -> ValueError:
    """What is said of a document that has another length than it had."""
    return ValueError(
        f"the document at position {position:,} of the source has {length:,} tokens, and had {before:,} when the state"
        " was saved: the source has changed; go on with the documents it had, or start a new stream"
    )


def shorter(position: int, ended: int) -> ValueError:
    """What is said of a source that lacks documents which it had."""
    return ValueError(
        f"the source ends after {ended:,} documents, but {position:,} had been read when the state was saved: it has"
        " changed; go on with the documents it had, or start a new stream"
    )


def plain_items(items: Iterable[Any], positions: Integers) -> list[Any]:
    """Items as a state may hold them: what JSON gives back as it was.

    Raises:
        ValueError: an item that is no plain data.
    """
    held = list(items)
    for item, position in zip(held, positions.tolist(), strict=True):
        odd = _odd(item)
        if odd is not None:
            raise ValueError(
                f"resume='items' keeps documents in the state, but the one at position {position:,} holds a {odd}; make"
                " items of lists, dictionaries with text keys, text and numbers, or use resume='reread'"
            )
    return held


def _odd(value: Any) -> str | None:
    """The type of the first part of a value that is no plain data."""
    if value is None or type(value) in (str, int, float, bool):
        return None
    if type(value) is list:
        parts: Iterable[Any] = value
    elif type(value) is dict and all(type(key) is str for key in value):
        parts = value.values()
    else:
        return type(value).__name__
    return next((odd for odd in map(_odd, parts) if odd is not None), None)
