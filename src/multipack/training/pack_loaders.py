"""Packs of a run's documents on this rank, for training and for evaluation, and the validation loss.

Each source of a mixture is evaluated alone, in packs of its own, one after the other: its loss needs no losses of
single documents, and is exact under every parallel method. The loss of all follows from the sums.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Subset

from multipack.data.packs.loader import PackedLoader
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import Documents
from multipack.parallel.engine import Engine
from multipack.planning.cost import CostModel
from multipack.planning.items import ItemSource
from multipack.planning.options import PlanOptions
from multipack.planning.plan import SingleDocuments
from multipack.training.feed import checked
from multipack.training.objective import Objective
from multipack.training.run_config import Config


class PackLoaders:
    """Makes samplers and loaders with the settings of a run.

    Args:
        config: the settings, resolved.
        objective: provides the corpus and the collator.
        engine: the model that evaluates.
        cost_model: the cost that plans balance.
    """

    def __init__(self, config: Config, objective: Objective, engine: Engine, cost_model: CostModel) -> None:
        self._config, self._objective, self._cost_model = config, objective, cost_model
        self._engine, self._mesh = engine, engine.mesh

    def validation(self, view: Any) -> Validation:
        """The evaluation of the validation documents; `view` holds them as the objective's collator takes them.

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
            if limit:
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
        """The items of documents, or of preference pairs, by `data.share_prefixes`."""
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
        steps: global steps of an evaluation.
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
