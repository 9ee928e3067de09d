"""Names and weights of a decoder, to and from Hugging Face's models.

The families are in shapes/families.py. GPT-2 stores matrices as (in, out), the transpose of the others. All families
rotate the two halves of a head, so rows keep their order. pretrained.py reads folders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multipack.models.decoder import Decoder
from multipack.models.foreign import LANGUAGE, foreign_names
from multipack.shapes import ModelShape, read_json
from multipack.shapes.config_json import family_of, language_config
from multipack.shapes.families import BY_TYPE, ENDS

_SCORE = "score.weight"
"""The head of scores, here and in transformers."""


def to_huggingface(shape: ModelShape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a decoder's parameters to Hugging Face's; biases that only the family has are zeros.

    Args:
        shape: shape of the decoder.
        state: the decoder's parameters by name.

    Returns:
        Hugging Face's tensors by name.

    Raises:
        ValueError: see `family_of`.
    """
    if shape.architecture:
        return {theirs: state[ours] for ours, theirs in foreign_names(shape).items() if ours in state}
    family, converted = family_of(shape), dict[str, Tensor]()
    for theirs, ours, transposed in family.tensors.modules(shape):
        for end in ENDS:
            parts = [state[name + end] for name in ours if name + end in state]
            if parts:
                joined = parts[0] if len(parts) == 1 else torch.cat(parts)
                is_transposed = transposed and end == ".weight"
                converted[theirs + end] = (joined.t() if is_transposed else joined).contiguous()
        weight = converted.get(f"{theirs}.weight")
        if weight is not None and family.always_bias and ours[0] not in ("embedding", "positions", "head"):
            converted.setdefault(f"{theirs}.bias", weight.new_zeros(weight.shape[-1]))
    return converted | ({_SCORE: state[_SCORE]} if _SCORE in state else {})


def modules_of(shape: ModelShape) -> list[tuple[str, tuple[str, ...], bool]]:
    """Hugging Face's module, the decoder's modules, and whether Hugging Face's matrix is transposed, for all modules.

    Raises:
        ValueError: see `family_of`.
    """
    if not shape.architecture:
        return list(family_of(shape).tensors.modules(shape))
    pairs = [
        (ours.rpartition(".")[0], theirs.rpartition(".")[0]) for ours, theirs in foreign_names(shape).items()
    ]
    return [(theirs, (ours,), False) for ours, theirs in dict.fromkeys(pairs)]


class Origin(NamedTuple):
    """Location of a decoder's parameter: rows (or columns, if transposed) of one of Hugging Face's tensors."""

    name: str
    rows: slice
    transposed: bool

    def of(self, tensor: Any) -> Tensor:
        """The parameter's value, from the tensor or from a lazy slice of a safetensors file."""
        part: Tensor = tensor[:, self.rows].t() if self.transposed else tensor[self.rows]
        return part.contiguous()


def origins(shape: ModelShape) -> dict[str, Origin]:
    """Name → origin of a decoder's parameters, in the order of `parameter_shapes`.

    Raises:
        ValueError: see `family_of`.
    """
    found, sizes = dict[str, Origin](), parameter_shapes(shape)
    for theirs, ours, transposed in family_of(shape).tensors.modules(shape):
        for end in ENDS:
            first = 0
            for name in (name + end for name in ours if name + end in sizes):
                stop = first + sizes[name][0]
                rows = slice(first, stop)
                found[name] = Origin(theirs + end, rows, transposed and end == ".weight")
                first = stop
    if shape.scores:
        found[_SCORE] = Origin(_SCORE, slice(0, shape.scores), False)
    return {name: found[name] for name in sizes}


def parameter_shapes(shape: ModelShape) -> dict[str, torch.Size]:
    """Name → shape of a decoder's parameters, without allocating them.

    Raises:
        ValueError: see `Decoder`.
    """
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(shape).named_parameters()}


def build_decoder(shape: ModelShape, state: Mapping[str, Tensor]) -> Decoder:
    """Build a decoder in evaluation mode whose parameters are these tensors, without a copy.

    Args:
        shape: shape of the decoder.
        state: its parameters by name.

    Raises:
        RuntimeError: names or shapes of the parameters do not match `shape`.
    """
    with torch.device("meta"):
        model = Decoder(shape)
    model.load_state_dict(dict(state), assign=True)
    return model.eval()


def scores_of(config: Mapping[str, Any]) -> int:
    """The number of scores of the model of a config.json, whose default is 2; 0 = it has logits."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    is_classifier = name.endswith("ForSequenceClassification")
    return len(config.get("id2label") or (0, 1)) if is_classifier else 0


def language_name(name: str) -> str:
    """A tensor's name in a model with images → its name in the language model alone; empty if it is not in it."""
    for pattern, prefix in LANGUAGE.items():
        if re.match(pattern, name):
            return re.sub(pattern, prefix, name)
    return name if name.startswith("lm_head.") else ""


def decoder_shape(source: Mapping[str, Any] | Path) -> ModelShape:
    """The shape of the decoder that is equivalent to the model of a config.json.

    Args:
        source: the file's content, or its path.

    Raises:
        ValueError: the family or a setting is not supported; the message names it.
        FileNotFoundError: the file does not exist.
    """
    where = source if isinstance(source, Path) else "config.json"
    config = language_config(read_json(source) if isinstance(source, Path) else source)
    kind = str(config.get("model_type"))
    if kind not in BY_TYPE:
        raise ValueError(
            f"{where}: model_type={kind!r} is not supported; choose one of {', '.join(BY_TYPE)}, or use model=hf:FOLDER"
        )
    try:
        shape = ModelShape.from_huggingface(config)
        shape = replace(shape, scores=scores_of(config))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    problem = f"{shape.unsupported} is not supported by this decoder" if shape.unsupported else ""
    if not problem and shape.window_layers not in (0, shape.layers):
        problem = (
            f"layer_types gives windows to {shape.window_layers} of {shape.layers} layers in no pattern of this"
            " decoder, which has them in all layers, or in all but every n-th"
        )
    if problem:
        raise ValueError(
            f"{where}: {problem}; use model=hf:{Path(where).parent if where is source else 'FOLDER'}"
        )
    return shape
