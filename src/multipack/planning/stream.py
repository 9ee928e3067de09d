"""The plan of documents that keep arriving: nobody knows how many, and only so many are held at a time.

    source   ──read──▶   queue   ──block of `lookahead` steps──▶   planned   ──▶   step, step, …
                           ▲                                          │
                           └──── what found no room goes first ◀──────┘

Blocks are those of a plan (`epoch.py`), made when their first step is asked for, from documents that just suffice
for them. What was read and has no step handed out yet is *in flight*; it is all that a stream holds, and
it is the state. A stream is a pure function of its documents, options, seed and epoch; never of how they are cut into
chunks, of how often it was interrupted, or of the number of ranks that share a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from multipack.planning.cost import CostModel
from multipack.planning.epoch import AHEAD
from multipack.planning.lengths import LARGEST_CAPACITY, check_integer
from multipack.planning.options import (
    ALGORITHM,
    Balance,
    LossWeighting,
    Order,
    PlanOptions,
    check_loss_weighting,
    check_seed,
    cost_model_of,
)
from multipack.planning.readers import ItemReader, LengthReader
from multipack.planning.source import Dropped, Flight, Limits, Overlong, Reader, Resume, Source
from multipack.planning.stream_blocks import Blocks
from multipack.planning.stream_state import Block, Place, Saved, saved
from multipack.planning.stream_step import StreamStep
from multipack.shapes import ModelShape

__all__ = ["Overlong", "PackStream", "Resume", "StreamStep", "StreamTail"]

Integers = NDArray[np.int64]

StreamTail = Literal["keep", "drop"]


class PackStream:
    """Plans documents that keep arriving, step by step.

    Iterating yields `StreamStep`s. An iteration goes on where the one before stopped, whether it was left, raised,
    or `load_state_dict` set the place; after the last step the next iteration begins the epoch again. All steps but the
    last few are as full as a plan's with `tail="carry"`. What finds no room waits, and after two blocks goes first.

    **Ranks.** Either every rank reads the same documents and takes its share of `step.deal(world, sync)`: then the
    steps, and the state, are the same for every number of ranks, which may change between two steps. Or each rank
    reads a shard and packs it for itself (`packs_per_step` is then a rank's): then shards may end at different times,
    `agree` says how they end together, each rank has a state of its own, and their number stays.

    **agree** is called by all ranks at the same steps, in the thread that iterates, with the number of steps that the
    rank surely has at hand (0: it has ended), and returns for how many steps all go on; 0 ends. With the
    minimum over ranks all stop when the first has ended, and `left` names what that leaves. With the maximum all go
    on until the last has ended, those that have ended with steps without documents, whose weight is 0. It is asked
    about once in `lookahead` steps, and by all of them again after `load_state_dict`. A rank that raises must tell the
    others by its own means.

    Args:
        documents: an iterable, or a function that takes a position and returns an iterator from there.
        capacity: most tokens of a pack.
        packs_per_step: most packs of a step, over all ranks and micro-batches that share it.
        length: item → its tokens. None: the source gives lengths, in arrays or lists (chunks; one by one is slow), and
            the items are the positions.
        targets: item → its target tokens; with `length=None` an array of positions → theirs. None = tokens − 1.
        lookahead: steps planned together. More fill and balance better, and are a wider shuffle buffer; fewer hold
            less, and stay closer to the order.
        max_in_flight: most documents in flight; None = those that `lookahead` steps can hold: `most_in_flight`.
            Where they do not fill a step, it is partly filled, and counted in `short_steps`.
        order: `shuffled`: by seed and epoch, inside the lookahead; `given`: the source's, kept to within the lookahead.
        tail: what does not fill a step at the end: `keep` spreads it over the last steps, no pack of which is empty
            while there are enough documents; `drop` names it in `left`.
        overlong: a document longer than a pack is an `error`, or dropped and counted (`drop`).
        resume: `reread`: the state names documents in flight by their positions, and they are read again.
            `items`: the state holds them, as plain data, and whoever restarts gives a source that goes on at the
            state's `position`. A source that has `state_dict` and `load_state_dict` is put there by its own state.
        shard: (rank, world): read positions rank, rank + world, … only.
        agree: see above; None = end where the documents end.
        budget, balance, cost, max_documents, group, align, loss_weighting, seed: as in `multipack.plan`. `joint` takes
            the lengths of a block's documents for those of all.

    Raises:
        ValueError: options that no stream can have; while iterating, a document that is empty or too long, named by
            its position; a source that cannot be read again, or is not what it was. What the source raises is
            passed on; nothing is lost by it.
    """

    def __init__(
        self,
        documents: Iterable[Any] | Callable[[int], Iterable[Any]],
        *,
        capacity: int,
        packs_per_step: int,
        length: Callable[[Any], int] | None = len,
        targets: Callable[[Any], Any] | None = None,
        lookahead: int = 4,
        max_in_flight: int | None = None,
        seed: int = 0,
        order: Order = "shuffled",
        tail: StreamTail = "keep",
        overlong: Overlong = "error",
        resume: Resume = "reread",
        shard: tuple[int, int] = (0, 1),
        agree: Callable[[int], int] | None = None,
        budget: int | None = None,
        balance: Balance = "cost",
        cost: CostModel | ModelShape | None = None,
        max_documents: int | None = None,
        group: bool = True,
        align: int = 1,
        loss_weighting: LossWeighting = "token",
    ) -> None:
        capacity, packs_per_step = (
            check_integer("capacity", capacity),
            check_integer("packs_per_step", packs_per_step),
        )
        lookahead, align = check_integer("lookahead", lookahead), check_integer("align", align)
        if capacity > LARGEST_CAPACITY:
            raise ValueError(f"capacity={capacity:,} exceeds the largest supported, {LARGEST_CAPACITY:,}")
        _check_choices(tail, overlong, resume, length is not None)
        rank, world = _check_shard(shard)
        seed = check_seed(seed)
        check_loss_weighting(loss_weighting)
        chosen = PlanOptions(
            capacity=capacity, packs_per_step=packs_per_step, budget=budget or 0, window=lookahead, order=order,
            tail=tail, balance=balance, max_documents=max_documents or 0, group=group, align=align,
        )  # fmt: skip
        cost_model = cost_model_of(cost)
        self.seed, self.loss_weighting, self.align = seed, loss_weighting, align
        self._length, self._targets, self._agree = length, targets, agree
        self._limits = Limits(capacity, align, overlong, rank, world)
        self._blocks = Blocks(chosen, cost_model, seed, loss_weighting)
        if length is None and _are_lengths(documents):
            documents = [np.asarray(documents)]  # one chunk
        self._source = Source(documents, resume, seekable=length is not None)
        self._most = None if max_in_flight is None else check_integer("max_in_flight", max_in_flight)
        same = (
            "capacity",
            "packs_per_step",
            "mean",
            "order",
            "tail",
            "balance",
            "max_documents",
            "group",
            "align",
        )
        options: dict[str, Any] = {name: getattr(chosen, name) for name in same}
        options |= {
            "algorithm": ALGORITHM,
            "cost": cost_model.key(),
            "documents": "lengths" if length is None else "items",
            "lookahead": lookahead,
            "max_in_flight": self._most,
            "overlong": overlong,
            "resume": resume,
            "seed": seed,
            "shard": [rank, world],
            "targets": targets is not None,
        }
        self._options = {
            name: int(value) if isinstance(value, np.integer) else value for name, value in options.items()
        }
        self._place: Place
        self._over: bool
        self._begin(0)

    @property
    def epoch(self) -> int:
        """The current epoch: it decides, with the seed, where shuffled documents go."""
        return self._place.epoch

    @property
    def most_documents(self) -> int:
        """Documents that no pack exceeds."""
        return self._blocks.most_documents

    @property
    def longest(self) -> int:
        """Slots that no document exceeds: the capacity, in whole multiples of `align`."""
        return self._limits.capacity // self.align * self.align

    @property
    def step(self) -> int:
        """Steps of the epoch that were handed out."""
        return self._place.step

    @property
    def position(self) -> int:
        """Documents of the source that were looked at, those of other shards included."""
        return self._place.block.position

    @property
    def dropped(self) -> Dropped:
        """Documents that were too long: how many, their tokens, and the positions of the first 1,000."""
        return self._place.block.dropped

    @property
    def short_steps(self) -> int:
        """Steps before the last ones that were not full, because `max_in_flight` documents did not fill them."""
        return self._place.block.short_steps

    @property
    def in_flight(self) -> int:
        """Documents that were read and whose step was not handed out."""
        return len(self._place.planned()) + len(self._place.block.queue)

    @property
    def most_in_flight(self) -> int:
        """Documents in flight at any time, at most: those that `lookahead` steps can hold and 96, or max_in_flight."""
        slots, documents = self._blocks.wanted
        most = min(-(-slots // self.align), documents) + AHEAD
        return most if self._most is None else min(most, self._most)

    @property
    def left(self) -> Integers:
        """Positions, rising, of documents that were read and that no step got, once the stream has ended.

        Those that `tail="drop"` leaves, or those of a rank that stopped because another one had ended, which may
        not have read all of its documents (`position` says how far it came). Empty before the end.
        """
        if not self._place.finished:
            return np.empty(0, dtype=np.int64)
        return np.sort(np.concatenate([self._place.planned().positions, self._place.block.queue.positions]))

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which abandons what is in flight; the current epoch goes on where it stands."""
        if check_integer("epoch", epoch, 0) != self.epoch:
            self._begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was yielded, as plain values.

        Whoever reads steps ahead of training asks the step that was trained on: `step.state_dict()`.
        """
        return self._place.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: the steps that follow are those that would have followed, in every part.

        The source is opened when the next iteration begins.

        Raises:
            ValueError: the state is damaged, or of a stream with other options, which are named.
        """
        known = saved(state, self._options, self._targets is not None)
        counts = known.counts
        self._begin(counts["epoch"])
        self._place = replace(
            self._place,
            step=counts["step"],
            block=self._restored(known),
            finished=bool(counts["finished"]),
        )

    def __iter__(self) -> Iterator[StreamStep]:
        """Steps, from where the stream stands."""
        if self._over:
            self._begin(self.epoch)
        while (step := self._next()) is not None:
            yield step
        self._over = True

    def _begin(self, epoch: int) -> None:
        """Stand at the beginning of an epoch."""
        self._reader: Reader | None = None
        self._over = False
        start = self._blocks.start(self._targets is not None, self._length is not None)
        self._place = Place(self._options, epoch, 0, start)

    def _restored(self, known: Saved) -> Block:
        """The block of a saved state; its items are read when the source is opened."""
        counts = known.counts
        return Block(
            plan=self._blocks.plan(known.planned, known.pack_sizes, known.step_sizes, known.linear),
            flight=known.planned,
            queue=known.queue,
            waiting=counts["waiting"],
            old=counts["old"],
            number=counts["block"],
            position=counts["position"],
            dropped=known.dropped,
            short_steps=counts["short_steps"],
            ended=bool(counts["ended"]),
            source=known.source,
        )

    def _next(self) -> StreamStep | None:
        """The next step; None after the last. Where something raises, the place is what it was."""
        if self._place.finished:
            return None
        if self._reader is None:
            self._open()
        if self._agree is not None and self._place.agreed == 0:
            agreed = check_integer("what agree returns", self._agree(self._at_hand()), 0)
            self._place = replace(self._place, agreed=agreed)
        at_hand = self._at_hand()
        place = self._place
        if place.agreed == 0 if self._agree is not None else at_hand == 0:
            self._place = replace(place, finished=True)
            return None
        self._place = replace(
            place,
            step=place.step + 1,
            taken=place.taken + (at_hand > 0),
            agreed=max(place.agreed - 1, 0),
        )
        return StreamStep(place, self._place, place.taken if at_hand else None)

    def _at_hand(self) -> int:
        """Steps that are planned; a block is planned if there are none and the source has not ended."""
        place = self._place
        if place.taken == place.block.plan.num_steps and not place.block.ended:
            place = self._place = replace(place, block=self._planned(place.block), taken=0)
        return place.block.plan.num_steps - place.taken

    def _open(self) -> None:
        """Begin to read where the stream stands, and read again what is in flight without its items."""
        place, block = self._place, self._place.block
        reread = self._options["resume"] == "reread"
        if self._length is None:
            reader: Reader = LengthReader(self._source, self._targets, self._limits)
        else:
            reader = ItemReader(self._source, self._length, self._targets, self._limits, reread)
        if block.source is not None and hasattr(self._source.documents, "load_state_dict"):
            self._source.documents.load_state_dict(block.source)
        planned = place.planned()
        flight = reader.start(
            block.position, block.dropped, block.ended, Flight.joined([planned, block.queue])
        )
        block = replace(block, flight=flight[: len(planned)], queue=flight[len(planned) :])
        self._place = replace(place, block=block)  # of which no step was taken yet
        self._reader = reader

    def _planned(self, before: Block) -> Block:
        """The block that follows: reads what it needs, and no more."""
        assert self._reader is not None
        queue, reader = before.queue, self._reader
        slots, documents = self._blocks.wanted
        ends = self._blocks.ends(queue)
        enough = min(int(np.searchsorted(ends, slots)), documents)  # of the queue's documents, or beyond it
        ahead = AHEAD if enough >= len(queue) else AHEAD - (len(queue) - enough)
        most = self.most_in_flight - len(queue)
        if most > 0 and ahead > 0:
            arrived = reader.read(slots - int(ends[-1]), documents - len(queue), ahead, most)
            queue = Flight.joined([queue, arrived])
        known = replace(
            before, queue=queue, position=reader.position, dropped=reader.dropped, ended=reader.ended
        )
        if self._options["resume"] == "items" and hasattr(self._source.documents, "state_dict"):
            known = replace(known, source=self._source.documents.state_dict())
        return self._blocks.last(known, self.epoch) if reader.ended else self._blocks.full(known, self.epoch)


def _check_choices(tail: str, overlong: str, resume: str, items: bool) -> None:
    """Refuse unknown choices, and a state of items where there are none."""
    for name, choice, choices in (
        ("tail", tail, StreamTail),
        ("overlong", overlong, Overlong),
        ("resume", resume, Resume),
    ):
        if choice not in get_args(choices):
            raise ValueError(f"{name}={choice!r} is unknown; choose one of {', '.join(get_args(choices))}")
    if not items and resume == "items":
        raise ValueError(
            "resume='items' keeps documents in the state, but with length=None the source gives lengths only;"
            " use resume='reread'"
        )


def _are_lengths(documents: Any) -> bool:
    """Whether lengths are given as one array or list, and not in chunks."""
    if isinstance(documents, np.ndarray):
        return documents.ndim == 1 and documents.dtype != np.object_
    return isinstance(documents, list | tuple) and all(isinstance(each, int) for each in documents)


def _check_shard(shard: Any) -> tuple[int, int]:
    """(rank, world) as integers.

    Raises:
        ValueError: no such pair, or a rank outside the world.
    """
    if not isinstance(shard, tuple | list) or len(shard) != 2:
        raise ValueError(f"shard must be a pair (rank, world), got {shard!r}")
    rank, world = check_integer("shard's rank", shard[0], 0), check_integer("shard's world", shard[1])
    if rank >= world:
        raise ValueError(f"shard=({rank}, {world}) is outside its world: ranks count from 0")
    return rank, world
