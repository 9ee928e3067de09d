"""Global steps as this rank sees them, of a planned epoch; stream_feed.py has those of arriving documents.

    sampler ─ plan ─▶ loader ─▶ EpochFeed ─▶ StepData ─▶ training

Every rank plans the same steps and takes its share, so all ranks end after the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multipack.data.packs.batch import PackedBatch, check_tokens
from multipack.data.packs.loader import PackedLoader
from multipack.data.views.documents import Documents
from multipack.planning.attention_pairs import AttentionOf, AttentionPairs, each_alone
from multipack.planning.cost import CostModel
from multipack.planning.deal import rank_loads
from multipack.planning.options import Sync
from multipack.planning.packing import Packs
from multipack.planning.plan import Plan


@dataclass(frozen=True)
class StepData:
    """The data of a global step.

    Attributes:
        micro_batches: this rank's packs.
        target_tokens: targets over all ranks.
        denominator: divisor of the step's summed loss, over all ranks.
        documents: document numbers of all ranks.
        lengths: tokens of each of these documents.
        cost_spread: predicted cost of the most loaded rank over the mean, minus 1.
        computed: computed slots, and their attention, for `CostModel.flops`.
        packs: packs of all ranks, as document numbers: pack m · ranks + r is rank r's micro-batch m.
        wait_seconds: time spent waiting for the packs.
        index: index of the step in its epoch's plan, from 0.
        plan: plan of the epoch; None for a stream.
    """

    micro_batches: list[PackedBatch]
    target_tokens: int
    denominator: float
    documents: NDArray[np.int64]
    lengths: NDArray[np.int64]
    cost_spread: float
    computed: tuple[NDArray[np.int64], AttentionPairs | None]
    packs: Packs
    wait_seconds: float
    index: int
    plan: Plan | None = None


def checked(
    collate: Callable[[Sequence[Any]], PackedBatch], vocabulary_size: int
) -> Callable[[Sequence[Any]], PackedBatch]:
    """`collate`, which raises a ValueError on the host for tokens outside the vocabulary."""

    def collate_checked(documents: Sequence[Any]) -> PackedBatch:
        batch = collate(documents)
        check_tokens(batch.input_ids, vocabulary_size)
        return batch

    return collate_checked


class Feed(Protocol):
    """Iterates global steps: of a plan (`EpochFeed`), or of documents that arrive (`stream_feed.py`).

    Attributes:
        micro_batches: packs per rank and step.
        targets_per_step: mean target tokens of a global step.
        ended: whether the documents have ended.
        late: names the documents that arrived too late on a rank and so ended the steps; empty if none did.
    """

    micro_batches: int
    targets_per_step: float
    ended: bool
    late: str

    @property
    def plan(self) -> Plan | None:
        """The plan of the current epoch; None for a stream."""

    @property
    def ending(self) -> dict[str, Any]:
        """Entries for the record of the end of the run."""

    def __iter__(self) -> Iterator[StepData]: ...

    def name(self, number: int, /) -> str:
        """The name of a document, for messages."""

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step, as plain values; equal on every rank."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue at `state`, with any number of ranks; `ValueError` if it is of other documents."""

    def interrupt(self) -> None:
        """Stop waiting for documents."""

    def close(self) -> None:
        """Stop waiting and collating ahead."""


class EpochFeed:
    """Iterates global steps epoch after epoch, without end; its state is the sampler's. See `Feed`."""

    ended = False
    late = ""
    ending: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, loader: PackedLoader, documents: Documents, clock: Callable[[], float]) -> None:
        self.loader, self.sampler = loader, loader.sampler
        self.micro_batches = self.sampler.micro_batches
        self.name = documents.name
        self.targets_per_step = float(documents.target_counts.sum()) / self.sampler.steps_per_epoch
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
            epoch, step, _ = self.sampler.position
            batches = iter(self.loader)
            for index in range(step, self.sampler.steps_per_epoch):
                yield self._take(batches, index, began)
                began = self._clock()
            self.sampler.set_epoch(epoch + 1)

    def _take(self, batches: Iterator[PackedBatch], index: int, began: float) -> StepData:
        sampler, plan = self.sampler, self.sampler.plan
        micro_batches = [next(batches) for _ in range(sampler.micro_batches)]
        documents, dealt = plan.documents(index), sampler.deal_of(index)
        slots, attention = plan.slots[dealt.order], plan.items.attention(dealt.order)
        return StepData(
            micro_batches=micro_batches,
            target_tokens=plan.targets(index),
            denominator=plan.denominator(index),
            documents=documents,
            lengths=plan.lengths[documents],
            cost_spread=cost_spread(
                plan.cost_model, plan.slots, dealt, sampler.world_size, sampler.sync, plan.items.attention
            ),
            computed=(plan.lengths[documents] if attention is None else slots, attention),
            packs=sampler.documents_of(index),
            wait_seconds=self._clock() - began,
            index=index,
            plan=plan,
        )


def cost_spread(
    cost_model: CostModel,
    slots: NDArray[np.int64],
    dealt: Packs,
    ranks: int,
    sync: Sync,
    attention: AttentionOf = each_alone,
) -> float:
    """`cost_spread` of a step of `dealt` packs, for (all items,) slots and the attention of items."""
    costs = cost_model.cost(slots[dealt.order], attention(dealt.order))  # of this step's items only
    packs = Packs(np.arange(len(dealt.order)), dealt.offsets)
    loads = rank_loads(packs.totals(costs), ranks, sync)
    return float(loads.max(axis=1).sum() / max(loads.mean(axis=1).sum(), 1.0) - 1.0)
