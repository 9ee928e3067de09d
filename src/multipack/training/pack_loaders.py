"""`PackLoaders`: samplers and loaders of a run's documents on this rank, for training and for evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.utils.data import Subset

from multipack.data.packs.loader import PackedLoader
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.documents import Documents
from multipack.data.views.shared_prefixes import planned_items
from multipack.parallel.engine import Engine
from multipack.parallel.readers import open_loader
from multipack.planning.cost import CostModel
from multipack.training.feed import checked
from multipack.training.objective import Objective
from multipack.training.run_config import Config
from multipack.training.validation import Validation, ValidationPart


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
        source = planned_items(documents, config.data, options, self._cost_model)
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

    def loader(self, view: Any, sampler: PackedBatchSampler) -> PackedLoader:
        """The packs of a sampler, collated ahead."""
        config = self._config
        return open_loader(
            view,
            sampler,
            checked(self._objective.collator(sampler), config.model.vocabulary_size),
            self._mesh,
            readers=config.data.readers,
            prefetch=config.train.prefetch,
        )
