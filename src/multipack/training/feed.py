"""Global steps, epoch after epoch, as this rank sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multipack.data.batch import PackedBatch
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.sampler import PackedBatchSampler
from multipack.planning.cost import CostModel
from multipack.planning.deal import meetings
from multipack.planning.options import Sync
from multipack.planning.packing import Packs
from multipack.planning.plan import Plan
from multipack.planning.report import predicted_seconds


@dataclass(frozen=True)
class StepData:
    """What a global step needs.

    Attributes:
        micro_batches: this rank's packs.
        target_tokens: the step's targets over all ranks.
        denominator: what the step's summed loss is divided by, over all ranks.
        documents: document numbers of the step, all ranks.
        lengths: their tokens.
        cost_spread: dearest rank's predicted cost over the mean, minus 1.
        predicted_seconds: forward and backward passes of the dearest rank, as the cost predicts them; None where the
            cost was not fitted to measured times.
        packs: of all ranks, as document numbers: pack m · ranks + r is rank r's micro-batch m.
        wait_seconds: how long the packs were waited for.
        epoch: counted from 0.
        index: the step's number within its epoch's plan, from 0.
    """

    micro_batches: list[PackedBatch]
    target_tokens: int
    denominator: int
    documents: NDArray[np.int64]
    lengths: NDArray[np.int64]
    cost_spread: float
    predicted_seconds: float | None
    packs: Packs
    wait_seconds: float
    epoch: int
    index: int


class Steps(Protocol):
    """Where a run's global steps come from: an epoch's plan again and again, or documents that arrive."""

    micro_batches: int
    """Packs of a rank in a step."""
    ended: bool
    """Whether there is no further step."""
    late: str
    """What did not come in time, where that ended the steps; empty otherwise."""

    @property
    def plan(self) -> Plan | None:
        """The plan of the current epoch; None where documents arrive, and are planned as they come."""
        ...

    @property
    def targets_per_step(self) -> float:
        """Mean target tokens of a global step, from what is known when a run begins."""
        ...

    def __iter__(self) -> Iterator[StepData]: ...

    def names(self, number: int) -> str:
        """The name of a document, for people."""
        ...

    def interrupt(self) -> None:
        """Wait for documents no more."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps that were handed out."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`."""
        ...

    def close(self) -> None:
        """Stop prefetching."""
        ...


class Feed:
    """Iterates global steps without end, epoch after epoch; its state is the sampler's.

    Args:
        loader: batches of this rank, in the sampler's order.
        sampler: the plan of the current epoch, dealt to this rank.
        documents: names of documents, for people.
        clock: seconds.
    """

    ended = False
    late = ""

    def __init__(
        self,
        loader: PackedLoader,
        sampler: PackedBatchSampler,
        documents: Documents,
        clock: Callable[[], float],
    ) -> None:
        self.loader = loader
        self.sampler = sampler
        self.micro_batches = sampler.micro_batches
        self.names = documents.names
        self.targets_per_step = float(documents.target_counts.sum()) / sampler.steps_per_epoch
        self._clock = clock

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch."""
        return self.sampler.plan

    def interrupt(self) -> None:
        """Nothing is waited for: all documents are there."""

    def __iter__(self) -> Iterator[StepData]:
        while True:
            began = self._clock()  # planning an epoch is part of its first step's wait
            epoch = self.sampler.epoch
            step = int(self.sampler.state_dict()["step"])
            batches = iter(self.loader)
            for index in range(step, self.sampler.steps_per_epoch):
                yield self._take(batches, epoch, index, began)
                began = self._clock()
            self.sampler.set_epoch(epoch + 1)

    def _take(self, batches: Iterator[PackedBatch], epoch: int, index: int, began: float) -> StepData:
        micro_batches = [next(batches) for _ in range(self.sampler.micro_batches)]
        plan = self.sampler.plan
        documents, dealt = plan.documents(index), self.sampler.deal_of(index)
        return StepData(
            micro_batches=micro_batches,
            target_tokens=plan.targets(index),
            denominator=plan.denominator(index),
            documents=documents,
            lengths=plan.lengths[documents],
            cost_spread=cost_spread(
                plan.cost_model, plan.slots, dealt, self.sampler.world_size, self.sampler.sync
            ),
            predicted_seconds=predicted_seconds(
                plan.cost_model, plan.slots, dealt, self.sampler.world_size, self.sampler.sync
            ),
            packs=dealt,
            wait_seconds=self._clock() - began,
            epoch=epoch,
            index=index,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps that were handed out."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Stop prefetching."""
        self.loader.close()


def cost_spread(
    cost_model: CostModel, slots: NDArray[np.int64], dealt: Packs, ranks: int, sync: Sync
) -> float:
    """Dearest rank's predicted cost over the mean rank's, minus 1; arguments as of `predicted_seconds`."""
    costs = cost_model.cost(slots[dealt.order])  # of this step's documents only
    packs = Packs(np.arange(len(dealt.order)), dealt.offsets)
    loads = meetings(packs.totals(costs), ranks, sync)
    return float(loads.max(axis=1).sum() / max(loads.mean(axis=1).sum(), 1.0) - 1.0)
