"""What a run minimizes: the next token of documents, or preferences between pairs of them. The documents decide.

An objective says which decoder is trained, how its packs are made, and what is told of them; the loop, the engine and
the plan know only that a model takes a batch and returns a summed loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from multipack.data.collate import PackedCollator
from multipack.data.corpus import Corpus
from multipack.data.preference import PreferenceCollator
from multipack.data.sampler import PackedBatchSampler
from multipack.models.decoder import Decoder, DecoderPart
from multipack.models.dpo import PreferenceDecoder, preference_metrics
from multipack.ops.loss import training_loss
from multipack.parallel.engine import ModelEngine
from multipack.shapes import ModelShape
from multipack.training.callbacks.callback import Callback
from multipack.training.preference import PreferenceMetrics, with_reference
from multipack.training.settings import PreferenceConfig

if TYPE_CHECKING:
    from multipack.training.run_config import Config

Collator = PackedCollator | PreferenceCollator


class Objective(ABC):
    """What a run minimizes.

    Args:
        config: of the run.
        corpus: what it trains and validates on.

    Raises:
        ValueError: settings that mean nothing to this objective.
    """

    needs_initial = False
    """Whether a run that resumes still needs the weights that it began with."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Refuse settings that mean nothing to this objective."""

    def settings(self) -> dict[str, Any]:
        """Settings of `TrainConfig` that this objective decides."""
        return {}

    @abstractmethod
    def decoder(self, shape: ModelShape, part: DecoderPart | None = None) -> Decoder:
        """The model to train, or a part of it, its weights drawn from torch's global generator."""

    def views(
        self,
        engine: ModelEngine,
        dtype: torch.dtype,
        capacity: int,
        pad_to: int | None,
        progress: Callable[..., None],
    ) -> tuple[list[Any], list[str]]:
        """Training and validation documents as the collator takes them, and notes; before weights are resumed."""
        return [self.corpus.train, self.corpus.validation], []

    @abstractmethod
    def collator(self, sampler: PackedBatchSampler, pad_to: int | None) -> Collator:
        """Makes a batch of a pack's documents."""

    def callbacks(self, engine: ModelEngine) -> list[Callback]:
        """What this objective adds to a step's record."""
        return []

    def evaluated(self, engine: ModelEngine) -> dict[str, float]:
        """Metrics of the validation packs that were just run, over all ranks."""
        return {}


class NextToken(Objective):
    """Cross-entropy of the target tokens: pre-training and supervised fine-tuning."""

    def check(self) -> None:
        """See `Objective`."""
        if self.config.preference != PreferenceConfig():
            raise ValueError(
                "preference.* is about preference pairs (chosen, rejected), and these documents are none: leave it out"
            )

    def decoder(self, shape: ModelShape, part: DecoderPart | None = None) -> Decoder:
        """See `Objective`."""
        train = self.config.train
        loss = training_loss(train.z_loss, train.label_smoothing)
        return Decoder(shape, attention=self.config.model.attention, training_loss=loss, part=part)

    def collator(self, sampler: PackedBatchSampler, pad_to: int | None) -> Collator:
        """See `Objective`."""
        pad_id, multiple = self.corpus.tokenizer.end_id or 0, self.config.parallel.token_multiple
        return PackedCollator.of(sampler, pad_to, pad_id, multiple)


class Preferences(Objective):
    """Direct preference optimization of pairs (models/dpo.py)."""

    needs_initial = True

    def check(self) -> None:
        """See `Objective`."""
        train, parallel = self.config.train, self.config.parallel
        for name in ("pipeline", "context"):
            if getattr(parallel, name) > 1:
                raise ValueError(
                    f"parallel.{name}={getattr(parallel, name)} divides documents or layers, and the loss of"
                    " preferences needs both answers of a pair at one place: use parallel.data=zero3 or parallel.tensor"
                )
        for name in ("label_smoothing", "z_loss"):
            if getattr(train, name):
                raise ValueError(
                    f"train.{name}={getattr(train, name)} is about the loss of tokens, and these documents are"
                    " preference pairs: leave it out (preference.label_smoothing smooths preferences)"
                )

    def settings(self) -> dict[str, Any]:
        """A pair counts as one, and would be two rows where it is padded."""
        return {"loss_weighting": "document", "compare_padding": False}

    def decoder(self, shape: ModelShape, part: DecoderPart | None = None) -> Decoder:
        """See `Objective`."""
        preference = self.config.preference
        return PreferenceDecoder(
            shape, self.config.model.attention, preference.beta, preference.label_smoothing
        )

    def views(
        self,
        engine: ModelEngine,
        dtype: torch.dtype,
        capacity: int,
        pad_to: int | None,
        progress: Callable[..., None],
    ) -> tuple[list[Any], list[str]]:
        """Pairs with the reference's log-probabilities: of what the run begins with, unless another is named."""
        pairs, notes = with_reference(
            self.config.preference,
            engine,
            [self.corpus.train, self.corpus.validation],
            self.corpus.tokenizer,
            self.corpus.store_path,
            dtype=dtype,
            capacity=capacity,
            pad_to=pad_to,
            multiple=self.config.parallel.token_multiple,
            progress=progress,
        )
        return list(pairs), notes

    def collator(self, sampler: PackedBatchSampler, pad_to: int | None) -> Collator:
        """See `Objective`."""
        pad_id, multiple = self.corpus.tokenizer.end_id or 0, self.config.parallel.token_multiple
        return PreferenceCollator.of(sampler, pad_to, pad_id, multiple)

    def callbacks(self, engine: ModelEngine) -> list[Callback]:
        """Rewards of the step's pairs."""
        return [PreferenceMetrics(_decoder(engine))]

    def evaluated(self, engine: ModelEngine) -> dict[str, float]:
        """Rewards of the validation pairs."""
        return preference_metrics(engine.world.sum(_decoder(engine).take_tally(training=False)), "val_")


def _decoder(engine: ModelEngine) -> PreferenceDecoder:
    """The decoder that the engine runs; ranks that divide it all count its pairs, which means do not notice."""
    (decoder,) = engine.modules
    return cast(PreferenceDecoder, decoder)


def objective_of(config: Config, corpus: Corpus) -> Objective:
    """Preferences where the documents are pairs, the next token where they are not."""
    pairs = corpus.arriving is None and corpus.train.store.has_pairs
    return (Preferences if pairs else NextToken)(config, corpus)
