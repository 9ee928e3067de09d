"""Trained weights of a run, a checkpoint, an export or any other Hugging Face folder.

    RUN                     its latest checkpoint, or its best
    RUN/checkpoints/step-…  that checkpoint
    FOLDER                  config.json and safetensors, as `multipack export` and save_pretrained write them

Used by `train.init_from=PATH`, `multipack export` and `multipack generate`. Each tensor is read when it is used, so
that no rank of a sharded model holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from torch import Tensor

from multipack.data.text.tokenizer import Tokenizer
from multipack.hub import hub_name, model_folder
from multipack.models.decoder import Decoder
from multipack.models.foreign import foreign_shape, open_foreign
from multipack.models.huggingface import parameter_shapes
from multipack.models.peft_format import from_peft, peft_base, peft_shape
from multipack.models.pretrained import open_weights
from multipack.ops.lora import merged, quantizable, quantize
from multipack.parallel.world import World
from multipack.reports.console import Detail
from multipack.run import find_run, is_export, is_peft, weights_folder
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.training.checkpoint import load_checkpoint
from multipack.training.frozen_files import check_base
from multipack.training.run_config import saved_adapter, trained_shape
from multipack.words import read_yaml

Weights = Literal["latest", "best"]
"""Weights of a run: the newest, or the best (lowest validation loss)."""
Reader = Callable[[str], Tensor]
"""Name of a parameter of the decoder → its value, which is read at each call."""


@dataclass(frozen=True)
class TrainedAdapter:
    """A trained adapter.

    Attributes:
        read: name of a trained parameter, one of `names` → its value.
        quantized: names of the frozen parameters that were quantized while it was trained.
        alphas: matrix → its alpha, where it differs from `config.alpha`; only in adapters of peft.
    """

    config: AdapterConfig
    read: Reader
    names: frozenset[str]
    quantized: frozenset[str] = frozenset()
    alphas: Mapping[str, float] = field(default_factory=dict)

    def merged_into(self, frozen: Reader) -> Reader:
        """A function that reads parameters of the model with this adapter; `frozen` reads them without it."""

        def value(name: str) -> Tensor:
            if name in self.names:
                return self.read(name)
            module, weight = name.removesuffix(".weight"), frozen(name)
            if name in self.quantized:
                # The adapters were trained with quantized weights: the original ones would give other outputs.
                weight = quantize(weight, self.config).to(torch.float32).view(weight.shape)
            if name == module or f"{module}.lora_a" not in self.names:
                return weight
            a, b = self.read(f"{module}.lora_a"), self.read(f"{module}.lora_b")
            magnitude = self.read(f"{module}.magnitude") if f"{module}.magnitude" in self.names else None
            scale = self.config.scale_of(len(a), self.alphas.get(module, self.config.alpha))
            return merged(weight, a, b, magnitude, scale)

        return value


@dataclass(frozen=True)
class TrainedWeights:
    """Trained weights with their shape and tokenizer.

    Attributes:
        folder: the checkpoint or Hugging Face folder.
        read: name of a parameter of the decoder → its value, read at each call.
        tokenizer: None = the folder has no tokenizer.json.
        step: number of training steps in its run; None = unknown.
        adapter: the adapter that `read` merges into the weights.
    """

    folder: Path
    shape: ModelShape
    read: Reader
    tokenizer: Tokenizer | None
    step: int | None = None
    adapter: TrainedAdapter | None = None

    def state(self) -> dict[str, Tensor]:
        """All weights by name, in the order of the decoder's parameters."""
        return {name: self.read(name) for name in parameter_shapes(self.shape)}


def find_weights(
    path: Path, weights: Weights = "latest", world: World | None = None, foreign: bool = False
) -> TrainedWeights:
    """Weights from a run, a checkpoint or a Hugging Face folder, which is read as `model=hf:` if `foreign`.

    With `world`, collective: the ranks divide the check of a checkpoint's files.

    Raises:
        FileNotFoundError: there is no run, complete checkpoint or Hugging Face folder at `path`.
        ValueError: files are damaged or do not match each other, or the run does not have these weights.
    """
    if is_export(path):
        if weights != "latest":
            raise ValueError(
                f"{path} is an export, which has no {weights} weights; name the run that it came from"
            )
        tokenizer = Tokenizer.load(path) if (path / "tokenizer.json").is_file() else None
        if is_peft(path):
            base = find_weights(peft_base(path), world=world, foreign=foreign)
            shape = peft_shape(path, base.shape)
            config, tensors, alphas = from_peft(path, shape)
            adapter = TrainedAdapter(config, tensors.__getitem__, frozenset(tensors), alphas=alphas)
            merging = adapter.merged_into(base.read)
            return TrainedWeights(path, shape, merging, tokenizer or base.tokenizer, adapter=adapter)
        if foreign:
            shape = foreign_shape(str(path))
            return TrainedWeights(path, shape, open_foreign(shape), tokenizer)
        shape, readers = open_weights(path)
        return TrainedWeights(path, shape, lambda name: readers[name](), tokenizer)
    folder = weights_folder(path)
    if weights == "best":
        run, named = find_run(path)
        if named is not None:
            raise ValueError(f"{path} is one checkpoint; for the best one of its run name {run.path}")
        folder = run.best_checkpoint()
    checkpoint = load_checkpoint(folder, world, weights_only=True)
    read = partial(checkpoint.source.tensor, "model")
    shape, tokenizer, step = trained_shape(folder), Tokenizer.load(folder), checkpoint.step
    config = saved_adapter(read_yaml(folder / "config.yaml"))
    if config.name == "none":
        return TrainedWeights(folder, shape, read, tokenizer, step)
    try:
        check_base(config, world or World())
        base = find_weights(
            model_folder(config.base, "adapter.base"), world=world, foreign=bool(shape.architecture)
        )
        frozen, _ = adapt_weights(base, shape, tokenizer, "adapter.base")
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"{folder} holds adapters of {config.base}, which cannot be read: {error}"
        ) from error
    with torch.device("meta"):
        quantized = frozenset(quantizable(Decoder(shape), config) if config.quantize != "none" else ())
    adapter = TrainedAdapter(config, read, frozenset(checkpoint.source.shapes("model")), quantized)
    return TrainedWeights(folder, shape, adapter.merged_into(frozen), tokenizer, step, adapter)


