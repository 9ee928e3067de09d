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
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from multipack.planning.cost import CostModel
from multipack.planning.deal import deal_packs
from multipack.planning.lengths import Integers, Packs, check_integer, offsets_of
from multipack.planning.options import (
    ALGORITHM,
    LossWeighting,
    PlanOptions,
    Sync,
    changed_options,
    check_choice,
    opened,
)
from multipack.planning.plan import denominator_of
from multipack.planning.steps import AHEAD, Extend, StepRules, divide
from multipack.shapes import ModelShape

_END = object()

_LARGEST = 1 << 48
"""Most steps and documents that a saved state may count."""


@dataclass(frozen=True, eq=False)
class _Queue:
    """The documents in memory when a window begins, and the position of the source after them."""

    rows: list[list[Any]] = field(default_factory=list)
    """[position in the source, tokens, target tokens, item] of each document, deferred documents first."""
    deferred: int = 0  # documents
    window: int = 0  # index of the window, from 1; 0 before the first one
    step: int = 0  # steps before the window
    taken: int = 0  # steps of the window that were taken
    position: int = 0  # documents read from the source
    epoch: int = 0
    ended: bool = False  # whether the source is exhausted
    source: Any = None  # the source's own state

    @cached_property
    def table(self) -> Integers:
        """(documents, 3) int64: `rows` without the items."""
        return np.array([row[:3] for row in self.rows], dtype=np.int64).reshape(-1, 3)

    def check(self, longest: int) -> None:
        """`ValueError` if values of a saved queue do not fit together; `longest` is the most tokens of a document."""
        for each in fields(self):
            if each.type == "int":
                check_integer(f"the saved stream state's {each.name}", getattr(self, each.name), 0, _LARGEST)
        legal = type(self.ended) is bool and self.deferred <= len(self.rows)
        for row in self.rows:
            legal = legal and len(row) == 4 and [type(value) for value in row[:3]] == [int] * 3
            legal = legal and 0 <= row[0] < self.position and 0 <= row[2] < row[1] <= longest
        if not legal or len({row[0] for row in self.rows}) < len(self.rows):
            raise ValueError("the saved stream state is damaged: its documents or counts do not fit together")


class StreamStep:
    """A step of a `PackStream`: documents that train together, and how ranks share them.

    Packs hold numbers into the step's own arrays: document n of the step is `items[n]`, with `lengths[n]` tokens.

    Attributes:
        number: index of the step, from 0.
        positions: (documents,) int64 places of the documents in the source, counted from 0.
        items: the item of the source for each document.
        lengths: (documents,) int64 tokens of each document.
        packs: one packing that fits: at most `packs_per_step` packs, none of them empty.
        tokens: tokens of all documents.
        targets: target tokens of all documents.
        denominator: divisor of the summed loss of the step, over all ranks. See `Plan.denominator`.
    """

    def __init__(self, stream: PackStream) -> None:
        """Make the next step of a stream's current window."""
        self._stream, self._balanced = stream, stream._balanced
        self._after = replace(stream._queue, taken=stream._taken + 1)
        packs = stream._steps.packs(stream._taken)
        self.number = stream.step
        self.items = [stream._queue.rows[entry][3] for entry in packs.order.tolist()]
        self.positions, self.lengths, targets = stream._queue.table[packs.order].T
        self.packs = Packs(np.arange(len(packs.order), dtype=np.int64), packs.offsets)
        self.tokens, self.targets = int(self.lengths.sum()), int(targets.sum())
        self.denominator: float = denominator_of(targets, stream.loss_weighting)

    def __len__(self) -> int:
        return len(self.items)

    def deal(self, data_parallel_size: int, sync: Sync = "micro") -> Packs:
        """The documents arranged for ranks, as `Plan.deal` does: pack m · ranks + r is rank r's micro-batch m."""
        options, costs = self._stream.options, self._balanced.cost_of(self.lengths, None)
        return deal_packs(self.packs, self.lengths, costs, options, data_parallel_size, sync, self.number)

    def state_dict(self) -> dict[str, Any]:
        """The stream's state after this step, also if the stream was read ahead: plain values."""
        return self._stream._state(self._after)


