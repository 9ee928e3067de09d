"""`PackedBatchSampler`: a plan as a torch batch sampler, one rank's micro-batches as flat lists of documents.

    plan     step 0                     step 1
    rank 0   [4, 9, 2] [7, 1]           [3] [11, 0]          DataLoader(documents, batch_sampler=…)
    rank 1   [5, 8]    [6, 10, 12]      …                    the collator concatenates each list

Every rank plans alone and reaches the same plan; none of them communicates. A loader with this sampler must not be
divided among ranks again: leave it out of `accelerator.prepare`, and set `use_distributed_sampler=False` in Lightning.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from multipack.planning.cost import CostModel
from multipack.planning.deal import DEALING
from multipack.planning.items import ItemSource
from multipack.planning.lengths import check_carried, check_integer
from multipack.planning.options import LossWeighting, PlanOptions, Sync, check_fingerprint, opened
from multipack.planning.packing import Packs, pack
from multipack.planning.plan import Plan, SingleDocuments, plan
from multipack.shapes import ModelShape

STATE = ("fingerprint", "seed", "epoch", "step", "micro_batch", "carried")
"""Keys of a saved state that loading needs."""

DEALT_STEPS = 8
"""Steps whose arrangement is remembered."""


def refuse_second_division(sampler: Sampler[Any], ranks: int) -> None:
    """Raise `ValueError` if a caller divides the batches of `sampler`, one rank's share, among ranks again.

    Each of two ranks would train on half of its documents. Such a caller is a sampler of several processes
    (accelerate's `BatchSamplerShard`, also in Trainer; Lightning's `DistributedSamplerWrapper`), or accelerate's
    `DataLoaderDispatcher`, which reads on one rank for all.
    """
    for reader, kinds, _ in _callers() if ranks > 1 else ():
        if reader is not sampler and (isinstance(reader, Sampler) or "DataLoaderDispatcher" in kinds):
            owners = (reader, getattr(reader, "state", None))
            counts = [getattr(each, name, 1) for each in owners for name in ("num_processes", "num_replicas")]
            if any(isinstance(count, int) and count > 1 for count in counts):
                raise ValueError(
                    f"{type(sampler).__name__} yields the batches of one of {ranks} ranks, and {kinds[0]} divides them"
                    " among the ranks again: do not pass its DataLoader to accelerator.prepare (with Trainer: return it"
                    " from get_train_dataloader), and set use_distributed_sampler=False in Lightning"
                )


def refuse_restart(sampler: Any, epoch: int) -> None:
    """Raise `ValueError` if a loader of accelerate, which counts epochs itself, goes back to an earlier one.

    A loader that is new, as after a resume or `skip_first_batches`, begins at epoch 0 and would read its order again.
    """
    for _, kinds, method in _callers() if epoch < sampler.epoch else ():
        if "DataLoaderShard" in kinds and method == "__iter__":
            raise ValueError(
                f"accelerate's {kinds[0]} begins epoch {epoch}, but its sampler is at epoch {sampler.epoch}: call"
                f" set_epoch({sampler.epoch}) of the loader, too, or do not pass it to accelerator.prepare"
            )


def _callers() -> Iterator[tuple[Any, list[str], str]]:
    """The methods that are running: object, names of its classes, and method; needs no import of a host."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        owner = frame.f_locals.get("self")
        yield owner, [kind.__name__ for kind in type(owner).__mro__], frame.f_code.co_name


class OwnSampler:
    """A batch sampler that is its own inner one: Lightning and accelerate call `batch_sampler.sampler.set_epoch`."""

    @property
    def sampler(self) -> Any:
        """This sampler."""
        return self

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """Hosts assign here when they wrap a sampler; there is nothing to replace."""


