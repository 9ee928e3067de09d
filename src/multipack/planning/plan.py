"""The plan of an epoch: which documents train together in which global step, and how ranks share a step.

    lengths ── seeded order ──▶ steps (sets of documents) ── deal(step, world) ──▶ packs for ranks
                                 same for every world          arranged afresh for each

A plan is a pure function of lengths, targets, options, seed and epoch (and of the documents carried in). A
run can therefore stop at any step and go on with other hardware: nothing is lost and nothing repeated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning import deal as dealing
from multipack.planning import measure
from multipack.planning.cost import CostModel
from multipack.planning.deal import Sync
from multipack.planning.epoch import Rules
from multipack.planning.options import (
    Balance,
    LossWeighting,
    Options,
    Order,
    PlanConfig,
    Tail,
    align_lengths,
    balanced_cost,
    check_carried,
    check_fingerprint,
    check_loss_weighting,
    check_seed,
    check_targets,
    cost_model_of,
    fingerprint_of,
    most_documents_of,
    short,
)
from multipack.planning.packing import Packs, check_integer, check_lengths
from multipack.planning.permutation import permutation
from multipack.planning.steps import make_steps, third_occurrences
from multipack.shapes import ModelShape

if TYPE_CHECKING:
    from multipack.planning.measure import PlanReport

__all__ = ["Balance", "LossWeighting", "Order", "Plan", "PlanConfig", "Sync", "Tail", "plan"]


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The steps of one epoch. Made by `plan`.

    Attributes:
        lengths: (all documents,) int64 tokens of every document, planned or not.
        target_counts: (all documents,) int64 target tokens, or None for length − 1.
        capacity: most tokens of a pack.
        packs_per_step: most packs of a step.
        max_documents: most documents of a pack, or None.
        window: steps that were planned together: as asked, or more where a fixed number of steps needed it.
        tail: what happens to documents that do not fill a step.
        balance: what packs agree in.
        loss_weighting: what the loss is a mean over: `token` or `document`; changes no step.
        effort: of dealing; changes no step.
        shuffled: the order is that of seed and epoch; else the documents' own.
        seed, epoch: of the order.
        cost_model: what a document costs.
        align: multiple to which each document is padded; the collator must do the same.
        slots: (all documents,) int64 tokens that each document takes in a pack: its length, padded to `align`.
        balanced: the cost that packs agree in, as `balance` asks.
        order: (documents,) int64 document numbers, pack after pack, step after step.
        pack_offsets: (packs + 1,) where packs begin in `order`.
        step_offsets: (steps + 1,) where steps begin among packs.
        dropped: document numbers that `tail="drop"` left out, in their order.
        carried: document numbers that `tail="carry"` leaves for the next epoch, in their order.
        carried_in: document numbers carried over from the epoch before.
        fingerprint: of lengths, targets and options; not of world, sync, seed or epoch.
        options: plain values that the fingerprint is made from, beside the documents.
        most_documents: documents that no pack can exceed, in any epoch, step, world or arrangement.
        seconds: time that planning took.
    """

    lengths: NDArray[np.int64]
    target_counts: NDArray[np.int64] | None
    capacity: int
    packs_per_step: int
    max_documents: int | None
    window: int
    tail: Tail
    balance: Balance
    loss_weighting: LossWeighting
    effort: int
    shuffled: bool
    seed: int
    epoch: int
    cost_model: CostModel
    align: int
    slots: NDArray[np.int64]
    balanced: CostModel
    order: NDArray[np.int64]
    pack_offsets: NDArray[np.int64]
    step_offsets: NDArray[np.int64]
    dropped: NDArray[np.int64]
    carried: NDArray[np.int64]
    carried_in: NDArray[np.int64]
    fingerprint: str
    options: dict[str, Any]
    most_documents: int
    seconds: float

    @property
    def num_steps(self) -> int:
        """Global steps of the epoch."""
        return len(self.step_offsets) - 1

    @property
    def num_documents(self) -> int:
        """Documents in the epoch's steps (those carried in count, those dropped or carried on do not)."""
        return len(self.order)

    @property
    def num_packs(self) -> int:
        """Packs of the epoch as planned, none of them empty."""
        return len(self.pack_offsets) - 1

    @property
    def longest(self) -> int:
        """Slots of the longest document, planned or not: a constant for kernels."""
        return int(self.slots.max())

    def __repr__(self) -> str:
        return (
            f"Plan({self.num_steps:,} steps, {self.num_packs:,} packs of at most {self.capacity:,} tokens,"
            f" {self.num_documents:,} documents, seed {self.seed}, epoch {self.epoch})"
        )

    def documents(self, step: int) -> NDArray[np.int64]:
        """The document numbers of a step: the same whatever the number of ranks."""
        first, last = self._packs_of(step)
        return self.order[self.pack_offsets[first] : self.pack_offsets[last]]

    def packs(self, step: int) -> Packs:
        """One packing of a step that fits: at most `packs_per_step` packs, none of them empty."""
        first, last = self._packs_of(step)
        return Packs(self.documents(step), self.pack_offsets[first : last + 1] - self.pack_offsets[first])

    def costs(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """(documents,) int64: the cost of these documents that packs agree in, as `balance` asks."""
        return self.balanced.cost(self.slots[documents])

    def tokens(self, step: int) -> int:
        """Tokens of a step's documents."""
        return int(self.lengths[self.documents(step)].sum())

    def targets(self, step: int) -> int:
        """Target tokens of a step, over all ranks and micro-batches."""
        documents = self.documents(step)
        if self.target_counts is None:
            return int(self.lengths[documents].sum()) - len(documents)
        return int(self.target_counts[documents].sum())

    def denominator(self, step: int) -> int:
        """What a step's summed loss is divided by, over all ranks and micro-batches: no collective is needed.

        Its targets with `loss_weighting="token"`; with `"document"` its documents that have a target, each of
        whose n targets weighs 1 / n (LongAlign: Bai et al. 2024, arXiv:2401.18058).
        """
        if self.loss_weighting == "token":
            return self.targets(step)
        documents = self.documents(step)
        if self.target_counts is None:
            return int(np.count_nonzero(self.lengths[documents] > 1))
        return int(np.count_nonzero(self.target_counts[documents]))

    def micro_batches(self, data_parallel_size: int) -> int:
        """Packs that each of so many ranks runs in a step: ⌈packs_per_step / ranks⌉.

        Raises:
            ValueError: more ranks than packs in a step.
        """
        world = check_integer("data_parallel_size", data_parallel_size)
        if world > self.packs_per_step:
            raise ValueError(
                f"{world} ranks cannot share steps of packs_per_step={self.packs_per_step} packs: each rank"
                f" needs one; set packs_per_step to at least {world}, or use at most"
                f" {self.packs_per_step} ranks"
            )
        return -(-self.packs_per_step // world)

    def deal(self, step: int, data_parallel_size: int, sync: Sync = "micro") -> Packs:
        """A step's documents arranged for ranks: micro_batches × ranks packs, balanced where ranks meet.

        Args:
            step: global step of the epoch.
            data_parallel_size: ranks that share the step, at most `packs_per_step`.
            sync: where ranks wait for each other: `micro` at each micro-batch (FSDP), `step` once a
                step (DDP, ZeRO-1/2), `pipeline` like micro.

        Returns:
            `Packs` in micro-batch-major order: pack m · ranks + r is rank r's micro-batch m. None is empty
            while there are enough documents.
        """
        micro_batches = self.micro_batches(data_parallel_size)
        if sync not in get_args(Sync):
            raise ValueError(f"sync={sync!r} is unknown; choose one of {', '.join(get_args(Sync))}")
        packs = self.packs(step)
        documents = packs.order
        slots = self.slots[documents]
        dealt = dealing.deal(
            slots,
            self.balanced.cost(slots),
            np.repeat(np.arange(len(packs)), packs.sizes()),
            world=int(data_parallel_size),
            micro_batches=micro_batches,
            capacity=self.capacity,
            max_documents=self.max_documents or len(documents),
            sync=sync,
            joint=self.balance == "joint",
            effort=self.effort,
        )
        return Packs(documents[dealt.order], dealt.offsets)

    def report(
        self, data_parallel_size: int = 1, sync: Sync = "micro", sample: int | None = 1000
    ) -> PlanReport:
        """How good the plan is for so many ranks.

        Args:
            data_parallel_size: ranks that share a step.
            sync: where they meet.
            sample: most steps to deal, evenly apart, for what depends on dealing; None = all.
        """
        return measure.report(self, data_parallel_size, sync, sample, self.window)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint needs to go on before `step`: plain values; `plan` makes the rest again."""
        if not 0 <= step <= self.num_steps:
            raise ValueError(f"step {step} is not among the plan's {self.num_steps} steps")
        return {
            "fingerprint": self.fingerprint,
            "options": self.options,
            "seed": self.seed,
            "epoch": self.epoch,
            "step": check_integer("step", step, 0),
            "carried": self.carried_in.tolist(),
        }

    def check_state(self, state: dict[str, Any]) -> int:
        """The step at which a saved state goes on with this very plan.

        Raises:
            ValueError: the state belongs to other documents, options, seed, epoch or carried documents.
        """
        missing = [key for key in ("fingerprint", "seed", "epoch", "step", "carried") if key not in state]
        if missing:
            raise ValueError(f"the saved plan state lacks {', '.join(missing)}")
        check_fingerprint(state, self.fingerprint, self.options)
        for key, mine in (("seed", self.seed), ("epoch", self.epoch), ("carried", self.carried_in.tolist())):
            if state[key] != mine:
                raise ValueError(
                    f"the saved plan state has another {key}: {short(state[key])}, not {short(mine)}"
                )
        step = check_integer("the saved plan state's step", state["step"], 0)
        if step > self.num_steps:
            raise ValueError(
                f"the saved plan state is at step {step}, but the plan has {self.num_steps} steps"
            )
        return step

    def _packs_of(self, step: int) -> tuple[int, int]:
        number = step + self.num_steps if step < 0 else step
        if not 0 <= number < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        return int(self.step_offsets[number]), int(self.step_offsets[number + 1])


def plan(
    lengths: ArrayLike,
    *,
    capacity: int,
    packs_per_step: int,
    targets: ArrayLike | None = None,
    budget: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    window: int = 4,
    order: Order = "shuffled",
    tail: Tail = "keep",
    carried: ArrayLike | None = None,
    balance: Balance = "cost",
    cost: CostModel | ModelShape | None = None,
    max_documents: int | None = None,
    steps: int | None = None,
    loss_weighting: LossWeighting = "token",
    group: bool = True,
    align: int = 1,
    effort: int = 1,
) -> Plan:
    """Plan an epoch: every document into a global step and a pack, or named as dropped or carried.

    Args:
        lengths: (documents,) tokens of each document, 1 … capacity.
        capacity: most tokens of a pack.
        packs_per_step: most packs of a global step, over all ranks and micro-batches.
        targets: (documents,) target tokens of each document; None = its length − 1.
        budget: mean tokens of a pack to aim at, at most the capacity; None = the capacity.
        seed: any integer.
        epoch: from 0; each epoch has its own order.
        window: steps planned together. More fill and balance better; fewer stay closer to the order.
        order: `shuffled`, or the documents' own order (`given`), kept to within a window.
        tail: `keep` every document; `drop` those that do not fill a step; `carry` those into the next epoch.
        carried: documents carried over from the epoch before; they come first. One that then occurs three times or
            more is kept apart from itself by steps that may be less full.
        balance: what packs shall agree in: `cost`; `joint`, tokens and squares alike (the cost whose L* is
            Σl² / Σl, so that both parts weigh the same); or `tokens`.
        cost: a cost model or a shape; None = Llama 3 8B.
        max_documents: most documents of a pack; None = no limit.
        steps: make exactly so many steps. With `keep` that is possible from ⌈best-fit packs / packs_per_step⌉
            steps on, and often from fewer; where documents do not fit, the window is doubled until they do.
            With `drop` and `carry` what does not fit is left, and steps are partly filled
            when there are too few documents.
        loss_weighting: `token`: the loss of a step is the mean over its targets; `document`: the mean over its
            documents that have a target of each one's mean loss. A piece of a document that was split counts as
            a document. Both are known from the plan alone (`Plan.denominator`), and neither changes a step.
        group: packs of a block that a long document makes dearer than the others stand together in steps; false
            leaves them where chance puts them: ranks wait for them, and steps stay random samples.
        align: every document is padded to a multiple of so many slots, which the collator does as well.
        effort: how many times as many rearrangements of packs dealing tries as by default. Changes no step.

    Raises:
        ValueError: lengths or options that no plan can have; the message names what to change.
    """
    started = time.perf_counter()
    options = Options(
        capacity=capacity,
        packs_per_step=packs_per_step,
        budget=budget,
        window=window,
        order=order,
        tail=tail,
        balance=balance,
        max_documents=max_documents,
        steps=steps,
        group=group,
        align=align,
        cost_model=cost_model_of(cost),
    )
    seed, epoch = check_seed(seed), check_integer("epoch", epoch, 0)
    check_loss_weighting(loss_weighting)
    checked = check_lengths(lengths, options.capacity)
    slots = align_lengths(checked, options)
    balanced = balanced_cost(options, slots)
    counts = None if targets is None else check_targets(targets, checked)
    opening = check_carried(carried, len(checked))
    most_documents = most_documents_of(slots, options, 2 if tail == "carry" or len(opening) else 1)
    sequence = _sequence(opening, len(checked), options, seed, epoch)
    ends = _offsets(slots[sequence])
    rules = Rules(
        capacity=options.capacity,
        packs_per_step=options.packs_per_step,
        step_tokens=options.packs_per_step * (options.capacity if tail == "keep" else options.mean),
        max_documents=options.max_documents or len(sequence),
        price=balanced.cost,
        group=options.group,
        full=tail != "keep" and options.mean == options.capacity,
        shuffled=order == "shuffled",
        seed=seed,
        epoch=epoch,
    )
    repeats = third_occurrences(sequence, len(opening))
    made, used_window = make_steps(sequence, ends, repeats, rules, options)
    left = sequence[made.left].astype(np.int64)
    del sequence, ends
    nothing, key = np.empty(0, dtype=np.int64), options.key(balanced)
    return Plan(
        lengths=checked,
        target_counts=counts,
        capacity=options.capacity,
        packs_per_step=options.packs_per_step,
        max_documents=options.max_documents,
        window=used_window,
        tail=tail,
        balance=balance,
        loss_weighting=loss_weighting,
        effort=check_integer("effort", effort),
        shuffled=order == "shuffled",
        seed=seed,
        epoch=epoch,
        cost_model=options.cost_model,
        align=options.align,
        slots=slots,
        balanced=balanced,
        order=made.order,
        pack_offsets=_offsets(made.pack_sizes),
        step_offsets=_offsets(made.step_sizes),
        dropped=left if tail == "drop" else nothing,
        carried=left if tail == "carry" else nothing,
        carried_in=opening,
        fingerprint=fingerprint_of(checked, counts, key),
        options=key,
        most_documents=most_documents,
        seconds=time.perf_counter() - started,
    )


def _sequence(
    opening: NDArray[np.int64], documents: int, options: Options, seed: int, epoch: int
) -> NDArray[Any]:
    """Document numbers in the order of the epoch, those carried in first; 32 bits where that is enough."""
    own = np.arange(documents) if options.order == "given" else permutation(seed, epoch, documents)
    both = np.concatenate([opening, own]) if len(opening) else own
    return both.astype(np.uint32 if documents < 1 << 32 else np.int64)


def _offsets(sizes: NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
