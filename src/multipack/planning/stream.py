"""`PackStream`: plans documents as they arrive. Their number is unknown, and only a few are in memory at a time.

    source   ──read──▶   queue   ──`steps.divide`──▶   window   ──▶   step, step, …
                           ▲                              │
                           └──── deferred documents ◀─────┘

A window is made from just enough documents to fill it. The state of a stream consists of the queue at the beginning of
the current window, the number of its steps that were taken, and the source's own state; the window is planned again
from it. Steps depend only on documents, options, seed and epoch, not on interruptions or the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from multipack.planning.cost import CostModel
from multipack.planning.deal import deal_packs
from multipack.planning.lengths import Packs, check_integer
from multipack.planning.options import (
    ALGORITHM,
    LossWeighting,
    PlanOptions,
    Sync,
    check_choice,
    check_seed,
    cost_model_of,
    short,
)
from multipack.planning.plan import denominator_of
from multipack.planning.steps import AHEAD, Division, Extend, StepRules, divide, no_more, offsets_of
from multipack.shapes import ModelShape

Integers = NDArray[np.int64]

Overlong = Literal["error", "drop"]

_END = object()


@dataclass(frozen=True, eq=False)
class StreamQueue:
    """The documents in memory when a window begins, and the position of the source after them.

    Attributes:
        rows: for each document [position in the source, tokens, target tokens, seen, item], deferred documents first;
            seen is the first step of the window that first deferred it, or −1.
        deferred: number of deferred documents.
        window: index of the window, from 1.
        step: number of steps before the window.
        position: number of documents read from the source.
        dropped: number of these that were too long.
        dropped_tokens: number of tokens of the documents that were too long.
        longest_wait: maximum number of steps that a document has waited so far.
        ended: whether the source is exhausted.
        source: the source's own state, or None.
    """

    rows: list[list[Any]] = field(default_factory=list)
    deferred: int = 0
    window: int = 0
    step: int = 0
    position: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    longest_wait: int = 0
    ended: bool = False
    source: Any = None

    @cached_property
    def table(self) -> Integers:
        """(documents, 4) int64: `rows` without the items."""
        return np.array([row[:4] for row in self.rows], dtype=np.int64).reshape(-1, 4)

    @property
    def seen(self) -> Integers:
        """(documents,) int64 first step of the window in which each document was first considered."""
        return np.where(self.table[:, 3] < 0, self.step, self.table[:, 3])

    @classmethod
    def from_dict(cls, values: Any) -> StreamQueue:
        """The queue of a saved state.

        Raises:
            ValueError: `values` is not such a queue.
        """
        names = set(cls.__dataclass_fields__)
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"the saved stream state's queue needs {', '.join(sorted(names))}")
        for name in names - {"rows", "ended", "source"}:
            check_integer(f"the saved stream state's {name}", values[name], 0)
        queue = cls(**values)
        try:
            legal = bool((queue.table >= [0, 1, 0, -1]).all()) and all(len(row) == 5 for row in queue.rows)
        except (TypeError, ValueError):
            legal = False
        if not legal or queue.deferred > len(queue.rows) or not isinstance(queue.ended, bool):
            raise ValueError("the saved stream state contradicts itself: its documents do not fit together")
        return queue


@dataclass(frozen=True, eq=False)
class _Window:
    """The steps that are planned from a queue.

    Attributes:
        queue: the documents.
        steps: indices in `queue.rows`, step after step.
        balanced: cost that is balanced.
        epoch: epoch of the order.
    """

    queue: StreamQueue
    steps: Division
    balanced: CostModel
    epoch: int


class StreamStep:
    """A step of a `PackStream`: documents that train together, and how ranks share them.

    Packs hold numbers into the step's own arrays: document n of the step is `items[n]`, with `lengths[n]` tokens.

    Attributes:
        number: index of the step, from 0.
        positions: (documents,) int64 places of the documents in the source, counted from 0.
        items: what the source gave for each document.
        lengths: (documents,) int64 tokens of each document.
        packs: one packing that fits: at most `packs_per_step` packs, none of them empty.
        tokens: tokens of all documents.
        targets: target tokens of all documents.
        denominator: divisor of the summed loss of the step, over all ranks. See `Plan.denominator`.
    """

    def __init__(self, stream: PackStream, window: _Window, index: int) -> None:
        """Make step `index` of a window."""
        self._stream, self._window, self._index = stream, window, index
        steps, queue = window.steps, window.queue
        first, last = steps.step_offsets[index : index + 2]
        offsets = steps.pack_offsets[first : last + 1]
        entries = steps.entries[offsets[0] : offsets[-1]]
        self.number, self.items = queue.step + index, [queue.rows[entry][4] for entry in entries.tolist()]
        self.positions, self.lengths, targets, _ = queue.table[entries].T
        self.packs = Packs(np.arange(len(entries), dtype=np.int64), offsets - offsets[0])
        self.tokens, self.targets = int(self.lengths.sum()), int(targets.sum())
        self.denominator = denominator_of(targets, stream.loss_weighting)

    def __len__(self) -> int:
        return len(self.items)

    def deal(self, data_parallel_size: int, sync: Sync = "micro") -> Packs:
        """The documents arranged for ranks, as `Plan.deal` does: pack m · ranks + r is rank r's micro-batch m."""
        options = self._stream.options
        slots = options.slots(self.lengths)
        return deal_packs(self.packs, slots, self._window.balanced, options, data_parallel_size, sync)

    def state_dict(self, before: bool = False) -> dict[str, Any]:
        """The stream's state after this step, or before it, however far it was read ahead: plain values."""
        window = self._window
        return self._stream.state_of(window.queue, self._index + (not before), window.epoch)

    def __repr__(self) -> str:
        return f"StreamStep({self.number:,}: {len(self):,} documents of {self.tokens:,} tokens)"


