"""The two ways to read a source: items one by one, or lengths in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.options import short
from multipack.planning.source import Flight, Limits, Reader, Source, changed, shorter

_PIECE = 1 << 16  # lengths that are looked at together


class ItemReader(Reader):
    """Reads any items; a function says the tokens of one.

    Args:
        source: gives items.
        length: item → its tokens.
        targets: item → its target tokens; None = tokens − 1.
        limits: what is handed over.
        reread: items in flight are read again, not kept in the state.
    """

    def __init__(
        self,
        source: Source,
        length: Callable[[Any], int],
        targets: Callable[[Any], Any] | None,
        limits: Limits,
        reread: bool,
    ) -> None:
        super().__init__(source, targets, limits, reread)
        self._length = length
        self._next = 0  # position of the item that comes next
        self._held: list[Any] = []  # an item that was taken from the source and is not counted yet
        self._ready: list[tuple[int, int, int, Any]] = []  # position, length, targets, item

    def _open(self, position: int) -> None:
        self._held.clear()
        self._next = self._source.open(position)
        while self._next < position:
            if self._item() is None:
                raise shorter(position, self._next)
            self._pass()

    def _item(self) -> list[Any] | None:
        """The item that comes next, in a list of one; None at the end. It stays the next one until `_pass`."""
        if not self._held:
            try:
                self._held.append(next(self._source))
            except StopIteration:
                return None
        return self._held

    def _pass(self) -> None:
        self._held.clear()
        self._next += 1

    def _measured(self, item: Any) -> int:
        length = self._length(item)
        if isinstance(length, bool) or not isinstance(length, int | np.integer):
            raise ValueError(
                f"length must return a whole number of tokens, but gave {length!r} for the {type(item).__name__} at"
                f" position {self._next:,} of the source"
            )
        return int(length)

    def _more(self, slots: int, documents: int) -> bool:
        limits = self._limits
        while self._next % limits.world != limits.rank:
            if self._item() is None:
                return False
            self._pass()
            self.position = self._next
        found = self._item()
        if found is None:
            return False
        item = found[0]
        length = self._measured(item)
        taken = -(-length // limits.align) * limits.align
        if length < 1 or (taken > limits.capacity and limits.overlong == "error"):
            raise limits.refuse(self._next, length)
        if taken > limits.capacity:
            self.dropped = self.dropped.more(np.array([self._next]), np.array([length]))
        else:
            count = length - 1 if self._targets is None else self._targets(item)
            if self._targets is not None:
                self.checked_targets(np.array([count]), np.array([self._next]), np.array([length]))
            self._ready.append((self._next, length, int(count), item))
            self._count += 1
            self._slots += taken
        self._pass()
        self.position = self._next
        return True

    def _collected(self) -> Flight:
        ready, self._ready = self._ready, []
        if not ready:
            return Flight.empty(self._targets is not None, True)
        positions, lengths, counts, items = zip(*ready, strict=True)
        return Flight(
            np.array(positions, dtype=np.int64),
            np.array(lengths, dtype=np.int64),
            None if self._targets is None else np.array(counts, dtype=np.int64),
            as_objects(list(items)),
        )

    def _recall(self, flight: Flight, position: int) -> Flight:
        where = {place: number for number, place in enumerate(flight.positions.tolist())}
        items = np.empty(len(flight), dtype=np.object_)
        while self._next < position:
            found = self._item()
            if found is None:
                raise shorter(position, self._next)
            number = where.get(self._next)
            if number is not None:
                length = self._measured(found[0])
                if length != flight.lengths[number]:
                    raise changed(self._next, length, int(flight.lengths[number]))
                items[number] = found[0]
            self._pass()
        return Flight(flight.positions, flight.lengths, flight.targets, items)


def as_objects(items: list[Any]) -> NDArray[np.object_]:
    """(items,) array of objects: lists stay lists, whatever their lengths."""
    array = np.empty(len(items), dtype=np.object_)
    for place, item in enumerate(items):
        array[place] = item
    return array


class LengthReader(Reader):
    """Reads chunks of lengths; the items are the positions.

    A chunk is looked at in pieces, and a piece as if its documents came one by one: what is handed over depends on
    the lengths alone, not on how they are cut into chunks.

    Args:
        source: gives arrays or lists of lengths, or single ones.
        targets: positions → their target tokens; None = tokens − 1.
        limits: what is handed over.
    """

    def __init__(self, source: Source, targets: Callable[[Any], Any] | None, limits: Limits) -> None:
        super().__init__(source, targets, limits, True)
        self._chunk: NDArray[Any] = np.empty(0, dtype=np.int64)
        self._begin = self._at = 0  # position of the chunk's first document; what was looked at of the chunk
        self._clear()
        self._parts: list[Flight] = []

    def _clear(self) -> None:
        """Forget the piece."""
        self._piece, self._used = Flight.empty(self._targets is not None, False), 0
        self._ends = np.zeros(1, dtype=np.int64)  # running slots of the piece
        self._stops_at: ValueError | None = None  # what is wrong with the document after the piece
        self._lost = self._piece.positions, self._piece.lengths  # too long, and not passed yet
        self._piece_end = self._begin + self._at

    def _open(self, position: int) -> None:
        self._chunk, self._at = self._chunk[:0], 0
        self._begin = self._source.open(position)
        while self._begin + len(self._chunk) <= position and self._next_chunk():
            pass
        reached = self._begin + len(self._chunk)
        if reached < position:
            raise shorter(position, reached)
        self._at = max(position - self._begin, 0) if len(self._chunk) else 0
        self._clear()

    def _next_chunk(self) -> bool:
        """Take the next chunk from the source; False at its end."""
        begin = self._begin + len(self._chunk)
        try:
            given = next(self._source)
        except StopIteration:
            return False
        chunk = _as_chunk(given)
        if chunk is None:
            self._stops_at = ValueError(  # it was taken from the source: whoever asks again must not get the next
                f"length=None takes whole numbers in one-dimensional chunks, but at position {begin:,} the source gives"
                f" {short(given)}; say with length= how many tokens an item has"
            )
            raise self._stops_at
        self._chunk, self._begin, self._at = chunk, begin, 0
        return True

    def _fetch(self) -> bool:
        """Look at the next piece; False at the end of the source."""
        if self._stops_at is not None:
            raise self._stops_at
        while self._at == len(self._chunk):
            if not self._next_chunk():
                return False
        first = self._begin + self._at
        stop = min(len(self._chunk), (self._at // _PIECE + 1) * _PIECE)
        limits = self._limits
        own = (limits.rank - first) % limits.world
        lengths = self._chunk[self._at : stop][own :: limits.world].astype(np.int64)
        positions = first + own + limits.world * np.arange(len(lengths), dtype=np.int64)
        slots = limits.slots(lengths)
        fits = slots <= limits.capacity
        bad = (lengths < 1) | ~(fits | (limits.overlong == "drop"))
        wrong = None
        if bad.any():
            at = int(np.argmax(bad))
            wrong = limits.refuse(int(positions[at]), int(lengths[at]))
            stop = int(positions[at]) - self._begin
            lengths, positions, slots, fits = lengths[:at], positions[:at], slots[:at], fits[:at]
        lost = positions[~fits], lengths[~fits]
        lengths, positions = lengths[fits], positions[fits]
        counts = None if self._targets is None else lengths[:0]
        if self._targets is not None and len(lengths):
            counts = self.checked_targets(self._targets(positions), positions, lengths)
        self._at = stop  # from here on nothing raises
        self._clear()
        self._piece, self._lost, self._stops_at = Flight(positions, lengths, counts), lost, wrong
        self._ends = np.concatenate([[0], np.cumsum(slots[fits])])
        if not len(positions):
            self._look_past()
        return True

    def _look_past(self) -> None:
        """Count what was looked at: up to the last document that was taken, or the whole piece once it is used up."""
        used_up = self._used == len(self._piece)
        self.position = self._piece_end if used_up else int(self._piece.positions[self._used - 1]) + 1
        positions, lengths = self._lost
        if len(positions):
            passed = int(np.searchsorted(positions, self.position))
            self.dropped = self.dropped.more(positions[:passed], lengths[:passed])
            self._lost = positions[passed:], lengths[passed:]

    def _more(self, slots: int, documents: int) -> bool:
        if self._used == len(self._piece):
            return self._fetch()
        begin = self._used
        stop = len(self._piece)
        if self._stop is None:
            stop = int(np.searchsorted(self._ends, self._ends[begin] + slots))
        stop = min(stop, begin + documents - self._count, len(self._piece))
        self._parts.append(self._piece[begin:stop])
        self._used = stop
        self._count += stop - begin
        self._slots += int(self._ends[stop] - self._ends[begin])
        self._look_past()
        return True

    def _collected(self) -> Flight:
        parts, self._parts = self._parts, []
        return Flight.joined(parts) if parts else Flight.empty(self._targets is not None, False)

    def _recall(self, flight: Flight, position: int) -> Flight:
        """Check the lengths of documents in flight on the way."""
        order = np.argsort(flight.positions)
        positions, lengths = flight.positions[order], flight.lengths[order]
        while True:
            reached = min(self._begin + len(self._chunk), position)
            here = slice(
                int(np.searchsorted(positions, self._begin + self._at)),
                int(np.searchsorted(positions, reached)),
            )
            found = self._chunk[positions[here] - self._begin].astype(np.int64)
            other = np.flatnonzero(found != lengths[here])
            if len(other):
                at = int(other[0])
                raise changed(int(positions[here][at]), int(found[at]), int(lengths[here][at]))
            self._at = reached - self._begin
            if reached >= position:
                break
            if not self._next_chunk():
                raise shorter(position, reached)
        self._clear()
        return flight


def _as_chunk(given: Any) -> NDArray[Any] | None:
    """A chunk of lengths, or a single one, as an array; None for what is neither."""
    try:
        chunk = np.atleast_1d(np.asarray(given))
    except ValueError:
        return None
    legal = chunk.ndim == 1 and (not chunk.size or chunk.dtype.kind in "iu")
    return chunk if legal else None
