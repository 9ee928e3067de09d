"""Blocks of a stream: documents of the queue into steps, by the same rules and the same code as those of a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from multipack.planning.cost import CostModel
from multipack.planning.epoch import Cut, Progress, Rules, block, cut
from multipack.planning.options import LossWeighting, PlanOptions
from multipack.planning.plan import Plan, plan
from multipack.planning.source import Flight
from multipack.planning.stream_state import Block

Integers = NDArray[np.int64]


class Blocks:
    """Makes blocks.

    Args:
        options: of the stream; `window` is its lookahead.
        cost_model: what a document costs.
        seed: of shuffled steps.
        loss_weighting: what the loss is a mean over.
    """

    def __init__(
        self, options: PlanOptions, cost_model: CostModel, seed: int, loss_weighting: LossWeighting
    ) -> None:
        self._options, self._cost_model = options, cost_model
        self.most_documents = min(
            options.max_documents or options.capacity, options.capacity // options.align
        )
        self._empty = plan(  # what all blocks have in common; the document is replaced
            [1],
            options=replace(options, tail="keep"),
            seed=seed,
            cost=cost_model,
            loss_weighting=loss_weighting,
        )
        self._rules = Rules(
            capacity=options.capacity,
            packs_per_step=options.packs_per_step,
            step_tokens=options.packs_per_step * options.mean,
            max_documents=self.most_documents,
            price=self._price,
            group=options.group,
            full=options.mean == options.capacity,
            shuffled=options.order == "shuffled",
            seed=seed,
            epoch=0,
        )

    @property
    def wanted(self) -> tuple[int, int]:
        """Slots and documents, either of which fills as many steps as are planned together."""
        steps = self._options.window
        packs = steps * self._options.packs_per_step
        return steps * self._rules.step_tokens, packs * self.most_documents

    def start(self, targets: bool, items: bool) -> Block:
        """The block before the first: nothing was read."""
        empty, nothing = Flight.empty(targets, items), np.empty(0, dtype=np.int64)
        return Block(self.plan(empty, nothing, nothing), empty, empty)

    def full(self, known: Block, epoch: int) -> Block:
        """Full steps from the front of the queue, as many as are planned together.

        There are fewer where no more documents may be held, and one which is not full where they fill none.
        """
        ends, begin = self.ends(known.queue), _progress(known)
        filled = self._options.full_steps(int(ends[-1]), len(known.queue))
        width = min(max(filled, 1), self._options.window)
        rules = replace(self._rules, epoch=epoch)
        order, packs, steps, after = block(ends, None, rules, begin, width, width)
        rest = np.concatenate([after.waiting, np.arange(after.next, len(known.queue), dtype=np.int64)])
        return replace(
            self._made(known, order, packs, steps, rest),
            waiting=len(after.waiting),
            old=int(np.searchsorted(after.waiting, after.old)),
            number=after.blocks,
            short_steps=known.short_steps + (filled == 0),
        )

    def last(self, known: Block, epoch: int) -> Block:
        """All steps that remain, when the source has ended; what they leave stays in the queue."""
        ends, begin = self.ends(known.queue), _progress(known)
        entries, tokens = len(known.queue), int(ends[-1])
        sequence, nothing = np.arange(entries, dtype=np.int64), np.empty(0, dtype=np.int64)
        keep = self._options.tail == "keep"
        extend = self._options.needed_steps if keep else self._options.full_steps
        rules = replace(self._rules, epoch=epoch)
        if keep:  # spread evenly, so that no step is nearly empty
            rules = replace(rules, full=False, step_tokens=rules.packs_per_step * rules.capacity)
        steps = min(extend(tokens, entries), entries)
        made = Cut(nothing, nothing, nothing, sequence)
        if steps:
            made = cut(sequence, ends, None, rules, steps, self._options.window, extend, keep, begin)
        if (
            keep and len(made.step_sizes) > steps
        ):  # some did not fit: spread all over the steps that they took
            steps = len(made.step_sizes)
            again = cut(sequence, ends, None, rules, steps, self._options.window, extend, keep, begin)
            made = again if len(again.step_sizes) <= steps else made
        known = replace(known, waiting=0, old=0)  # no block follows
        return self._made(known, made.order, made.pack_sizes, made.step_sizes, made.left)

    def plan(self, flight: Flight, packs: Integers, steps: Integers, linear: int | None = None) -> Plan:
        """Documents that stand in the order of their packs and steps, as a small plan of their own.

        Args:
            flight: the documents.
            packs: documents of each pack.
            steps: packs of each step.
            linear: of the cost that `balance="joint"` balances; None = that of these documents.
        """
        slots = self.slots(flight.lengths)
        balanced = self._cost_model
        if linear is not None:
            balanced = CostModel(None, linear=linear)
        elif self._options.balance != "cost" and len(slots):
            balanced = self._options.balanced_cost(self._cost_model, slots)
        return replace(
            self._empty,
            lengths=flight.lengths,
            target_counts=flight.targets,
            slots=slots,
            balanced=balanced,
            order=np.arange(len(flight), dtype=np.int64),
            pack_offsets=_offsets(packs),
            step_offsets=_offsets(steps),
            most_documents=self.most_documents,
        )

    def slots(self, lengths: Integers) -> Integers:
        """(documents,) slots that documents of these lengths take."""
        align = self._options.align
        return lengths if align == 1 else -(-lengths // align) * align

    def ends(self, flight: Flight) -> Integers:
        """(documents + 1,) running sum of their slots, from 0."""
        ends = np.zeros(len(flight) + 1, dtype=np.int64)
        np.cumsum(self.slots(flight.lengths), out=ends[1:])
        return ends

    def _made(self, known: Block, order: Integers, packs: Integers, steps: Integers, rest: Integers) -> Block:
        """A block of these documents of the queue, and the rest of it."""
        flight = known.queue[order]
        made = self.plan(flight, packs, steps)
        return replace(known, plan=made, flight=flight, queue=known.queue[rest])

    def _price(self, slots: Integers) -> Integers:
        """The cost that packs agree in; with `joint`, of these documents."""
        if self._options.balance == "cost":
            return self._cost_model.cost(slots)
        return self._options.balanced_cost(self._cost_model, slots).cost(slots)


def _progress(known: Block) -> Progress:
    """Where the queue stands: what waits is in front."""
    waiting = np.arange(known.waiting, dtype=np.int64)
    return Progress(next=known.waiting, old=known.old, waiting=waiting, blocks=known.number)


def _offsets(sizes: Integers) -> Integers:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