class PackStream:
    """Plans documents step by step as they arrive.

    Iterating yields `StreamStep`s. An iteration continues after the last step that was yielded or, after
    `load_state_dict`, at the loaded position; after the last step the next iteration begins the epoch again. All steps
    except the last few are as full as steps of a plan with `tail="carry"`. Every rank reads the same documents and
    takes its share of `step.deal(ranks, sync)`: steps and state do not depend on the number of ranks.

    Args:
        documents: an iterable. To continue from a state, or after an error of the source, a source with `state_dict`
            and `load_state_dict` loads its own state, and any other iterable is read again without the documents before
            `position`; an iterator must stand there.
        options: as in `multipack.plan`; `window` steps are planned together. `balance="joint"` is based on the lengths
            of a window's documents instead of all. With `tail="drop"` leftover documents at the end are in `left`.
        length: item → its number of tokens.
        targets: item → its number of target tokens; None = tokens − 1.
        cost: cost of documents, as in `multipack.plan`.
        seed: seed of the order; documents are shuffled within a window.
        loss_weighting: as in `multipack.plan`.
        **named: options by name; capacity= and packs_per_step= are required without `options`.

    Attributes:
        most_documents: maximum number of documents of a pack.
        longest: maximum number of tokens of a document.
        min_prefix: always None: documents share no beginnings.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is invalid for a stream; while iterating, a document is empty or too long (the message
            gives its position). Errors of the source are passed on; the position stays after the last step.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        *,
        options: PlanOptions | None = None,
        length: Callable[[Any], int] = len,
        targets: Callable[[Any], int] | None = None,
        cost: CostModel | ModelShape | None = None,
        seed: int = 0,
        loss_weighting: LossWeighting = "token",
        **named: Any,
    ) -> None:
        chosen = PlanOptions.of(options, named)
        if chosen.tail == "carry":
            raise ValueError("a stream has tail keep or drop: carry is for the next epoch")
        check_choice("loss_weighting", loss_weighting, LossWeighting)
        self.options, self.loss_weighting, self.weights = chosen, loss_weighting, None
        self.seed = check_integer("seed", seed, None)
        self.longest, self.min_prefix = chosen.capacity, None
        self.most_documents = min(chosen.max_documents or chosen.capacity, chosen.capacity)
        if not (hasattr(documents, "__iter__") or hasattr(documents, "__getitem__")):
            raise ValueError(f"documents must be an iterable or a data set, got {type(documents).__name__}")
        self._documents, self._length, self._targets = documents, length, targets
        self._cost_model = cost if isinstance(cost, CostModel) else CostModel.from_shape(cost)
        own = {"algorithm": ALGORITHM, "seed": self.seed, "targets": targets is not None}
        self.key = chosen.key(self._cost_model.key()) | own
        self._was_read, self._finished = False, False
        self._iterator: Iterator[Any] | None = None
        self._begin(_Queue())

    @property
    def epoch(self) -> int:
        """The current epoch, which with the seed determines the order of shuffled documents."""
        return self._queue.epoch

    @property
    def step(self) -> int:
        """Number of steps of the epoch that were taken."""
        return self._queue.step + self._taken

    @property
    def position(self) -> int:
        """Number of documents read from the source."""
        return self._queue.position

    @property
    def left(self) -> Integers:
        """Positions, ascending, of the documents in no step after the stream has ended (`tail="drop"`)."""
        if not self._finished:
            return np.empty(0, dtype=np.int64)
        return np.sort(self._queue.table[self._steps.left(len(self._queue.rows)), 0])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without the documents in memory; no effect if it is already the current one."""
        if check_integer("epoch", epoch, 0) != self.epoch:
            self._begin(_Queue(epoch=int(epoch)))

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was yielded; loaders that read ahead use `step.state_dict()`."""
        return self._state(replace(self._queue, taken=self._taken))

    def _state(self, queue: _Queue) -> dict[str, Any]:
        """Plain values of a state; `ValueError` if JSON does not preserve an item."""
        try:
            is_plain = json.loads(json.dumps(queue.rows)) == queue.rows
        except (TypeError, ValueError):
            is_plain = False
        if not is_plain:
            raise ValueError(
                "the state of a stream holds its documents, and one of these is not plain data: make items of lists,"
                " dictionaries with text keys, text and numbers"
            )
        return {"options": self.key, **{each.name: getattr(queue, each.name) for each in fields(queue)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state with exactly the steps that followed it.

        The source is opened when the next iteration begins.

        Raises:
            ValueError: the state is damaged, or belongs to a stream with other options, which the message names.
        """
        names = [each.name for each in fields(_Queue)]
        with opened(state, "the saved stream state", "options", *names):
            if changed := changed_options(state["options"], self.key):
                raise ValueError(
                    f"the saved stream state belongs to another stream: {', '.join(changed)}; continue with the"
                    " same options, or start a new stream"
                )
            # Rows of earlier versions have a further number before the item.
            rows = [[*row[:3], row[-1]] for row in state["rows"]]
            queue = _Queue(**{name: state[name] for name in names} | {"rows": rows})
            queue.check(self.longest)
            self._begin(queue)

    def __iter__(self) -> Iterator[StreamStep]:
        """Yield the steps from the current position."""
        if self._finished:
            self._begin(_Queue(epoch=self.epoch))
        while True:
            while self._taken == len(self._steps.step_sizes):
                if self._queue.ended:
                    self._finished = True
                    return
                try:
                    self._plan(self._next_queue())
                except BaseException:
                    self._iterator = None  # it may skip documents
                    raise
            step = StreamStep(self)
            self._taken += 1
            yield step

    def _begin(self, queue: _Queue) -> None:
        """Continue at a state; `ValueError` if the window has fewer steps than were taken."""
        self._finished, self._iterator = False, None
        self._plan(queue)
        if queue.taken > len(self._steps.step_sizes):
            raise ValueError(
                f"the saved stream state is damaged: {queue.taken} steps were taken from a window of"
                f" {len(self._steps.step_sizes)}"
            )

    def _plan(self, queue: _Queue) -> None:
        """Plan the steps of a window: full steps, or all remaining ones after the source has ended."""
        options, width = self.options, self.options.window
        slots = np.ascontiguousarray(queue.table[:, 1])
        ends, keep = offsets_of(slots), queue.ended and options.tail == "keep"
        balanced = self._cost_model.balanced(options.balance, slots) if len(slots) else self._cost_model
        steps = width if queue.window else 0
        extend: Extend = None
        if queue.ended:
            extend = options.needed_steps if keep else options.full_steps
            steps = min(extend(int(ends[-1]), len(slots)), len(slots))

        def price(_: Integers, slots: Integers) -> Integers:
            return balanced.cost_of(slots, None)

        rules = StepRules(options, price, self.seed, queue.epoch, fills_evenly=keep)
        number = queue.window << 32
        self._steps = divide(ends, rules, steps, extend, width=width, deferred=queue.deferred, number=number)
        self._queue, self._balanced, self._taken = queue, balanced, queue.taken

    def _next_queue(self) -> _Queue:
        """The queue of the next window: the documents left by the current one, and new documents."""
        self._iterator = iterator = self._iterator or self._open()
        options, before, source = self.options, self._queue, self._documents
        rows = [before.rows[number] for number in self._steps.left(len(before.rows)).tolist()]
        # A window takes `slots` more slots or `documents` more documents; then `ahead` documents may fill its gaps.
        packs = options.packs_per_step * options.window
        wanted = packs * options.mean
        ends = offsets_of(np.array([row[1] for row in rows], dtype=np.int64))
        slots, documents = wanted - int(ends[-1]), packs * self.most_documents - len(rows)
        ahead = AHEAD - max(len(rows) - int(np.searchsorted(ends, wanted)), 0)
        position, item = before.position, None
        while ahead > 0 and (item := next(iterator, _END)) is not _END:
            rows.append(self._row(item, position))
            ahead -= slots <= 0 or documents <= 0
            slots, documents = slots - rows[-1][1], documents - 1
            position += 1
        return replace(
            before,
            rows=rows,
            deferred=len(self._steps.deferred),
            window=before.window + 1,
            step=self.step,
            taken=0,
            position=position,
            ended=item is _END,
            source=source.state_dict() if hasattr(source, "state_dict") else None,
        )

    def _open(self) -> Iterator[Any]:
        """Open the source at the position of the queue."""
        source: Any = self._documents
        if hasattr(source, "state_dict"):
            if self._queue.source is None:
                self._queue = replace(self._queue, source=source.state_dict())
            else:
                source.load_state_dict(self._queue.source)
            return iter(source)
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            return (source[place] for place in range(self.position, len(source)))
        documents = iter(source)
        if documents is not source:
            return islice(documents, self.position, None)
        if self._was_read:
            raise ValueError("documents is an iterator that was read before: give a list or a data set")
        self._was_read = True
        return documents

    def _row(self, item: Any, position: int) -> list[Any]:
        """A document's row of the queue; `ValueError` if it has no token, or too many tokens or targets."""
        name = f"document {position:,} of the source"
        length = check_integer(f"the number of tokens of {name}", self._length(item))
        if length > self.longest:
            raise ValueError(
                f"{name} has {length:,} tokens, but a pack holds {self.longest:,}; raise capacity, or cut or leave out"
                " such documents before"
            )
        most = length - 1
        targets = most if self._targets is None else self._targets(item)
        return [position, length, check_integer(f"the targets of {name}", targets, 0, most), item]
