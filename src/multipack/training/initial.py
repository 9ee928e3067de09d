"""Weights that were trained before: of a run, a checkpoint, an export, or any Hugging Face folder.

    RUN                     its latest checkpoint (or its best; or their moving average)
    RUN/checkpoints/step-…  that checkpoint
    FOLDER                  config.json and safetensors, as `multipack export` and save_pretrained write them

A run begins with them by `train.init_from=PATH`; `multipack export` and `multipack generate` read them here, too.
Tensors are read when they are asked for, one at a time: where ranks divide the model none of them holds the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from omegaconf import OmegaConf
from torch import Tensor

from multipack.data.tokenizer import Tokenizer
from multipack.models.families import decoder_shape, parameter_shapes
from multipack.models.pretrained import CONFIG, open_weights, read_config
from multipack.run import find_run, is_export, weights_folder
from multipack.shapes import ModelShape
from multipack.training.checkpoint import Checkpoint, load_checkpoint

Weights = Literal["latest", "best", "ema"]
"""Which weights of a run: its newest, those with the lowest validation loss, or the newest moving average."""
AVERAGE = "average."
"""What the names of averaged weights begin with, among a checkpoint's tensors of observers."""
_FREE = ("dropout", "vocabulary_size", "kv_heads", "head_dim", "window_layers")
"""Fields of a shape that do not decide what weights compute, or that are compared in effect."""


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, each of which is read whenever it is asked for.

    Args:
        readers: what gives each.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class Initial:
    """Weights, and what they belong to.

    Attributes:
        folder: what they were read from: a checkpoint, or a Hugging Face folder.
        shape: of the decoder.
        state: its parameters by our names; a tensor is read when it is asked for, and not kept.
        tokenizer: whose tokens the vocabulary means; None = the folder has no tokenizer.json.
        attention: the backend that its configuration names.
        step: steps that it was trained in its run; None = not known.
    """

    folder: Path
    shape: ModelShape
    state: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    attention: str = "auto"
    step: int | None = None


def initial_shape(path: Path) -> ModelShape:
    """The shape of the decoder at `path`; no weights are read.

    Raises:
        FileNotFoundError, ValueError: see `initial_weights`.
    """
    if is_export(path):
        return decoder_shape(read_config(path), str(path / CONFIG))
    return _saved_model(weights_folder(path))[0]


def initial_weights(path: Path, weights: Weights = "latest") -> Initial:
    """Weights from a run, a checkpoint or a Hugging Face folder.

    Args:
        path: see above.
        weights: which of a run's.

    Raises:
        FileNotFoundError: there is nothing of these at `path`, or no complete checkpoint.
        ValueError: files that are damaged or do not fit together; weights that the run does not have.
    """
    if is_export(path):
        if weights != "latest":
            raise ValueError(
                f"{path} is an export, which has no {weights} weights; name the run that it came from"
            )
        tokenizer = Tokenizer.load(path) if (path / "tokenizer.json").is_file() else None
        shape, readers = open_weights(path)
        return Initial(path, shape, Tensors(readers), tokenizer)
    folder = _checkpoint(path, weights)
    shape, attention = _saved_model(folder)
    checkpoint = load_checkpoint(folder)
    state = _saved(checkpoint, shape, _averages(checkpoint) if weights == "ema" else {})
    return Initial(folder, shape, state, Tokenizer.load(folder), attention, checkpoint.step)


def _saved(checkpoint: Checkpoint, shape: ModelShape, averages: Mapping[str, str]) -> Tensors:
    """The weights of a checkpoint, in the order of a decoder's parameters.

    Args:
        checkpoint: of a run.
        shape: of its decoder.
        averages: names of weights → names of their averages among the tensors of observers, which take their place.
    """
    source = checkpoint.source
    found, means = source.shapes("model"), source.shapes("observers")
    found |= {name: means[own] for name, own in averages.items()}
    shapes = parameter_shapes(shape)
    if shapes != found:
        raise ValueError(f"{checkpoint.path} does not hold the weights of its own config.yaml")
    return Tensors(
        {
            name: partial(source.tensor, "observers", averages[name])
            if name in averages
            else partial(source.tensor, "model", name)
            for name in shapes
        }
    )


def _checkpoint(path: Path, weights: Weights) -> Path:
    """The checkpoint that holds these weights of the run (or is the checkpoint) at `path`."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: give a run, a checkpoint, or a Hugging Face folder")
    run, named = find_run(path)
    if weights != "best":
        return named or run.latest_checkpoint()
    if named is not None:
        raise ValueError(
            f"{path} is one checkpoint; its run has a best one: name {run.path}, or leave best away"
        )
    if not run.best.is_file():
        raise ValueError(
            f"{path} has no best checkpoint: it was not validated (train.eval_every), or was never better than at its"
            " start; take its latest weights"
        )
    return run.checkpoints / run.best.read_text(encoding="utf-8").strip()


def _saved_model(checkpoint: Path) -> tuple[ModelShape, str]:
    """The shape and the attention backend in a checkpoint's config.yaml."""
    file = checkpoint / "config.yaml"
    try:
        values: dict[str, Any] = {str(name): value for name, value in OmegaConf.load(file).model.items()}
        attention = str(values.pop("attention", "auto"))
        return ModelShape(**values), attention
    except (OSError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} does not describe a model: {error}") from error


