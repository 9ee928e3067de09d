"""`PackStream`: plans documents as they arrive. Their number is unknown, and only a few are in memory at a time.

    source   ──read──▶   queue   ──`steps.window`──▶   planned   ──▶   step, step, …
                           ▲                               │
                           └──── deferred documents ◀──────┘

A window is made from just enough documents to fill it. The state of a stream consists of the queue at the beginning of
the current window, the number of its steps that were taken, and the source's own state; the window is planned again
from it. Steps depend only on documents, options, seed and epoch, not on interruptions or the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from multipack.planning.cost import CostModel
from multipack.planning.lengths import check_integer
from multipack.planning.options import (
    ALGORITHM,
    LossWeighting,
    PlanOptions,
    check_choice,
    check_loss_weighting,
    check_seed,
    cost_model_of,
    short,
)
from multipack.planning.plan import Plan, StreamStep
from multipack.planning.steps import AHEAD, StepRules, divide, offsets_of, window
from multipack.shapes import ModelShape

Integers = NDArray[np.int64]

Overlong = Literal["error", "drop"]


@dataclass(frozen=True, eq=False)
class StreamQueue:
    """The documents in memory when a window begins, and the position of the source after them.

    Attributes:
        rows: for each document [position in the source, tokens, target tokens, seen, item], deferred documents first;
            seen is the first step of the window that first deferred it, or −1.
        deferred: number of deferred documents.
        window: index of the window.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON.

        Raises:
            ValueError: JSON does not preserve an item.
        """
        try:
            is_plain = json.loads(json.dumps(self.rows)) == self.rows
        except (TypeError, ValueError):
            is_plain = False
        if not is_plain:
            raise ValueError(
                "the state of a stream holds its documents, and one of these is not plain data: make items of lists,"
                " dictionaries with text keys, text and numbers"
            )
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_dict(cls, values: Any) -> StreamQueue:
        """The queue that `to_dict` wrote.

        Raises:
            ValueError: `values` is not such a queue.
        """
        names = {entry.name for entry in fields(cls)}
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
class _WindowPlan:
    """The steps of a window, planned from a queue.

    Attributes:
        plan: the steps; its document n is `entries[n]` of the queue.
        entries: indices in the queue of the documents of the steps, step after step.
        rest: indices in the queue of the documents in no step, deferred ones first.
        deferred: number of deferred documents in `rest`.
    """

    plan: Plan
    entries: Integers
    rest: Integers
    deferred: int


class PackStream:
    """Plans documents step by step as they arrive.

    Iterating yields `StreamStep`s. An iteration continues after the last step that was yielded or, after
    `load_state_dict`, at the loaded position; after the last step the next iteration begins the epoch again. All steps
    except the last few are as full as those of a plan with `tail="carry"`. Every rank reads the same documents and
    takes its share of `step.deal(ranks, sync)`: steps and state do not depend on the number of ranks.

    Args:
        documents: an iterable, or a function that takes a position and returns an iterator from there. To continue from
            a state, a source with `state_dict` and `load_state_dict` loads its own state, a function is called with the
            position, and a sequence is read from the position; any other iterable must begin at `position`.
        options: as in `multipack.plan`; `window` steps are planned together. `balance="joint"` is based on the lengths
            of a window's documents instead of all. With `tail="drop"` leftover documents at the end are in `left`.
        length: item → its number of tokens.
        targets: item → its number of target tokens; None = tokens − 1.
        cost: cost of documents, as in `multipack.plan`.
        seed: seed of the order; documents are shuffled within a window.
        overlong: `error` raises for a document longer than a pack; `drop` drops and counts it.
        loss_weighting: as in `multipack.plan`.
        **named: options by name; capacity= and packs_per_step= are required without `options`.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is invalid for a stream; while iterating, a document is empty or too long (the message
            gives its position). Errors of the source are passed on, and no document is lost by them.
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
        check_loss_weighting(loss_weighting)
        self.seed, self.loss_weighting, self.options = check_seed(seed), loss_weighting, chosen
        self._documents, self._length, self._targets, self._overlong = documents, length, targets, overlong
        self._cost_model = cost_model_of(cost)
        self.key = {
            "algorithm": ALGORITHM,
            **chosen.key(self._cost_model),
            "seed": self.seed,
            "overlong": overlong,
            "targets": targets is not None,
        }
        self._error: Exception | None = None
        self._used = self._finished = False
        self._begin(0, StreamQueue(), 0)

    @property
    def epoch(self) -> int:
        """The current epoch, which with the seed determines the order of shuffled documents."""
        return self._epoch

    @property
    def align(self) -> int:
        """Multiple that each document is padded to; the collator must use the same."""
        return self.options.align

    @property
    def most_documents(self) -> int:
        """Maximum number of documents of a pack."""
        most = self.options.capacity // self.options.align
        return min(self.options.max_documents or most, most)

    @property
    def longest(self) -> int:
        """Maximum number of slots of a document."""
        return self.options.longest

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
        if self._planned is None or not self._finished:
            return np.empty(0, dtype=np.int64)
        return np.sort(self._queue.table[self._planned.rest, 0])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without the documents in memory; no effect if it is already the current one."""
        if check_integer("epoch", epoch, 0) != self.epoch:
            self._begin(epoch, StreamQueue(), 0)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was yielded; loaders that read ahead use `step.state_dict()`."""
        return self._state(self._queue, self._taken, self.epoch)

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
        changed = [name for name in self.key if theirs.get(name, self) != self.key[name]]
        if changed:
            differences = ", ".join(
                f"{name} was {short(theirs.get(name))} and is {short(self.key[name])}" for name in changed
            )
            raise ValueError(
                f"the saved stream state belongs to another stream: {differences}; continue with the same options, or"
                " start a new stream"
            )
        epoch, taken = (
            check_integer(f"the saved stream state's {name}", state[name], 0) for name in ("epoch", "taken")
        )
        self._begin(epoch, StreamQueue.from_dict(state["queue"]), taken)

    def __iter__(self) -> Iterator[StreamStep]:
        """Yield the steps from the current position."""
        if self._finished:
            self._begin(self.epoch, StreamQueue(), 0)
        while (step := self._next()) is not None:
            yield step
        self._finished = True

    def _begin(self, epoch: int, queue: StreamQueue, taken: int) -> None:
        self._epoch, self._queue, self._taken = epoch, queue, taken
        self._planned: _WindowPlan | None = None
        self._iterator: Iterator[Any] | None = None
        self._restored = queue.source
        self._ready: list[list[Any]] = []  # rows that were read for the next window
        self._read, self._lost = queue.position, (queue.dropped, queue.dropped_tokens)
        self._finished = False

    def _next(self) -> StreamStep | None:
        """The next step; None after the last one. An error leaves the position unchanged."""
        if self._planned is None and self._queue.window:  # a restored window
            self._planned = self._plan(self._queue)
        while self._planned is None or self._taken == self._planned.plan.num_steps:
            if self._queue.ended:
                return None
            queue = self._following()
            planned = self._plan(queue)
            counts = np.diff(planned.plan.pack_offsets[planned.plan.step_offsets])
            steps = queue.step + np.repeat(np.arange(len(counts)), counts)
            seen = _seen(queue)[planned.entries]
            # After the end of the source one plan holds several windows: only documents deferred before it count.
            waits = (steps - seen)[(seen < queue.step) | (not queue.ended)]
            wait = int(waits.max(initial=queue.longest_wait))
            self._queue, self._planned, self._taken = replace(queue, longest_wait=wait), planned, 0
        self._taken += 1
        return self._step(self._queue, self._planned, self._taken - 1)

    def _step(self, queue: StreamQueue, planned: _WindowPlan, index: int) -> StreamStep:
        """Step `index` of a window."""
        plan = planned.plan
        first, last = (int(plan.pack_offsets[pack]) for pack in plan.step_offsets[index : index + 2])
        entries = planned.entries[first:last]
        items = [queue.rows[entry][4] for entry in entries.tolist()]
        state = partial(self._state, queue)
        return StreamStep(plan, index, queue.step + index, queue.table[entries, 0], items, state, self.epoch)

    def _state(self, queue: StreamQueue, taken: int, epoch: int) -> dict[str, Any]:
        return {"options": self.key, "epoch": epoch, "taken": taken, "queue": queue.to_dict()}

    def _following(self) -> StreamQueue:
        """The queue of the next window: the documents left by the current one, and new documents."""
        before, options = self._queue, self.options
        rows: list[list[Any]] = []
        deferred = steps = 0
        if self._planned is not None:
            deferred, steps, seen = self._planned.deferred, self._planned.plan.num_steps, _seen(before)
            for place, number in enumerate(self._planned.rest.tolist()):
                row = before.rows[number]
                rows.append([*row[:3], int(seen[number]), row[4]] if place < deferred else row)
        packs = options.packs_per_step * options.window
        wanted = packs * options.mean
        ends = np.cumsum([0, *(-(-row[1] // options.align) * options.align for row in rows)])
        ahead = AHEAD - max(len(rows) - int(np.searchsorted(ends, wanted)), 0)
        ended = self._fill(wanted - int(ends[-1]), packs * self.most_documents - len(rows), ahead)
        source = self._documents.state_dict() if hasattr(self._documents, "state_dict") else None
        ready, self._ready = self._ready, []
        return replace(
            before,
            rows=rows + ready,
            deferred=deferred,
            window=before.window + 1,
            step=before.step + steps,
            position=self._read,
            dropped=self._lost[0],
            dropped_tokens=self._lost[1],
            ended=ended,
            source=source,
        )

    def _fill(self, slots: int, documents: int, ahead: int) -> bool:
        """Read until there are `slots` slots or `documents` documents, and `ahead` documents more.

        Returns:
            Whether the source is exhausted.
        """
        align, capacity, ready = self.options.align, self.options.capacity, self._ready
        sizes = [-(-length // align) * align for _, length, *_ in ready]  # read before the source raised
        ends = np.cumsum([0, *sizes])
        taken, enough = int(ends[-1]), max(documents, 0)
        if taken >= slots:
            enough = min(enough, int(np.searchsorted(ends, slots)))
        while len(ready) < enough + ahead:
            if self._iterator is None:
                self._open()
            assert self._iterator is not None
            try:
                item = next(self._iterator)
            except StopIteration:
                return True
            except Exception as error:  # an iterator that raised may skip documents
                self._iterator, self._error = None, error
                raise
            length = self._checked_length(item)
            size = -(-length // align) * align
            if size > capacity:
                self._lost = self._lost[0] + 1, self._lost[1] + length
            else:
                ready.append([self._read, length, self._checked_targets(item, length), -1, item])
                taken += size
                if taken - size < slots <= taken:
                    enough = min(enough, len(ready))
            self._read += 1
        return False

    def _open(self) -> None:
        """Open the source at the current position.

        Raises:
            ValueError: the source is an iterator that was read before.
        """
        documents: Any = self._documents
        if self._restored is not None and hasattr(documents, "load_state_dict"):
            documents.load_state_dict(self._restored)
            self._restored = None
        elif not hasattr(documents, "__iter__"):
            documents = documents(self._read)
        elif hasattr(documents, "__getitem__") and hasattr(documents, "__len__"):
            stored = documents
            documents = (stored[place] for place in range(self._read, len(stored)))
        elif iter(documents) is documents and self._used and not hasattr(documents, "state_dict"):
            why = "raised an error" if self._error else "was read before"
            raise ValueError(
                f"documents is an iterator that {why}, and cannot be read again: give a list, a data set, or a"
                " function that takes a position and returns an iterator from there"
            ) from self._error
        self._iterator, self._used = iter(documents), True

    def _checked_length(self, item: Any) -> int:
        length = self._length(item)
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise ValueError(
                f"every document needs at least 1 token, as a whole number: the {type(item).__name__} at position"
                f" {self._read:,} of the source has {length!r}"
            )
        if length > self.longest and self._overlong == "error":
            raise ValueError(
                f"the document at position {self._read:,} of the source has {length:,} tokens, but a pack holds"
                f" {self.longest:,}; raise capacity, cut such documents before, or set overlong='drop' to leave them"
                " out, counted"
            )
        return int(length)

    def _checked_targets(self, item: Any, length: int) -> int:
        if self._targets is None:
            return length - 1
        count = self._targets(item)
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count < length:
            raise ValueError(
                f"a document of l tokens has 0 … l − 1 targets: targets gave {count!r} for the document of"
                f" {length} tokens at position {self._read:,} of the source"
            )
        return int(count)

    def _plan(self, queue: StreamQueue) -> _WindowPlan:
        """Plan the steps of a window: full steps, or all remaining ones after the source has ended."""
        options, lengths, targets = self.options, queue.table[:, 1], queue.table[:, 2]
        slots, deferred = options.slots(lengths), queue.deferred
        entries, ends = len(slots), offsets_of(slots)
        balanced = options.balanced_cost(self._cost_model, slots) if entries else self._cost_model
        keep = queue.ended and options.tail == "keep"
        rules = StepRules(options, balanced.cost, self.seed, self.epoch, spread=keep)
        if queue.ended:
            extend = options.needed_steps if keep else options.full_steps
            steps = min(extend(int(ends[-1]), entries), entries)
            made = divide(
                np.arange(entries), ends, rules, steps, options.window, extend, deferred, queue.window << 32
            )
            chosen, packs, sizes, rest = made.order, made.pack_sizes, made.step_sizes, made.left
            deferred = 0
        else:
            width = options.window
            found = window(
                ends, deferred, np.arange(deferred, dtype=np.int64), rules,
                width=width, aim=width * rules.step_slots, most=entries, number=queue.window << 32,
            )  # fmt: skip
            chosen, packs, sizes = found.entries, found.pack_sizes, found.step_sizes
            rest = np.concatenate([found.deferred, np.arange(found.next, entries, dtype=np.int64)])
            deferred = len(found.deferred)
        plan = Plan(
            lengths=lengths[chosen],
            target_counts=targets[chosen],
            options=options,
            loss_weighting=self.loss_weighting,
            seed=self.seed,
            epoch=self.epoch,
            cost_model=self._cost_model,
            slots=slots[chosen],
            balanced=balanced,
            window=options.window,
            order=np.arange(len(chosen), dtype=np.int64),
            pack_offsets=offsets_of(packs),
            step_offsets=offsets_of(sizes),
            dropped=chosen[:0],
            carried=chosen[:0],
            carried_in=chosen[:0],
            key=self.key,
            fingerprint="",
            most_documents=self.most_documents,
            seconds=0.0,
        )
        return _WindowPlan(plan, chosen, rest, deferred)


def _seen(queue: StreamQueue) -> Integers:
    """(documents,) int64 first step of the window in which each document was first considered."""
    return np.where(queue.table[:, 3] < 0, queue.step, queue.table[:, 3])


__all__ = ["Overlong", "PackStream", "StreamStep"]
