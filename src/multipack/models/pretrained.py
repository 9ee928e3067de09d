"""Weights and shape from a Hugging Face folder: config.json and safetensors.

Names, shapes and dtypes are checked against config.json before any tensor is read; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from multipack.models.huggingface import (
    Origin,
    decoder_shape,
    language_name,
    origins,
    parameter_shapes,
    to_huggingface,
)
from multipack.shapes import ModelShape, read_json
from multipack.shapes.config_json import family_of

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
"""File names in a Hugging Face folder."""
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_weights(folder: Path) -> tuple[ModelShape, dict[str, Callable[[], Tensor]]]:
    """Shape and weights of a Hugging Face folder: config.json and one or several safetensors files.

    Args:
        folder: as written by `save_pretrained` or `multipack export`.

    Returns:
        The decoder's shape, and name → function that reads the value in float32, of its parameters in their order.

    Raises:
        ValueError: an unsupported model; weights that are pickled, missing, of other shapes or not floating point; a
            damaged file. The message names the file and the tensors.
        FileNotFoundError: there is no config.json.
    """
    shape = decoder_shape(folder / CONFIG)
    tensors = family_of(shape).tensors
    with ExitStack() as stack:
        try:
            files = {file: stack.enter_context(safe_open(file, "pt")) for file in weight_files(folder)}
            held = {
                tensors.full_name(own): (file, name)
                for file, opened in files.items()
                for name, own in _names(opened, folder)
                if not tensors.ignored.fullmatch(own)
            }
            slices = {name: files[file].get_slice(own) for name, (file, own) in held.items()}
            _check_tensors(shape, folder, slices)
            embedding = f"{tensors.prefix}{next(iter(tensors.outer))}.weight"
            if shape.tied and "lm_head.weight" in held:
                (one, head), (other, table) = held["lm_head.weight"], held[embedding]
                if not torch.equal(files[one].get_tensor(head), files[other].get_tensor(table)):
                    raise ValueError(
                        f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from {embedding}: set it to"
                        " false"
                    )
        except (SafetensorError, OSError) as error:
            raise _damaged(folder, error) from error

    def read(origin: Origin) -> Tensor:
        file, own = held[origin.name]
        try:
            with safe_open(file, "pt") as opened:
                return origin.of(opened.get_slice(own)).to(torch.float32)
        except (SafetensorError, OSError) as error:
            raise _damaged(folder, error) from error

    return shape, {name: partial(read, origin) for name, origin in origins(shape).items()}


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Hugging Face's name → dtype in the files, of the tensors of a Hugging Face folder.

    Raises:
        ValueError: see `open_weights`.
    """
    tensors, found = family_of(decoder_shape(folder / CONFIG)).tensors, dict[str, torch.dtype]()
    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            for name, own in _names(opened, folder):
                found[tensors.full_name(own)] = _FLOATS.get(opened.get_slice(name).get_dtype(), torch.float32)
    return found


def _names(opened: Any, folder: Path) -> list[tuple[str, str]]:
    """Names of a file's tensors, each with its name in the language model; tensors for images are left out."""
    names = list(opened.keys())
    if not read_json(folder / CONFIG).get("text_config"):
        return [(name, name) for name in names]
    return [(name, own) for name in names if (own := language_name(name))]


def _damaged(folder: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())  # the library's own may have several lines
    return ValueError(f"{folder}: the weights are damaged ({reason}); copy or download them again")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, checked to exist."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
        why = (
            f"{pickled[0]} is a pickle, which can run code when loaded: save the model again with"
            " save_pretrained(…, safe_serialization=True)"
            if pickled
            else f"there is no {WEIGHTS} and no {INDEX}"
        )
        raise ValueError(f"{folder} holds no readable weights: {why}")
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files")
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors") or not (folder / name).is_file():
            raise ValueError(
                f"{folder / INDEX} names {name!r}, which is not a safetensors file in that folder"
            )
    return [folder / name for name in files]


def _check_tensors(shape: ModelShape, folder: Path, held: Mapping[str, Any]) -> None:
    """Check names, shapes and dtypes of the files' tensors against the shape."""
    with torch.device("meta"):
        empty = {name: torch.empty(size) for name, size in parameter_shapes(shape).items()}
    wanted = {name: list(tensor.shape) for name, tensor in to_huggingface(shape, empty).items()}
    found = {name: list(part.get_shape()) for name, part in held.items()}
    if shape.tied and "lm_head.weight" in found:
        wanted["lm_head.weight"] = [shape.vocabulary_size, shape.d_model]
    problems = {
        "lack": sorted(wanted.keys() - found.keys()),
        "have unknown": sorted(found.keys() - wanted.keys()),
        "have other shapes than config.json for": [
            f"{name} {found[name]} instead of {wanted[name]}"
            for name in wanted
            if name in found and found[name] != wanted[name]
        ],
        "are not floating point in": [
            f"{name} ({part.get_dtype()})" for name, part in held.items() if part.get_dtype() not in _FLOATS
        ],
    }
    for problem, names in problems.items():
        if names:
            raise ValueError(f"{folder}: the weights {problem} {', '.join(names[:3])} ({len(names)} in all)")