def _averages(checkpoint: Checkpoint) -> dict[str, str]:
    """Names of trainable weights → names of their moving averages; weights that are frozen have none."""
    names = checkpoint.source.shapes("observers")
    found = {name.removeprefix(AVERAGE): name for name in names if name.startswith(AVERAGE)}
    if not found:
        raise ValueError(
            f"{checkpoint.path} has no moving average of the weights: set train.ema_decay, or take the latest"
        )
    return found


def begin_from(
    initial: Initial, shape: ModelShape, tokenizer: Tokenizer, setting: str = "train.init_from"
) -> tuple[Tensors, str]:
    """The weights that a run of this shape and tokenizer begins with.

    Rows of the vocabulary that `initial` did not know get the mean of those that it knew: a new token is at first like
    all others, so that its logit is neither the largest nor in the way (Hewitt 2021, "Initializing New Word
    Embeddings for Pretrained Language Models").

    Args:
        initial: see `initial_weights`.
        shape: of the run's decoder, with its vocabulary.
        tokenizer: of the run's documents. Every token of the initial tokenizer must have the same number in it.
        setting: that named these weights, for messages.

    Returns:
        The parameters, read one at a time as they are asked for, and one line on what was done.

    Raises:
        ValueError: another shape, or another tokenizer; the message names the settings.
    """
    _check_same_shape(initial, shape, setting)
    if tokenizer.vocabulary_size > shape.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={shape.vocabulary_size} is smaller than the tokenizer's"
            f" {tokenizer.vocabulary_size:,}; use 0 to take what is needed"
        )
    known = _known_rows(initial, tokenizer, setting)
    old = initial.shape.vocabulary_size
    new = torch.ones(shape.vocabulary_size, dtype=torch.bool)
    new[:old] = False
    if initial.tokenizer is not None:
        new[[token for token in vocabulary_of(tokenizer).values() if token not in known]] = True
    state, added = initial.state, int(new.sum())

    def with_new_rows(name: str) -> Tensor:
        before = state[name]
        rows = before.new_empty(shape.vocabulary_size, before.shape[1])
        rows[:old] = before
        rows[new] = before[sorted(known)].mean(dim=0)
        return rows

    readers = {name: partial(state.__getitem__, name) for name in state}
    if added:
        rows_of = [name for name in ("embedding.weight", "head.weight") if name in state]
        readers |= {name: partial(with_new_rows, name) for name in rows_of}
    told = f"begins with the weights of {initial.folder}"
    if initial.step is not None:
        told += f" (step {initial.step:,})"
    return Tensors(readers), told + (
        f"; {added:,} rows of the vocabulary are new and begin as the mean of the others" if added else ""
    )


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Token → number, special tokens included."""
    return tokenizers.Tokenizer.from_str(tokenizer.to_json()).get_vocab()


def fit_vocabulary(shape: ModelShape, tokenizer: Tokenizer) -> ModelShape:
    """The shape with as many rows as it has, or more where the tokenizer has more tokens."""
    return shape.with_vocabulary(max(shape.vocabulary_size, tokenizer.vocabulary_size))


def _check_same_shape(initial: Initial, shape: ModelShape, setting: str) -> None:
    ours, theirs = _in_effect(shape), _in_effect(initial.shape)
    both = [name for name in ours if name in theirs]  # one of context and rope_theta goes with positions
    differing = [
        f"model.{name}={ours[name]} (there {theirs[name]})" for name in both if ours[name] != theirs[name]
    ]
    if differing:
        raise ValueError(
            f"{setting}={initial.folder} has another shape: {', '.join(differing)}; leave the settings of model"
            " away to take its shape"
        )
    if shape.vocabulary_size < initial.shape.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={shape.vocabulary_size} is smaller than that of {setting}={initial.folder},"
            f" {initial.shape.vocabulary_size}; use 0 to take what is needed"
        )


def _in_effect(shape: ModelShape) -> dict[str, Any]:
    """What decides how a shape's weights compute."""
    values = {name: value for name, value in shape.to_dict().items() if name not in _FREE}
    if shape.positions == "rope":
        del values["context"]  # a limit of generation, and no weight's
    else:
        del values["rope_theta"]
    return {
        **values,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "window_layers": shape.sliding_layers,
    }


def _known_rows(initial: Initial, tokenizer: Tokenizer, setting: str) -> set[int]:
    """Numbers of the tokens that `initial` was trained with; all rows where it has no tokenizer."""
    if initial.tokenizer is None:
        if tokenizer.vocabulary_size > initial.shape.vocabulary_size:
            raise ValueError(
                f"the documents' tokenizer has {tokenizer.vocabulary_size:,} tokens, but {setting}="
                f"{initial.folder} has {initial.shape.vocabulary_size:,} and no tokenizer.json that could say which"
                " are new: prepare the documents with the model's own tokenizer"
            )
        return set(range(initial.shape.vocabulary_size))
    theirs = vocabulary_of(initial.tokenizer)
    if tokenizer.hash != initial.tokenizer.hash:
        ours = vocabulary_of(tokenizer)
        moved = [token for token, number in theirs.items() if ours.get(token) != number]
        if moved:
            raise ValueError(
                f"the documents were tokenized by {tokenizer.name} ({tokenizer.vocabulary_size:,} tokens, hash"
                f" {tokenizer.hash[:12]}), which lacks or renumbers {len(moved):,} tokens of {setting}="
                f"{initial.folder} ({initial.tokenizer.vocabulary_size:,} tokens, hash"
                f" {initial.tokenizer.hash[:12]}), {moved[0]!r} among them: prepare them with tokenizer=file"
                f" tokenizer.path={initial.folder / 'tokenizer.json'}"
            )
    return set(theirs.values())
