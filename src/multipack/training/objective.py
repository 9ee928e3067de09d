"""`Objective`: next-token prediction, and what an objective is; `Preferences` is the other one.

An objective defines the decoder, the collator and the metrics. The training loop, the engine and the plan do not depend
on it: they only need a model that takes a batch and returns a summed loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multipack.data.packs.collate import PackedCollator, PreferenceCollator
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.views.corpus import Corpus
from multipack.models.decoder import Decoder, DecoderPart
from multipack.ops.logits import LossOptions
from multipack.parallel.engine import Engine
from multipack.shapes import ModelShape
from multipack.training.checks import check_kind
from multipack.training.run_config import Config


class Objective:
    """Next-token prediction: cross-entropy of the target tokens, for pre-training and supervised fine-tuning.

    Attributes:
        collator_type: its `of` builds the collator of a sampler's packs.
        train_settings: fields of `TrainConfig` that the objective sets.
        fine_tuning_lr: default peak learning rate of a run that starts with trained weights.
        legend: metric → meaning, of the metrics that the objective adds.
        last_line: metrics of the last evaluation, for the run's last line.
        run_files: name → content of additional files for a new run directory; complete after `views` was called.

    Raises:
        ValueError: a setting does not apply to this objective.
    """

    collator_type: type[PackedCollator] | type[PreferenceCollator] = PackedCollator
    train_settings: Mapping[str, Any] = MappingProxyType({})
    fine_tuning_lr = 2e-5
    legend: Mapping[str, str] = MappingProxyType({})
    last_line: tuple[str, ...] = ()

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        self.run_files: dict[str, bytes] = {}
        self.prepare()

    def prepare(self) -> None:
        """Read the settings; raises a ValueError for a setting that does not apply."""
        check_kind(self.config, "documents")

    def shape(self, shape: ModelShape) -> ModelShape:
        """The shape of the model to train, from the shape in the settings; `ValueError` if it has no logits."""
        if shape.scores:
            raise ValueError(
                f"model.scores={shape.scores} is a reward model's, which has no logits: use preference.loss=reward, or"
                " start from the language model"
            )
        return shape

    def decoder(self, shape: ModelShape, part: DecoderPart | None = None) -> Decoder:
        """Build the model to train, or a part of it, with weights drawn from torch's global generator."""
        train = self.config.train
        options = LossOptions(z_loss=train.z_loss, label_smoothing=train.label_smoothing)
        return Decoder(shape, attention=self.config.model.attention, loss_options=options, part=part)

    def views(
        self,
        engine: Engine,
        progress: Callable[..., None],
        resumed: Path | None = None,
    ) -> tuple[list[Any], list[str]]:
        """Prepare training and validation documents for the collator; collective.

        Args:
            engine: engine of the model, which still has its initial weights.
            progress: called with (done, total, unit).
            resumed: the run directory, if the run continues from a checkpoint.

        Returns:
            [training documents, validation documents], and notes for the header of the run.
        """
        return [self.corpus.train, self.corpus.validation], []

    def collator(self, sampler: PackedBatchSampler) -> PackedCollator | PreferenceCollator:
        """Build the collator for a sampler's packs."""
        pad_id, multiple = self.corpus.tokenizer.end_id or 0, self.config.parallel.token_multiple
        return self.collator_type.of(sampler, self.config.pack_slots, pad_id, multiple)

    def metrics(self, engine: Engine, training: bool = True) -> dict[str, float]:
        """Metrics of the last step's packs, or of the last evaluation's, over all ranks; collective."""
        return {}

    def state(self, engine: Engine) -> dict[str, float]:
        """Values of past steps that later steps read, for a checkpoint."""
        return {}

    def load_state(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Continue with the `state` of a checkpoint; `ValueError` if it is damaged."""
