"""Adapters in peft's format: adapter_config.json and adapter_model.safetensors, to and from a decoder's names.

blocks.0.attention.query.lora_a      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
blocks.0.attention.query.magnitude   base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector
norm.weight (trained whole)          base_model.model.model.norm.weight
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from multipack.atomic import read_file
from multipack.hub import model_folder
from multipack.models.huggingface import modules_of, parameter_shapes
from multipack.shapes import ModelShape, read_json
from multipack.shapes.adapter import AdapterConfig

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""File names of an adapter."""
_PREFIX = "base_model.model."
_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_MOST_BYTES = 1 << 36
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora"),
        *("use_dora", "base_model_name_or_path", "task_type", "inference_mode", "auto_mapping", "revision"),
        *("exclude_modules", "fan_in_fan_out", "init_lora_weights", "peft_version", "loftq_config"),
        *("runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    }
)
"""Settings of peft that are read, or do not change what a saved adapter computes."""


def to_peft(
    shape: ModelShape, config: AdapterConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of adapter_config.json, and the tensors, of an adapter.

    Args:
        shape: of the decoder.
        config: of the adapter.
        state: what was trained, by name.

    Raises:
        ValueError: peft cannot have this adapter on transformers' model.
    """
    modules, tensors = modules_of(shape), dict[str, Tensor]()
    targets, whole = list[str](), list[str]()
    held: dict[str, list[str]] = {}
    for name in state:
        module, _, own = name.rpartition(".")
        held.setdefault(module, []).append(own)
    for theirs, ours, _ in modules:
        found = [name for name in ours if name in held]
        if not found:
            continue
        if len(ours) > 1:
            raise ValueError(
                f"{theirs} of transformers joins {', '.join(ours)} in one matrix, on which peft has one"
                " adapter: export the whole model with --merge"
            )
        if shape.tied and found == ["embedding"]:
            raise ValueError(
                "adapter.train has the embedding, which is also the head of this model, and peft would train one of"
                " them: export the whole model with --merge"
            )
        (targets if "lora_a" in held[found[0]] else whole).append(theirs)
        for own in held[found[0]]:
            tensors[f"{_PREFIX}{theirs}.{_NAMES.get(own, own)}"] = state[f"{found[0]}.{own}"]
    if shape.scores:
        whole.append("score")
        tensors[f"{_PREFIX}score.weight"] = state["score.weight"]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if shape.scores else "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "use_dora": config.name == "dora",
        "target_modules": targets,
        "modules_to_save": whole or None,
        "bias": "none",
        "fan_in_fan_out": any(transposed for *_, transposed in modules),
        "inference_mode": True,
    }, tensors


def peft_base(folder: Path) -> Path:
    """The folder of the model that an adapter in peft's format belongs to.

    Raises:
        ValueError: adapter_config.json names no folder.
    """
    name = str(read_json(folder / PEFT_CONFIG).get("base_model_name_or_path") or "")
    for path in (Path(name).expanduser(), folder / name):
        if name and path.is_dir():
            return path
    try:
        found = model_folder(name, "base_model_name_or_path")
    except FileNotFoundError as error:
        raise ValueError(f"{folder / PEFT_CONFIG}: {error}") from error
    if found.is_dir():
        return found
    raise ValueError(
        f"{folder / PEFT_CONFIG}: base_model_name_or_path={name!r} is no folder here: download that model, and"
        " write its folder there"
    )


def peft_shape(folder: Path, base: ModelShape) -> ModelShape:
    """The shape of a decoder with an adapter in peft's format: of a base, or with the adapter's head of scores."""
    if read_json(folder / PEFT_CONFIG).get("task_type") != "SEQ_CLS":
        return base
    head = _saved(folder).get(f"{_PREFIX}score.weight")
    return base if head is None else replace(base, scores=len(head))


def _saved(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by peft's names."""
    try:
        return load(read_file(folder / PEFT_WEIGHTS, _MOST_BYTES))
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / PEFT_WEIGHTS} cannot be read ({reason})") from error


def from_peft(folder: Path, shape: ModelShape) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """An adapter in peft's format: its settings, and its tensors by the decoder's names.

    Args:
        folder: has adapter_config.json and adapter_model.safetensors.
        shape: of the decoder, see `peft_shape`.

    Raises:
        ValueError: it is no LoRA or DoRA, has a setting that is not computed here, is damaged, or belongs to another
            model.
    """
    config = _config(folder)
    sizes, found = parameter_shapes(shape), dict[str, Tensor]()
    back = {theirs: (ours, turned) for theirs, ours, turned in modules_of(shape)}
    back |= {"score": (("score",), False)} if shape.scores else {}
    for name, value in _saved(folder).items():
        module, own = _split(name.removeprefix(_PREFIX))
        ours, turned = back.get(module, ((), False))
        if turned and own == "weight":
            value = value.t()
        rows = [sizes[f"{each}.weight"][0] for each in ours if f"{each}.weight" in sizes]
        joined = own != "lora_a" and len(rows) > 1 and sum(rows) == len(value)
        parts = torch.split(value, rows) if joined else [value] * len(rows)
        for each, part in zip(ours, parts, strict=False):
            found[f"{each}.{own}"] = part.to(torch.float32).contiguous()
        if not rows:
            raise ValueError(
                f"{folder}: {name} belongs to no module of the model that base_model_name_or_path names"
            )
    for name, value in found.items():
        module, _, own = name.rpartition(".")
        rows, columns = (*sizes[f"{module}.weight"], 0)[:2]
        adapter = {"lora_a": (config.rank, columns), "lora_b": (rows, config.rank), "magnitude": (rows,)}
        wanted = adapter.get(own) or tuple(sizes.get(name, ()))
        if tuple(value.shape) != wanted:
            raise ValueError(
                f"{folder} is an adapter of another model than base_model_name_or_path names: its {name} is"
                f" {tuple(value.shape)}, and there it is {wanted}"
            )
    return config, found


def _config(folder: Path) -> AdapterConfig:
    """The settings of an adapter in peft's format."""
    file = folder / PEFT_CONFIG
    given = read_json(file)
    if given.get("peft_type") != "LORA":
        raise ValueError(
            f"{file}: peft_type={given.get('peft_type')!r} is not supported; only LORA (and DoRA) is"
        )
    other = [
        name
        for name, value in given.items()
        if value and name not in _READ and (name, value) != ("bias", "none")
    ]
    start = given.get("init_lora_weights", True)
    if isinstance(start, str) and start not in ("gaussian", "orthogonal"):
        other.append("init_lora_weights")  # the others change the base
    if other:
        raise ValueError(
            f"{file}: {other[0]}={given[other[0]]!r} is not computed here; merge the adapter with peft"
        )
    try:
        return AdapterConfig(
            "dora" if given.get("use_dora") else "lora",
            rank=int(given["r"]),
            alpha=float(given["lora_alpha"]),
            dropout=float(given.get("lora_dropout") or 0.0),
            rank_stabilized=bool(given.get("use_rslora")),
            base=str(peft_base(folder)),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} has no r or lora_alpha that is a number ({error})") from error


def _split(name: str) -> tuple[str, str]:
    """The module of transformers, and the parameter of ours, of a tensor of peft's."""
    for own, theirs in _NAMES.items():
        for suffix in (f".{theirs}", f".{theirs}.weight"):
            if name.endswith(suffix):
                return name.removesuffix(suffix), own
    module, _, own = name.rpartition(".")
    return module, own
