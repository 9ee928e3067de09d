"""Global steps as this rank sees them, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multipack.data.batch import PackedBatch
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.sampler import PackedBatchSampler
from multipack.planning.cost import CostModel
from multipack.planning.deal import rank_loads
from multipack.planning.options import Sync
from multipack.planning.packing import Packs
from multipack.planning.plan import Plan
from multipack.planning.report import predicted_seconds


@dataclass(frozen=True)
class StepData:
    """The data of a global step.

    Attributes:
        micro_batches: this rank's packs.
        target_tokens: targets over all ranks.
        denominator: what the step's summed loss is divided by, over all ranks.
        documents: document numbers of all ranks.
        lengths: their tokens.
        cost_spread: predicted cost of the most loaded rank over the mean, minus 1.
        predicted_seconds: forward and backward passes of the most loaded rank; None unless the cost was fitted to
            measured times.
        packs: of all ranks, as document numbers: pack m · ranks + r is rank r's micro-batch m.
        wait_seconds: time spent waiting for the packs.
        index: of the step in its epoch's plan, from 0.
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
    index: int


class EpochFeed:
    """Iterates global steps epoch after epoch, without end; its state is the sampler's.

    Args:
        loader: batches of this rank, in the sampler's order.
        sampler: this rank's part of the current epoch's plan.
        documents: for names and targets.
        clock: seconds.

    Attributes:
        micro_batches: packs per rank and step.
        targets_per_step: mean target tokens of a global step.
        names: number of a document → its name, for messages.
        ended: there is no further step; never true here.
        late: the documents that did not arrive in time and ended the steps; never any here.
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
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self.close = loader.close
        self._clock = clock

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch."""
        return self.sampler.plan

    def interrupt(self) -> None:
        """Stop waiting for documents: all of them are present."""

    def __iter__(self) -> Iterator[StepData]:
        while True:
            began = self._clock()  # planning an epoch is part of its first step's wait
            epoch = self.sampler.epoch
            step = int(self.sampler.state_dict()["step"])
            batches = iter(self.loader)
            for index in range(step, self.sampler.steps_per_epoch):
                yield self._take(batches, index, began)
                began = self._clock()
            self.sampler.set_epoch(epoch + 1)

    def _take(self, batches: Iterator[PackedBatch], index: int, began: float) -> StepData:
        sampler, plan = self.sampler, self.sampler.plan
        micro_batches = [next(batches) for _ in range(sampler.micro_batches)]
        documents, dealt = plan.documents(index), sampler.deal_of(index)
        predicted = (plan.cost_model, plan.slots, dealt, sampler.world_size, sampler.sync)
        return StepData(
            micro_batches=micro_batches,
            target_tokens=plan.targets(index),
            denominator=plan.denominator(index),
            documents=documents,
            lengths=plan.lengths[documents],
            cost_spread=cost_spread(*predicted),
            predicted_seconds=predicted_seconds(*predicted),
            packs=dealt,
            wait_seconds=self._clock() - began,
            index=index,
        )


def cost_spread(
    cost_model: CostModel, slots: NDArray[np.int64], dealt: Packs, ranks: int, sync: Sync
) -> float:
    """Predicted cost of the most loaded rank over the mean, minus 1; arguments as of `predicted_seconds`."""
    costs = cost_model.cost(slots[dealt.order])  # of this step's documents only
    packs = Packs(np.arange(len(dealt.order)), dealt.offsets)
    loads = rank_loads(packs.totals(costs), ranks, sync)
    return float(loads.max(axis=1).sum() / max(loads.mean(axis=1).sum(), 1.0) - 1.0)
