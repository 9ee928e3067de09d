"""`Plan`: the documents of every global step of an epoch, and their assignment to ranks.

    lengths ── seeded order ──▶ steps (sets of documents) ── deal(step, ranks) ──▶ packs of the ranks
                                same for any ranks           arranged for each number of ranks

A plan is a pure function of lengths, targets, options, seed, epoch, and the documents carried in. A run can stop at any
step and continue with another number of ranks: no document is lost or repeated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.cost import CostModel
from multipack.planning.deal import deal_packs, micro_batches_of
from multipack.planning.items import Items, ItemSource
from multipack.planning.lengths import (
    Integers,
    Packs,
    check_carried,
    check_integer,
    check_lengths,
    check_targets,
    check_weights,
    offsets_of,
)
from multipack.planning.options import LossWeighting, PlanOptions, Sync, check_choice, fingerprint_of
from multipack.planning.steps import Division, StepRules, divide_epoch, permutation
from multipack.shapes import ModelShape


def denominator_of(
    targets: Integers, loss_weighting: LossWeighting, weights: NDArray[np.float64] | None = None
) -> float:
    """Divisor of the summed loss of documents with these numbers of targets and weights; see `Plan.denominator`.

    It is an `int` without weights.
    """
    counts = targets if loss_weighting == "token" else targets > 0
    return int(counts.sum()) if weights is None else float((counts * weights).sum())


class SingleDocuments(ItemSource):
    """Items of one document each, with the documents' numbers. The only place that checks the documents of a plan.

    Arguments and errors: see `plan`.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        options: PlanOptions,
        targets: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> None:
        self.lengths = check_lengths(lengths, options.capacity)
        self.targets = None if targets is None else check_targets(targets, self.lengths)
        self.weights = None if weights is None else check_weights(weights, len(self.lengths))
        self._options = options

    def items(
        self, seed: int = 0, epoch: int = 0, carried: ArrayLike | None = None, widened: int = 1
    ) -> Items:
        """See `ItemSource`."""
        documents, options = len(self.lengths), self._options
        opening = check_carried(carried, documents)
        own = np.arange(documents) if options.order == "given" else permutation(seed, epoch, documents)
        return Items(
            lengths=self.lengths,
            targets=self.targets,
            weights=self.weights,
            carried_in=opening,
            slots=self.lengths,
            sequence=np.concatenate([opening, own]).astype(np.uint32 if documents < 1 << 32 else np.int64),
            most_documents=options.most_documents(self.lengths, options.tail == "carry" or len(opening) > 0),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The steps of one epoch. Made by `plan`.

    An item is what the plan places: a document or, if `items` is a `SharedItems`, several. Packs hold items;
    `of_documents` makes packs of documents from them.

    Attributes:
        items: the items of the epoch, and all documents.
        options: options of the plan.
        division: the items in packs and steps, as positions in the order of the epoch.
        seed, epoch: seed and epoch of the order.
        loss_weighting: whether the loss is a mean over `token`s or `document`s; does not affect the steps.
        cost_model: cost of documents.
        balanced: cost that is balanced between packs, determined by the option `balance`.
        key: plain values of the options, from which the fingerprint is computed.
        fingerprint: hash of lengths, targets and options; it does not depend on ranks, sync, seed or epoch.
        seconds: time that planning took, in seconds.
    """

    items: Items
    options: PlanOptions
    division: Division
    seed: int
    epoch: int
    loss_weighting: LossWeighting
    cost_model: CostModel
    balanced: CostModel
    key: dict[str, Any]
    fingerprint: str
    seconds: float

    @property
    def lengths(self) -> Integers:
        """(all documents,) int64 tokens of every document, planned or not."""
        return self.items.lengths

    @property
    def weights(self) -> NDArray[np.float64] | None:
        """(all documents,) float64 weights of documents in the loss, or None for 1."""
        return self.items.weights

    @property
    def slots(self) -> Integers:
        """(all items,) int64 slots of each item in a pack: a document's length, or the distinct tokens of several."""
        return self.items.slots

    @property
    def most_documents(self) -> int:
        """Maximum number of documents of a pack, in any epoch, step and assignment to ranks."""
        return self.items.most_documents

    @property
    def carried_in(self) -> Integers:
        """Numbers of the documents carried over from the previous epoch."""
        return self.items.carried_in

    @cached_property
    def order(self) -> Integers:
        """(items,) int64 item numbers, pack after pack, step after step."""
        return self.items.sequence[self.division.entries].astype(np.int64)

    @property
    def pack_offsets(self) -> Integers:
        """(packs + 1,) int64 start of each pack in `order`."""
        return self.division.pack_offsets

    @property
    def step_offsets(self) -> Integers:
        """(steps + 1,) int64 index of the first pack of each step."""
        return self.division.step_offsets

    @property
    def window(self) -> int:
        """Number of steps planned together: as given, or more if a fixed number of steps required it."""
        return self.division.width

    @cached_property
    def _left(self) -> Integers:
        """Numbers of the documents in no step, in their order."""
        sequence = self.items.sequence
        return self.items.documents(sequence[self.division.left(len(sequence))].astype(np.int64))

    @property
    def dropped(self) -> Integers:
        """Numbers of the documents dropped by `tail="drop"`, in their order."""
        return self._left if self.options.tail == "drop" else self._left[:0]

    @property
    def carried(self) -> Integers:
        """Numbers of the documents that `tail="carry"` leaves for the next epoch, in their order."""
        return self._left if self.options.tail == "carry" else self._left[:0]

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a pack."""
        return self.options.capacity

    @property
    def packs_per_step(self) -> int:
        """Maximum number of packs of a step."""
        return self.options.packs_per_step

    @property
    def num_steps(self) -> int:
        """Number of global steps of the epoch."""
        return len(self.step_offsets) - 1

    @property
    def num_documents(self) -> int:
        """Number of documents in the epoch's steps, including `carried_in`, without `dropped` and `carried`."""
        return len(self.document_order)

    @cached_property
    def document_order(self) -> Integers:
        """(documents,) int64 document numbers, pack after pack, step after step."""
        return self.items.documents(self.order)

    @property
    def num_packs(self) -> int:
        """Number of packs of the epoch as planned, none of them empty."""
        return len(self.pack_offsets) - 1

    @property
    def longest(self) -> int:
        """Number of slots of the longest document, planned or not: a constant for kernels."""
        return int(self.lengths.max())

    @property
    def min_prefix(self) -> int | None:
        """Shortest beginning that documents share; None = they share none. The collator must use the same."""
        return self.items.min_prefix

    def __repr__(self) -> str:
        return (
            f"Plan({self.num_steps:,} steps, {self.num_packs:,} packs of at most {self.capacity:,} tokens,"
            f" {self.num_documents:,} documents, seed {self.seed}, epoch {self.epoch})"
        )

    def documents(self, step: int) -> Integers:
        """(documents of the step,) int64 document numbers, which do not depend on the number of ranks."""
        return self.items.documents(self.packs(step).order)

    def packs(self, step: int) -> Packs:
        """The packs of a step as planned, of items: at most `packs_per_step`, none of them empty."""
        number = step + self.num_steps if step < 0 else step
        if not 0 <= number < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        packs = self.division.packs(number)
        return Packs(self.items.sequence[packs.order].astype(np.int64), packs.offsets)

    def of_documents(self, packs: Packs) -> Packs:
        """Packs of documents from packs of items."""
        return self.items.packs_of_documents(packs)

    def costs(self, items: Integers) -> Integers:
        """(items,) int64 cost of these items."""
        return self.cost_model.cost(self.slots[items], self.items.attention(items))

    def tokens(self, step: int) -> int:
        """Number of tokens of a step's documents."""
        return int(self.lengths[self.documents(step)].sum())

    def targets(self, step: int) -> int:
        """Number of target tokens of a step, over all ranks and micro-batches."""
        return int(self._targets(step).sum())

    def denominator(self, step: int) -> float:
        """Divisor of a step's summed loss over all ranks and micro-batches, known without a collective.

        With `loss_weighting="token"` it is the number of targets; with `"document"` the number of documents with a
        target, each of whose n targets has weight 1 / n (LongAlign: Bai et al. 2024, arXiv:2401.18058). With weights a
        document of weight w counts as w documents.
        """
        weights = None if self.weights is None else self.weights[self.documents(step)]
        return denominator_of(self._targets(step), self.loss_weighting, weights)

    def _targets(self, step: int) -> Integers:
        """(documents of the step,) number of targets of each."""
        documents, targets = self.documents(step), self.items.targets
        return self.lengths[documents] - 1 if targets is None else targets[documents]

    def micro_batches(self, data_parallel_size: int) -> int:
        """Packs of each rank in a step, ⌈packs_per_step / ranks⌉; `ValueError` if there are more ranks than packs."""
        return micro_batches_of(self.packs_per_step, data_parallel_size)

    def deal(self, step: int, data_parallel_size: int, sync: Sync = "micro") -> Packs:
        """Assign a step's items to ranks: micro_batches × ranks packs, balanced at each sync point.

        Args:
            step: index of the global step in the epoch.
            data_parallel_size: number of ranks that share the step, at most `packs_per_step`.
            sync: when ranks synchronize: `micro` at each micro-batch (FSDP, pipelines), `step` once per step (DDP,
                ZeRO-1/2).

        Returns:
            `Packs` in micro-batch-major order: pack m · ranks + r is rank r's micro-batch m. No pack is empty if there
            are at least as many documents as packs. From step to step packs rotate over the ranks, so that over an
            epoch all ranks have similar documents: where ranks have four packs of about 20 documents (lognormal
            lengths, σ = 0.8), numbers of documents and sums of squared lengths differ by at most 5 % from 40 steps on;
            with one pack from 150 on. Lengths with heavier tails take more steps.

        Raises:
            ValueError: there are more ranks than packs in a step, or `sync` is unknown.
        """
        packs, turn = self.packs(step), int(self._turns[step])
        slots = self.slots[packs.order]
        costs = self.balanced.cost_of(slots, self.items.attention(packs.order))
        return deal_packs(packs, slots, costs, self.options, data_parallel_size, sync, turn)

    @cached_property
    def _turns(self) -> Integers:
        """(steps,) place of each step by its longest item, falling: steps of successive turns are similar."""
        starts = self.pack_offsets[self.step_offsets[:-1]]
        return np.argsort(np.argsort(-np.maximum.reduceat(self.slots[self.order], starts), kind="stable"))

    def state(self, step: int) -> dict[str, Any]:
        """Plain values for a checkpoint from which `step` is the next one; `plan` makes the rest again.

        Raises:
            ValueError: a step outside the plan.
        """
        if not 0 <= step <= self.num_steps:
            raise ValueError(f"step {step} is not among the plan's {self.num_steps} steps")
        return {
            "fingerprint": self.fingerprint,
            "options": self.key,
            "seed": self.seed,
            "epoch": self.epoch,
            "step": check_integer("step", step, 0),
            "carried": self.carried_in.tolist(),
        }


def plan(
    lengths: ArrayLike | Items,
    *,
    options: PlanOptions | None = None,
    targets: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    cost: CostModel | ModelShape | None = None,
    seed: int = 0,
    epoch: int = 0,
    steps: int | None = None,
    carried: ArrayLike | None = None,
    loss_weighting: LossWeighting = "token",
    **named: Any,
) -> Plan:
    """Plan an epoch: documents into global steps, and each step's documents into packs.

    Args:
        lengths: (documents,) tokens of each document; or the items of the epoch, which then have targets, weights and
            carried documents themselves, and are in order.
        options: every option at once; keywords override it.
        targets: (documents,) target tokens of each document; None = length − 1. Changes no step.
        weights: (documents,) weight of each document in the loss, at least 0; None = 1. Changes no step.
        cost: the cost of documents: a `CostModel`, a shape, or None for Llama 3 8B.
        seed: of the order; any integer.
        epoch: from 0; with the seed it determines the order.
        steps: make exactly this many steps. With `tail="keep"`, windows become wider where documents do not fit
            otherwise; other tails leave over what does not fit.
        carried: numbers of the documents that the epoch before left over, which come first; they may repeat.
        loss_weighting: the loss of a step is a mean over its targets (`token`), or over its documents' mean
            losses (`document`); a piece of a split document counts as a document. See `Plan.denominator`.
        **named: options by name, see `PlanOptions`: capacity= and packs_per_step= are required without `options`.

    Raises:
        TypeError: an unknown option, or no capacity or packs_per_step.
        ValueError: lengths or options that are not allowed; the message names what to change.
    """
    started = time.perf_counter()
    chosen = PlanOptions.of(options, named)
    seed, epoch = check_integer("seed", seed, None), check_integer("epoch", epoch, 0)
    steps = None if steps is None else check_integer("steps", steps)
    check_choice("loss_weighting", loss_weighting, LossWeighting)
    cost_model = cost if isinstance(cost, CostModel) else CostModel.from_shape(cost)
    if isinstance(lengths, Items):
        items = lengths
        check_lengths(items.slots, chosen.capacity)  # the items may have been made with other options
    else:
        items = SingleDocuments(lengths, chosen, targets, weights).items(seed, epoch, carried)
    balanced = cost_model.balanced(chosen.balance, items.slots)

    def price(positions: Integers, slots: Integers) -> Integers:
        # Where attention is not None, items are numbered in their order: a position is an item.
        return balanced.cost_of(slots, items.attention(positions))

    rules = StepRules(chosen, price, seed, epoch, fills_evenly=chosen.tail == "keep")
    division = divide_epoch(offsets_of(items.slots[items.sequence]), rules, steps)
    key = chosen.key(balanced.key(), steps) | items.key
    return Plan(
        items,
        chosen,
        division,
        seed,
        epoch,
        loss_weighting,
        cost_model,
        balanced,
        key,
        fingerprint_of(items.lengths, items.targets, key),
        time.perf_counter() - started,
    )
