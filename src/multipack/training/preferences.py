"""`Preferences`: the objective on pairs of documents and labeled answers, and the values of its reference model.

reference model ─ packed, without gradients ─▶ log-probabilities (items, 2) ─▶ PreferencePairs
                                                     └─▶ RUN/reference.safetensors, which a resumed run reads
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import nn

from multipack.atomic import read_file
from multipack.data.packs.collate import PreferenceCollator, PreferencePairs
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.data.text.skipped import counted
from multipack.data.views.documents import Documents
from multipack.hub import model_folder
from multipack.models.decoder import Decoder, DecoderPart
from multipack.models.objectives import check_options, find_loss
from multipack.models.preference import PreferenceDecoder
from multipack.parallel.engine import Engine
from multipack.parallel.mesh import Mesh
from multipack.reports.console import Detail
from multipack.shapes import ModelShape
from multipack.training.checks import check_kind
from multipack.training.objective import Objective
from multipack.training.weights import adapt_weights, find_weights

Values = NDArray[np.float64]

REFERENCE = "reference.safetensors"
"""File of a run directory with the reference's values: `train` and `validation`, each (items, 2)."""
_MOST_BYTES = 1 << 36  # of that file


class Preferences(Objective):
    """Preference optimization; see models/preference.py. An item of two documents counts as one document.

    Attributes:
        loss: the row of models/objectives that `preference.loss` names.
    """

    collator_type = PreferenceCollator
    # A padded batch has a row per document, and a pair needs both of its documents in one.
    train_settings = MappingProxyType({"loss_weighting": "document"})
    fine_tuning_lr = 1e-6
    last_line = ("reward_accuracy", "reward_margin")

    def prepare(self) -> None:
        """See `Objective`."""
        preference = self.config.preference
        self.loss = find_loss(preference.loss, self.corpus.train.store.kind)
        check_options(self.loss, preference.changed(), preference.reference)
        check_kind(self.config, self.corpus.train.store.kind, self.loss.reads_values)
        self.legend = {**self.loss.legend, "reward_margin": "mean difference of both rewards"}
        if self.loss.reads_values:
            self.train_settings = MappingProxyType({**self.train_settings, "sample_tokens": 0})

    def shape(self, shape: ModelShape) -> ModelShape:
        """See `Objective`."""
        if not self.loss.reads_values:
            return super().shape(shape)
        if shape.architecture:
            raise ValueError(
                f"preference.loss={self.loss.name} needs a decoder of this package, and model=hf: is transformers':"
                " omit model= to start from a folder of a family that it computes"
            )
        return replace(shape, scores=1)

    def decoder(self, shape: ModelShape, part: DecoderPart | None = None) -> Decoder:
        """See `Objective`."""
        values = self.config.preference.options()
        options = {name: values[name] for name in self.loss.options}
        return PreferenceDecoder(shape, self.config.model.attention, self.loss.name, **options)

    def views(
        self,
        engine: Engine,
        progress: Callable[..., None],
        resumed: Path | None = None,
    ) -> tuple[list[Any], list[str]]:
        """Pairs with log-probabilities of the reference model: the initial weights, or `preference.reference`.

        A new run keeps them in its directory, so that a resumed one needs no reference model.

        Raises:
            ValueError: a document is not a pair, the reference has another tokenizer, its values are not finite, or
                they are missing in a resumed run.
        """
        documents = {"train": self.corpus.train, "validation": self.corpus.validation}
        notes: list[str] = []
        if not self.loss.uses_reference:
            return [PreferencePairs(view) for view in documents.values()], notes
        if resumed is not None:
            values = read_reference(resumed / REFERENCE, documents)
        else:
            with self._reference_model(engine) as (model, mesh):
                values = {
                    name: self.reference_values(model, view, mesh, progress)
                    for name, view in documents.items()
                }
            count = sum(map(len, values.values()))
            notes.append(Detail(f"reference log-probabilities of {counted(count, 'pairs')} computed"))
            self.run_files = {REFERENCE: save(values)}
        return [PreferencePairs(view, values[name]) for name, view in documents.items()], notes

    def reference_values(
        self, model: nn.Module, documents: Documents, mesh: Mesh, progress: Callable[..., None]
    ) -> Values:
        """Compute log-probabilities of pairs under a reference model; collective, ranks divide the packs.

        Args:
            model: the reference, a `PreferenceDecoder` in evaluation mode.
            documents: the pairs.
            mesh: the ranks.
            progress: called with (done, total, unit).

        Returns:
            (items, 2) float64 log-probabilities of both answers of an item, such as the chosen and the
            rejected one, summed over their targets.

        Raises:
            ValueError: a document is not a pair, or a value is not finite.
        """
        values = np.zeros((len(documents), 2))
        if not len(documents):
            return values
        sampler = PackedBatchSampler(
            documents.lengths,
            capacity=self.config.document_limit,
            packs_per_step=mesh.data_size,
            targets=documents.target_counts,
            rank=mesh.data_rank,
            world_size=mesh.data_size,
            order="given",
        )
        pairs, collate = PreferencePairs(documents), cast(PreferenceCollator, self.collator(sampler))
        done = 0
        for numbers in sampler:
            batch = collate([pairs[number] for number in numbers])
            # A rank without pairs runs a pack of padding, because sharded models are collective.
            log_probabilities = model(batch.to(mesh.world.device))
            if numbers and mesh.is_replica_leader:
                values[numbers] = log_probabilities.cpu().numpy()
            done += len(numbers)
            progress(done, -(-len(documents) // mesh.data_size), "pairs of the reference")
        # A row is zero on every rank that did not compute it.
        values = np.array(mesh.world.sum(values.ravel().tolist())).reshape(-1, 2)
        if not np.isfinite(values).all():
            first = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise ValueError(
                f"the reference model gives {documents.name(first)} the log-probabilities {values[first].tolist()}:"
                " look at its weights (preference.reference, train.init_from)"
            )
        return values

    @contextmanager
    def _reference_model(self, engine: Engine) -> Iterator[tuple[nn.Module, Mesh]]:
        """Context of the reference model, in evaluation mode and the run's precision, and of its mesh."""
        setting, tokenizer = self.config.preference.reference, self.corpus.tokenizer
        if not setting:
            with engine.evaluating() as trained:
                yield trained, engine.mesh
            return
        # Every rank holds this model whole; its shape may differ from the trained model's.
        initial = find_weights(model_folder(setting, "preference.reference"), world=engine.world)
        self.shape(initial.shape)
        size = max(initial.shape.vocabulary_size, tokenizer.vocabulary_size)
        shape, device, dtype = initial.shape.with_vocabulary(size), engine.world.device, engine.dtype
        read, _ = adapt_weights(initial, shape, tokenizer, "preference.reference")
        with torch.device("meta"):
            model = PreferenceDecoder(shape)
        # Autocast computes linear layers in this dtype: weights held in it take half the memory, with equal results.
        linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for name, _ in model.named_parameters():
            value = read(name)
            cast = value.to(dtype) if name.rpartition(".")[0] in linear else value
            model.load_state_dict({name: cast}, assign=True, strict=False)
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            yield model.eval().to(device), Mesh.plain(engine.world)

    def metrics(self, engine: Engine, training: bool = True) -> dict[str, float]:
        """Means over items. Ranks of a model replica count the same items, which keeps the means."""
        model = cast(PreferenceDecoder, engine.model)
        found = self.loss.means(engine.world.sum(model.take_tally(training)), "" if training else "val_")
        model.last.update({name: found[name] for name in model.last if name in found})
        return found

    def state(self, engine: Engine) -> dict[str, float]:
        """See `Objective`."""
        return dict(cast(PreferenceDecoder, engine.model).last)

    def load_state(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """See `Objective`."""
        last = cast(PreferenceDecoder, engine.model).last
        for name in last:
            value = state.get(name)
            if not isinstance(value, float) or not math.isfinite(value):
                raise ValueError(
                    f"the checkpoint's progress.objective.{name} is {value!r}, not a finite number: resume from another"
                    " checkpoint"
                )
            last[name] = value


def read_reference(file: Path, documents: Mapping[str, Documents]) -> dict[str, Values]:
    """Read the reference values of each set of documents.

    Raises:
        ValueError: the file is missing or damaged, or has another number of pairs.
    """
    try:
        found: dict[str, Values] = load(read_file(file, _MOST_BYTES))
        for name, view in documents.items():
            if found[name].shape != (len(view), 2) or not np.isfinite(found[name]).all():
                raise ValueError(f"{name} is {found[name].shape} for {len(view)} pairs, or not finite")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{file}, the reference model's log-probabilities of this run's pairs, cannot be read ({reason}): restore"
            " it, or start a new run with another out="
        ) from error
    return found