class PackedBatchSampler(OwnSampler, Sampler[list[int]]):
    """The micro-batches of one rank, epoch after epoch.

    Iterating yields one list of document numbers per micro-batch: `steps_per_epoch · micro_batches` of them, the same
    number on every rank and in every epoch. A list can be empty where a step has fewer documents than packs; its
    collated batch is a padding document without weight. Use it as `DataLoader(documents, batch_sampler=sampler,
    collate_fn=PackedCollator.of(sampler))`, and divide a step's summed loss by `sampler.plan.denominator(step)`.

    The number of steps is fixed at the start, by epoch 0. With `tail="keep"` an epoch whose documents do not fit has
    wider windows. With `tail="drop"` and `"carry"` later epochs are cut to this number, or fill their steps evenly; a
    queue of carried documents may grow from epoch to epoch, and none is lost.

    Calling `set_epoch` with the current epoch changes nothing. `load_state_dict` sets the position at which the next
    iterator starts; iterators after that one start at the beginning of the epoch.

    With `SharedPrefixes`, packs are made of its items; with `data.share_prefixes=all` each epoch has new
    ones, and an epoch whose documents do not fit has items of wider windows, too.

    Args:
        lengths: (documents,) tokens of each document; or `SharedPrefixes`, which has targets and weights itself.
        targets: (documents,) target tokens of each document; None = its length − 1.
        weights: (documents,) weight of each document in the loss; None = 1.
        rank: of this process among the data-parallel ranks.
        world_size: data-parallel ranks.
        seed: of the order.
        sync: where ranks wait for each other: at every micro-batch (`micro`) or once a step (`step`).
        options: as in `multipack.plan`; packs_per_step counts the packs of all ranks.
        cost: as in `multipack.plan`.
        loss_weighting: as in `multipack.plan`.
        **named: fields of `options`, as in `multipack.plan`.

    Attributes:
        epoch: the current epoch; `set_epoch` changes it.
        steps_per_epoch: global steps of every epoch.
        micro_batches: packs of this rank in a step.
        min_prefix: shortest beginning that documents of a pack share; None = they share none.

    Raises:
        ValueError: what `multipack.plan` refuses; a rank outside the world; more ranks than packs of a step.
    """

    def __init__(
        self,
        lengths: ArrayLike | ItemSource,
        *,
        options: PlanOptions | None = None,
        targets: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        sync: Sync = "micro",
        cost: CostModel | ModelShape | None = None,
        loss_weighting: LossWeighting = "token",
        **named: Any,
    ) -> None:
        chosen = PlanOptions.of(options, named)
        self._options: dict[str, Any] = {
            "options": chosen,
            "seed": check_integer("seed", seed, None),
            "cost": cost,
            "loss_weighting": loss_weighting,
        }
        self._carries = chosen.tail == "carry"
        if not isinstance(lengths, ItemSource):
            lengths = SingleDocuments(lengths, chosen, targets, weights)
        self._source = lengths
        first = self._planned()
        self.world_size = check_integer("world_size", world_size)
        self.rank = check_integer("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(f"rank={rank} is outside world_size={world_size}: ranks count from 0")
        self.sync: Sync = sync
        self.micro_batches = first.micro_batches(self.world_size)
        first.deal(0, self.world_size, sync)
        self._num_documents = len(first.lengths)
        self.steps_per_epoch = first.num_steps
        if first.options.tail == "keep":
            self.steps_per_epoch = self._steps_of_any_order(first)
        self.most_documents = first.most_documents
        self.longest = first.longest
        self.loss_weighting = first.loss_weighting
        self.weights = first.weights
        self.min_prefix = first.min_prefix
        self.epoch = 0
        self._carried: dict[int, NDArray[np.int64]] = {0: np.empty(0, dtype=np.int64)}
        self._plan: Plan | None = None
        self._dealt: dict[tuple[int, int], tuple[Packs, Packs]] = {}
        self._position = 0  # micro-batches of this epoch that were yielded
        self._resume = 0  # where the next iterator starts

    def __repr__(self) -> str:
        return (
            f"PackedBatchSampler(rank {self.rank} of {self.world_size}, {self.steps_per_epoch:,} steps of"
            f" {self.micro_batches} micro-batches an epoch, {self._num_documents:,} documents, epoch {self.epoch})"
        )

    @property
    def plan(self) -> Plan:
        """The current epoch's plan; with `tail="carry"` the epochs before it are planned too, if necessary."""
        made, epoch = self._plan, self.epoch
        if made is not None and made.epoch == epoch:
            return made
        first = max(number for number in self._carried if number <= epoch) if self._carries else epoch
        for number in range(first, epoch + 1):
            carried, steps = self._carried.get(number), self.steps_per_epoch
            made = self._planned(epoch=number, carried=carried, steps=steps)
            if self._carries:
                self._carried[number + 1] = made.carried
        assert made is not None
        self._plan = made
        return made

    def _planned(
        self, epoch: int = 0, carried: ArrayLike | None = None, steps: int | None = None, **changes: Any
    ) -> Plan:
        """Plan an epoch, with `changes` of options; other arguments as of `multipack.plan`."""
        source, given = self._source, {**self._options, **changes, "epoch": epoch, "steps": steps}
        widened = 1
        while True:
            items = source.items(given["seed"], epoch, carried, widened)
            try:
                return plan(items, **given)
            except ValueError:
                # This epoch's items have more slots than the first epoch's: items of wider windows share more.
                if steps is None or source.is_whole(widened):
                    raise
                widened *= 2

    def __len__(self) -> int:
        """Micro-batches of an epoch: the same on all ranks and in all epochs."""
        refuse_second_division(self, self.world_size)
        return self.steps_per_epoch * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        length = len(self)
        start, self._resume = self._resume, 0
        epoch = self.epoch
        for position in range(start, length):
            step, micro_batch = divmod(position, self.micro_batches)
            documents = self.documents_of(step)[micro_batch * self.world_size + self.rank]
            self._position = position + 1
            yield documents.tolist()
            if self.epoch != epoch:
                return

    def deal_of(self, step: int) -> Packs:
        """A step's packs of items for all ranks: pack m · world_size + r is rank r's micro-batch m."""
        return self._deal(step)[0]

    def documents_of(self, step: int) -> Packs:
        """The same packs, of documents."""
        return self._deal(step)[1]

    def _deal(self, step: int) -> tuple[Packs, Packs]:
        plan, recent = self.plan, self._dealt
        key = (plan.epoch, step)
        if key not in recent:
            # A prefetching thread is some steps ahead of the trainer. The dictionary is replaced, never changed.
            kept = list(recent.items())[-(DEALT_STEPS - 1) :]
            dealt = plan.deal(step, self.world_size, self.sync)
            self._dealt = recent = {**dict(kept), key: (dealt, plan.of_documents(dealt))}
        return recent[key]

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; the current epoch keeps its position."""
        epoch = check_integer("epoch", epoch, 0)
        refuse_restart(self, epoch)
        if epoch != self.epoch:
            self.epoch, self._position, self._resume = epoch, 0, 0

    @property
    def position(self) -> tuple[int, int, int]:
        """Epoch, step, and micro-batch of the step, after the last list that was yielded."""
        return self.epoch, *divmod(self._position, self.micro_batches)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last list that was yielded; a loader that prefetches is ahead of what was trained on."""
        return self.state_at(*self.position[1:])

    def state_at(self, step: int, micro_batch: int = 0) -> dict[str, Any]:
        """The state before a micro-batch of the current epoch, as plain values."""
        return self.plan.state(step) | {"micro_batch": int(micro_batch)} | self._arrangement()

    def _arrangement(self) -> dict[str, Any]:
        """The values that determine the micro-batches of a step."""
        return {"world_size": self.world_size, "sync": self.sync, "dealing": DEALING}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, in the next iterator.

        At the beginning of a step the world size may differ: the remaining steps hold the same documents.

        Raises:
            ValueError: the state belongs to other documents, options or another seed, or is inside a step that was
                dealt for another world size or sync.
        """
        with opened(state, "the saved sampler state", *STATE):
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        check_fingerprint(state, self.plan.fingerprint, self.plan.key)
        if state["seed"] != self._options["seed"]:
            raise ValueError(
                f"the saved sampler state has seed {state['seed']!r}, but this sampler has seed"
                f" {self._options['seed']!r}; use the saved seed to continue"
            )
        limits = {"epoch": None, "step": self.steps_per_epoch, "micro_batch": self.plan.packs_per_step}
        epoch, step, micro_batch = (
            check_integer(f"the saved sampler state's {name}", state[name], 0, most)
            for name, most in limits.items()
        )
        mine = self._arrangement()
        saved = {name: state.get(name) for name in mine}
        # Earlier versions could be given more effort, which deals a step differently.
        if micro_batch and (saved != mine or state.get("effort", 1) != 1):
            raise ValueError(
                f"the saved position is inside step {step}, after {micro_batch} micro-batches assigned to ranks with"
                f" {saved} (now {mine}); continue with those, or from the beginning of a step"
            )
        position = step * self.micro_batches + micro_batch
        self._carried[epoch] = check_carried(state["carried"], self._num_documents)
        self.epoch, self._position, self._resume = epoch, position, position
        self._plan, self._dealt = None, {}

    def _steps_of_any_order(self, first: Plan) -> int:
        """Number of steps that suffices in every epoch: the first epoch's, unless only its order fits.

        In one window of all steps, documents need equally many packs in every order. If the first epoch's
        steps are too few for these, steps for the packs of first fit, the planner's fallback, suffice.
        """
        steps, limit = first.num_steps, first.options.max_documents or None
        packs = len(pack(first.slots, first.capacity, "first_fit_decreasing", limit))
        enough = -(-packs // first.packs_per_step)
        if steps < enough:
            try:
                self._planned(steps=steps, window=steps)
            except ValueError:
                return enough
        return steps