class PackStream:
    """Plans documents step by step as they arrive.

    Iterating yields `StreamStep`s. An iteration continues after the last step that was yielded or, after
    `load_state_dict`, at the loaded position; after the last step the next iteration begins the epoch again. All steps
    except the last few are as full as those of a plan with `tail="carry"`. Every rank reads the same documents and
    takes its share of `step.deal(ranks, sync)`: steps and state do not depend on the number of ranks.

    Args:
        documents: an iterable, or a function that takes a position and returns an iterator from there. To continue from
            a state, or after an error of the source, a source with `state_dict` and `load_state_dict` loads its own
            state, a function is called with the position, and a sequence is read from the position; any other iterable
            must begin at `position`.
        options: as in `multipack.plan`; `window` steps are planned together. `balance="joint"` is based on the lengths
            of a window's documents instead of all. With `tail="drop"` leftover documents at the end are in `left`.
        length: item → its number of tokens.
        targets: item → its number of target tokens; None = tokens − 1.
        cost: cost of documents, as in `multipack.plan`.
        seed: seed of the order; documents are shuffled within a window.
        overlong: `error` raises for a document longer than a pack; `drop` drops and counts it.
        loss_weighting: as in `multipack.plan`.
        **named: options by name; capacity= and packs_per_step= are required without `options`.

    Attributes:
        epoch: the current epoch, which with the seed determines the order of shuffled documents.
        align: multiple that each document is padded to; the collator must use the same.
        most_documents: maximum number of documents of a pack.
        longest: maximum number of slots of a document.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is invalid for a stream; while iterating, a document is empty or too long (the message
            gives its position). Errors of the source are passed on, and the stream stays after the last step.
    """

    def __init__(
        self,
        documents: Iterable[Any] | Callable[[int], Iterable[Any]],
        *,
        options: PlanOptions | None = None,
        length: Callable[[Any], int] = len,
        targets: Callable[[Any], int] | None = None,
        cost: CostModel | ModelShape | None = None,
        seed: int = 0,
        overlong: Overlong = "error",
        loss_weighting: LossWeighting = "token",
        **named: Any,
    ) -> None:
        chosen = PlanOptions.of(options, named)
        if not callable(documents) and not hasattr(documents, "__iter__"):
            raise ValueError(
                f"documents must be an iterable or a function of the position, got {type(documents).__name__}"
            )
        if chosen.tail == "carry":
            raise ValueError(
                "tail='carry' carries documents into the next epoch; a stream takes keep or drop"
            )
        check_choice("overlong", overlong, Overlong)
        check_choice("loss_weighting", loss_weighting, LossWeighting)
        self.seed, self.loss_weighting, self.options = check_seed(seed), loss_weighting, chosen
        self.align, self.longest = chosen.align, chosen.longest
        most = chosen.capacity // chosen.align
        self.most_documents = min(chosen.max_documents or most, most)
        self._documents, self._length, self._targets, self._overlong = documents, length, targets, overlong
        self._cost_model = cost_model_of(cost)
        self.key = {
            "algorithm": ALGORITHM,
            **chosen.key(self._cost_model),
            "seed": self.seed,
            "overlong": overlong,
            "targets": targets is not None,
        }
        self._was_read = self._finished = False
        self._begin(0, StreamQueue(), 0)

    @property
    def step(self) -> int:
        """Number of steps of the epoch that were taken."""
        return self._queue.step + self._taken

    @property
    def position(self) -> int:
        """Number of documents read from the source."""
        return self._queue.position

    @property
    def dropped(self) -> tuple[int, int]:
        """Number of documents that were too long, and of their tokens."""
        return self._queue.dropped, self._queue.dropped_tokens

    @property
    def longest_wait(self) -> int:
        """Maximum number of steps so far between the window that first deferred a document and the document's step."""
        return self._queue.longest_wait

    @property
    def left(self) -> Integers:
        """Positions, ascending, of the documents in no step after the stream has ended (`tail="drop"`)."""
        if self._window is None or not self._finished:
            return np.empty(0, dtype=np.int64)
        return np.sort(self._queue.table[self._window.steps.left(len(self._queue.rows)), 0])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without the documents in memory; no effect if it is already the current one."""
        if check_integer("epoch", epoch, 0) != self.epoch:
            self._begin(epoch, StreamQueue(), 0)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was yielded; loaders that read ahead use `step.state_dict()`."""
        return self.state_of(self._queue, self._taken, self.epoch)

    def state_of(self, queue: StreamQueue, taken: int, epoch: int) -> dict[str, Any]:
        """Plain values of a state: a queue, and the number of steps taken from its window.

        Raises:
            ValueError: JSON does not preserve an item.
        """
        try:
            is_plain = json.loads(json.dumps(queue.rows)) == queue.rows
        except (TypeError, ValueError):
            is_plain = False
        if not is_plain:
            raise ValueError(
                "the state of a stream holds its documents, and one of these is not plain data: make items of lists,"
                " dictionaries with text keys, text and numbers"
            )
        values = {name: getattr(queue, name) for name in StreamQueue.__dataclass_fields__}
        return {"options": self.key, "epoch": epoch, "taken": taken, "queue": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state with exactly the steps that followed it.

        The source is opened when the next iteration begins.

        Raises:
            ValueError: the state is damaged, or belongs to a stream with other options, which the message names.
        """
        missing = [key for key in ("options", "epoch", "taken", "queue") if key not in state]
        if missing:
            raise ValueError(f"the saved stream state lacks {', '.join(missing)}")
        theirs = state["options"] if isinstance(state["options"], dict) else {}
        differences = [
            f"{name} was {short(theirs.get(name))} and is {short(value)}"
            for name, value in self.key.items()
            if theirs.get(name, self) != value
        ]
        if differences:
            raise ValueError(
                f"the saved stream state belongs to another stream: {', '.join(differences)}; continue with the same"
                " options, or start a new stream"
            )
        epoch, taken = (
            check_integer(f"the saved stream state's {name}", state[name], 0) for name in ("epoch", "taken")
        )
        self._begin(epoch, StreamQueue.from_dict(state["queue"]), taken)

    def __iter__(self) -> Iterator[StreamStep]:
        """Yield the steps from the current position."""
        if self._finished:
            self._begin(self.epoch, StreamQueue(), 0)
        while True:
            while self._window is None or self._taken == len(self._window.steps.step_sizes):
                if self._queue.ended:
                    self._finished = True
                    return
                self._advance()
            self._taken += 1
            yield StreamStep(self, self._window, self._taken - 1)

    def _begin(self, epoch: int, queue: StreamQueue, taken: int) -> None:
        """Continue at a state; `queue.window` is 0 before the first window.

        Raises:
            ValueError: the window has fewer steps than were taken.
        """
        self.epoch, self._queue, self._taken, self._finished = epoch, queue, taken, False
        self._iterator: Iterator[Any] | None = None
        self._window: _Window | None = self._plan(queue) if queue.window else None
        steps = len(self._window.steps.step_sizes) if self._window else 0
        if taken > steps:
            raise ValueError(
                f"the saved stream state contradicts itself: {taken} steps were taken from a window of {steps}"
            )

    def _advance(self) -> None:
        """Read and plan the next window. An error leaves the stream after the last step."""
        try:
            queue = self._next_queue()
        except BaseException:
            self._iterator = None  # it may skip documents
            raise
        window = self._plan(queue)
        counts = np.diff(window.steps.pack_offsets[window.steps.step_offsets])
        steps, seen = queue.step + np.repeat(np.arange(len(counts)), counts), queue.seen[window.steps.entries]
        # After the end of the source one division holds several windows: only documents deferred before it count.
        waits = (steps - seen)[(seen < queue.step) | (not queue.ended)]
        self._queue = replace(queue, longest_wait=int(waits.max(initial=queue.longest_wait)))
        self._window, self._taken = replace(window, queue=self._queue), 0

    def _next_queue(self) -> StreamQueue:
        """The queue of the next window: the documents left by the current one, and new documents."""
        options, rows, deferred, steps = self.options, list[list[Any]](), 0, 0
        self._iterator = iterator = self._iterator or self._open()
        before = self._queue
        if self._window is not None:
            made, seen = self._window.steps, before.seen
            deferred, steps = len(made.deferred), len(made.step_sizes)
            for place, number in enumerate(made.left(len(before.rows)).tolist()):
                row = before.rows[number]
                rows.append([*row[:3], int(seen[number]), row[4]] if place < deferred else row)
        packs = options.packs_per_step * options.window
        wanted = packs * options.mean
        ends = offsets_of(options.slots(np.array([row[1] for row in rows], dtype=np.int64)))
        slots, documents = wanted - int(ends[-1]), packs * self.most_documents - len(rows)
        ahead = AHEAD - max(len(rows) - int(np.searchsorted(ends, wanted)), 0)
        position, dropped, dropped_tokens, item = before.position, before.dropped, before.dropped_tokens, None
        while ahead > 0 and (item := next(iterator, _END)) is not _END:
            row = self._row(item, position)
            if row[1] > self.longest:
                dropped, dropped_tokens = dropped + 1, dropped_tokens + row[1]
            else:
                ahead -= slots <= 0 or documents <= 0
                slots, documents = slots - -(-row[1] // self.align) * self.align, documents - 1
                rows.append(row)
            position += 1
        source: Any = self._documents
        return replace(
            before,
            rows=rows,
            deferred=deferred,
            window=before.window + 1,
            step=before.step + steps,
            position=position,
            dropped=dropped,
            dropped_tokens=dropped_tokens,
            ended=item is _END,
            source=source.state_dict() if hasattr(source, "state_dict") else None,
        )

    def _open(self) -> Iterator[Any]:
        """Open the source at the position of the queue.

        Raises:
            ValueError: the source is an iterator that was read before.
        """
        documents: Any = self._documents
        if hasattr(documents, "state_dict"):
            if self._queue.source is not None:
                documents.load_state_dict(self._queue.source)
            else:
                self._queue = replace(self._queue, source=documents.state_dict())
        elif not hasattr(documents, "__iter__"):
            documents = documents(self.position)
        elif hasattr(documents, "__getitem__") and hasattr(documents, "__len__"):
            stored = documents
            documents = (stored[place] for place in range(self.position, len(stored)))
        elif iter(documents) is documents and self._was_read:
            raise ValueError(
                "documents is an iterator that was read before, and cannot be read again: give a list, a data set, or a"
                " function that takes a position and returns an iterator from there"
            )
        self._was_read = True
        return iter(documents)

    def _row(self, item: Any, position: int) -> list[Any]:
        """A document's row of the queue.

        Raises:
            ValueError: the document has no token, too many tokens, or too many targets.
        """
        name = f"document {position:,} of the source"
        length = check_integer(f"the number of tokens of {name}", self._length(item))
        if length > self.longest and self._overlong == "error":
            raise ValueError(
                f"{name} has {length:,} tokens, but a pack holds {self.longest:,}; raise capacity, cut such documents"
                " before, or set overlong='drop' to leave them out, counted"
            )
        targets = length - 1
        if self._targets is not None:
            targets = check_integer(f"the number of targets of {name}", self._targets(item), 0)
        if targets >= length:
            raise ValueError(
                f"{name} has {length} tokens, of which at most {length - 1} are targets, got {targets}"
            )
        return [position, length, targets, -1, item]

    def _plan(self, queue: StreamQueue) -> _Window:
        """Plan the steps of a window: full steps, or all remaining ones after the source has ended."""
        options = self.options
        slots = options.slots(queue.table[:, 1])
        ends, keep = offsets_of(slots), queue.ended and options.tail == "keep"
        balanced = options.balanced_cost(self._cost_model, slots) if len(slots) else self._cost_model
        steps = options.window
        extend: Extend = no_more
        if queue.ended:
            extend = options.needed_steps if keep else options.full_steps
            steps = min(extend(int(ends[-1]), len(slots)), len(slots))
        rules = StepRules(options, balanced.cost, self.seed, self.epoch, even=keep)
        number, width = queue.window << 32, options.window
        made = divide(ends, rules, steps, extend, width=width, deferred=queue.deferred, number=number)
        return _Window(queue, made, balanced, self.epoch)


__all__ = ["Overlong", "PackStream", "StreamStep"]