def adapt_weights(
    initial: TrainedWeights, shape: ModelShape, tokenizer: Tokenizer, setting: str = "train.init_from"
) -> tuple[Reader, str]:
    """Adapt trained weights to the vocabulary of a run that starts with them.

    New rows of the vocabulary get the mean of the known rows, so that the logit of a new token is neither the largest
    nor far away (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").

    Every token of the initial tokenizer must have the same number in the run's `tokenizer`; `setting` names the
    weights in messages.

    Returns:
        A function that reads a parameter, and a note for the header of the run: a `Detail` if nothing is new.

    Raises:
        ValueError: the shape or the tokenizer differs; the message names the settings.
    """
    _check_same_shape(initial, shape, setting)
    known = _known_rows(initial, tokenizer, setting)
    old = initial.shape.vocabulary_size
    new = torch.arange(shape.vocabulary_size) >= old
    new[[token for token in vocabulary_of(tokenizer).values() if token not in known]] = True
    added = int(new.sum())

    def read(name: str) -> Tensor:
        if name == "score.weight" and not initial.shape.scores:
            return torch.zeros(shape.scores, shape.d_model)
        before = initial.read(name)
        if not added or name not in ("embedding.weight", "head.weight"):
            return before
        rows = before.new_empty(shape.vocabulary_size, before.shape[1])
        rows[:old] = before
        rows[new] = before[sorted(known)].mean(dim=0)
        return rows

    note = f"starts with the weights of {' at '.join(filter(None, hub_name(str(initial.folder))))}"
    if initial.step is not None:
        note += f" (step {initial.step:,})"
    if shape.scores and not initial.shape.scores:
        note += "; the head of scores is new and starts at 0"
    if added:
        note += f"; {added:,} rows of the vocabulary are new and start as the mean of the others"
    has_new = added or (shape.scores and not initial.shape.scores)
    return read, note if has_new else Detail(note)


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Token → number, special tokens included."""
    return tokenizers.Tokenizer.from_str(tokenizer.to_json()).get_vocab()


def _check_same_shape(initial: TrainedWeights, shape: ModelShape, setting: str) -> None:
    ours, theirs = _effective(shape), _effective(initial.shape)
    if not ours["family"] or not theirs["family"]:
        del theirs["family"]  # the shape of words, or of a run of words
    if not initial.shape.scores:  # a reward model starts from a language model
        del theirs["scores"]
    differing = [
        f"model.{name}={value} (there {theirs[name]})"
        for name, value in ours.items()
        if theirs.get(name, value) != value
    ]
    if differing:
        raise ValueError(
            f"{setting}={initial.folder} has another shape: {', '.join(differing)}; omit the settings of model to take"
            " its shape"
        )
    if shape.vocabulary_size < initial.shape.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={shape.vocabulary_size} is smaller than that of {setting}={initial.folder},"
            f" {initial.shape.vocabulary_size}; use 0 to take what is needed"
        )


def _effective(shape: ModelShape) -> dict[str, Any]:
    """The fields of a shape that its weights depend on, with defaults resolved."""
    # Under rotary positions the context only limits generation.
    free = {"dropout", "vocabulary_size", "context" if shape.positions == "rope" else "rope_theta"}
    resolved = {
        "architecture": bool(shape.architecture),
        "head_dim": shape.head_width,
        "window_layers": shape.sliding_layers,
    }
    return {name: value for name, value in (shape.to_dict() | resolved).items() if name not in free}


def _known_rows(initial: TrainedWeights, tokenizer: Tokenizer, setting: str) -> set[int]:
    """Numbers of the tokens of `initial`'s tokenizer; all rows of its vocabulary if it has none."""
    rows = initial.shape.vocabulary_size
    if initial.tokenizer is None:
        if tokenizer.vocabulary_size > rows:
            raise ValueError(
                f"the documents' tokenizer has {tokenizer.vocabulary_size:,} tokens, but {setting}={initial.folder} has"
                f" {rows:,} and no tokenizer.json that says which are new: prepare the documents with the model's own"
                " tokenizer"
            )
        return set(range(rows))
    ours, theirs = vocabulary_of(tokenizer), vocabulary_of(initial.tokenizer)
    moved = [token for token, number in theirs.items() if ours.get(token) != number]
    if moved:
        raise ValueError(
            f"the documents were tokenized by {tokenizer.name} ({tokenizer.vocabulary_size:,} tokens), which lacks or"
            f" renumbers {len(moved):,} tokens of {setting}={initial.folder}, {moved[0]!r} among them: prepare them"
            f" with tokenizer=file tokenizer.path={initial.folder / 'tokenizer.json'}"
        )
    return set(theirs.values())
