"""Packs of a run on this rank: the global steps of planned epochs, and evaluations.

    sampler ─ plan ─▶ loader ─▶ EpochFeed ─▶ StepData ─▶ training
                         └────▶ Validation ─▶ losses

Every rank plans the same steps and takes its share, so all ranks end after the same step; stream_feed.py has the steps
of arriving documents. Each source of a mixture is evaluated alone, in packs of its own, one after the other: its loss
needs no losses of single documents, and is exact under every parallel method. The loss of all follows from the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from multipack.data.packs.batch import PackedBatch, check_tokens
from multipack.data.packs.loader import PackedLoader
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import Documents
from multipack.parallel.engine import Engine
from multipack.planning.attention_pairs import AttentionPairs
from multipack.planning.cost import CostModel
from multipack.planning.deal import rank_loads
from multipack.planning.items import ItemSource
from multipack.planning.lengths import Integers
from multipack.planning.options import PlanOptions, Sync
from multipack.planning.packing import Packs
from multipack.planning.plan import Plan, SingleDocuments
from multipack.training.objective import Objective
from multipack.training.run_config import Config


@dataclass(frozen=True)
class StepData:
    """The data of a global step.

    Attributes:
        micro_batches: this rank's packs.
        target_tokens: targets over all ranks.
        denominator: divisor of the step's summed loss, over all ranks.
        documents: (documents,) numbers of the step's documents, of all ranks.
        lengths: (documents,) tokens of each.
        cost_spread: predicted cost of the most loaded rank over the mean, minus 1.
        computed: arguments of `CostModel.flops`: tokens of each document or, where items share tokens, slots
            of each item and their attention.
        packs: packs of all ranks, as document numbers: pack m · ranks + r is rank r's micro-batch m.
        wait_seconds: time that this rank waited for its packs.
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
        ended: whether the documents have ended.
        late: names the documents that arrived too late on a rank and so ended the steps; empty if none did.
    """

    micro_batches: int
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
    """Iterates global steps epoch after epoch, without end; its state is the sampler's. See `Feed`.

    `clock` returns seconds.
    """

    ended = False
    late = ""

    def __init__(self, loader: PackedLoader, documents: Documents, clock: Callable[[], float]) -> None:
        self.loader, self.sampler = loader, loader.sampler
        self.micro_batches = self.sampler.micro_batches
        self.name = documents.name
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self.close = loader.close
        self._clock = clock

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch."""
        return self.sampler.plan

    @property
    def ending(self) -> dict[str, Any]:
        """No entries: epochs do not end."""
        return {}

    def interrupt(self) -> None:
        """No effect: all documents are present."""

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
            cost_spread=cost_spread(plan.costs(dealt.order), dealt, sampler.world_size, sampler.sync),
            computed=(plan.lengths[documents] if attention is None else slots, attention),
            packs=sampler.documents_of(index),
            wait_seconds=self._clock() - began,
            index=index,
            plan=plan,
        )


def cost_spread(costs: Integers, dealt: Packs, ranks: int, sync: Sync) -> float:
    """`StepData.cost_spread` of a step, from the cost of each item of `dealt.order`."""
    packs = Packs(np.arange(len(costs)), dealt.offsets)
    loads = rank_loads(packs.totals(costs), ranks, sync)
    return float(loads.max(axis=1).sum() / max(loads.mean(axis=1).sum(), 1.0) - 1.0)


class PackLoaders:
    """Makes samplers and loaders with the settings of a run.

    Args:
        config: the settings, resolved.
        objective: provides the corpus and the collator.
        engine: evaluates, and has the mesh of ranks.
        cost_model: cost of documents, which plans balance.
    """

    def __init__(self, config: Config, objective: Objective, engine: Engine, cost_model: CostModel) -> None:
        self._config, self._objective, self._cost_model = config, objective, cost_model
        self._engine, self._mesh = engine, engine.mesh

    def validation(self, view: Any) -> Validation:
        """The evaluation of the validation documents; `view` is one of `Objective.views`.

        Each source of a mixture is planned alone, so that it has a loss.

        Raises:
            ValueError: there are no validation documents, fewer than ranks, or none with a target.
        """
        corpus, limit = self._objective.corpus, self._config.train.eval_packs
        documents = corpus.validation
        if not len(documents) or not int(documents.target_counts.sum()):
            raise ValueError(
                f"validation has {len(documents)} documents and no target tokens: raise data.validation"
                f" (now {self._config.data.validation}), add documents, or set train.eval_every=0"
            )
        self.check_ranks(documents, "validation")
        parts, first = list[ValidationPart](), 0
        for name, count in corpus.sources or (("", len(documents)),):
            part, numbers = documents.take(range(first, first + count)), range(first, first + count)
            first += count
            if not count or not int(part.target_counts.sum()):
                continue  # it has no loss
            sampler = self.sampler(part, order="given", tail="keep")
            steps, packs = sampler.steps_per_epoch, sampler.plan.packs_per_step
            if limit:  # packs of all sources, divided by tokens
                steps = min(steps, math.ceil(limit * part.num_tokens / documents.num_tokens / packs))
            parts.append(ValidationPart(name, self.loader(Subset(view, numbers), sampler), steps))
        return Validation(self._engine, parts, parts[0].loader.sampler.micro_batches)

    def check_ranks(self, documents: Documents, kind: str) -> None:
        """Raise a ValueError if there are fewer documents than data-parallel ranks."""
        if len(documents) < (ranks := self._mesh.data_size):
            raise ValueError(
                f"there are {len(documents)} {kind} documents for {ranks} data-parallel ranks:"
                " start fewer processes or add documents"
            )

    def sampler(self, documents: Documents, **changes: Any) -> PackedBatchSampler:
        """This rank's packs of documents; `changes` replace options of the planner."""
        config, ranks = self._config, self._mesh.data_size
        options = replace(config.plan.for_ranks(ranks), **changes)
        source = self._items(documents, options)
        return PackedBatchSampler(
            source,
            options=options,
            rank=self._mesh.data_rank,
            world_size=ranks,
            seed=config.train.seed,
            sync=config.parallel.sync,
            cost=self._cost_model,
            loss_weighting=config.train.loss_weighting,
        )

    def _items(self, documents: Documents, options: PlanOptions) -> ItemSource:
        """What the planner places: documents, pairs, or groups of them that share tokens."""
        data = self._config.data
        if data.share_prefixes == "off":
            return SingleDocuments(documents.lengths, options, documents.target_counts, documents.weights)
        from multipack.data.views.shared_prefixes import SharedPrefixes

        window = self._cost_model.window
        return SharedPrefixes.of(
            documents, data.share_prefixes, options, min_prefix=data.min_prefix, window=window
        )

    def loader(self, view: Any, sampler: PackedBatchSampler) -> PackedLoader:
        """The packs of a sampler, collated ahead by this rank, or with `data.readers` by another one."""
        readers, prefetch = self._config.data.readers, self._config.train.prefetch
        collate = checked(self._objective.collator(sampler), self._config.model.vocabulary_size)
        if not readers:
            return PackedLoader(view, sampler, collate, prefetch)
        from multipack.parallel.readers import open_loader

        return open_loader(view, sampler, collate, self._mesh, readers=readers, prefetch=prefetch)


class ValidationPart(NamedTuple):
    """The validation documents of one source.

    Attributes:
        name: name of the source; empty outside of mixtures.
        loader: packs of the documents on this rank.
        steps: global steps of an evaluation.
    """

    name: str
    loader: PackedLoader
    steps: int


class Validation:
    """Evaluates the model of an engine.

    Args:
        engine: the model and the ranks.
        parts: the sources, at least one.
        micro_batches: packs of a rank in a step.

    Attributes:
        steps: global steps of an evaluation, of all sources.
    """

    def __init__(self, engine: Engine, parts: list[ValidationPart], micro_batches: int) -> None:
        self._engine, self._parts, self._micro_batches = engine, parts, micro_batches
        self.steps = sum(part.steps for part in parts)

    def losses(self) -> dict[str, float]:
        """Mean losses over all ranks, weighted as the training loss; collective.

        Returns:
            The loss of all documents under "", and in a mixture of each source under "/NAME".
        """
        totals = [self._sums(part) for part in self._parts]
        loss, denominator = (sum(column) for column in zip(*totals, strict=True))
        losses = {"": loss / (denominator or 1.0)}
        for part, (own, share) in zip(self._parts, totals, strict=True):
            if part.name:
                losses[f"/{part.name}"] = own / (share or 1.0)
        return losses

    def _sums(self, part: ValidationPart) -> list[float]:
        """Summed loss of a source and its denominator, over all ranks; collective."""
        loss, denominator = 0.0, 0.0
        batches = iter(part.loader)
        for _ in range(part.steps):
            micro_batches = list(islice(batches, self._micro_batches))
            loss += sum(self._engine.evaluate(micro_batches))
            if self._engine.mesh.is_replica_leader:
                denominator += sum(batch.denominator for batch in micro_batches)
        part.loader.close()
        return self._engine.world.sum([loss, denominator])

    def close(self) -> None:
        """Stop the threads that collate packs."""
        for part in self._parts:
            part.loader.close()
