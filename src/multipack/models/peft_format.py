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
from multipack.hub import hub_name, model_folder
from multipack.models.huggingface import modules_of, parameter_shapes
from multipack.models.peft_modules import by_pattern, check_targets
from multipack.shapes import ModelShape, read_json
from multipack.shapes.adapter import AdapterConfig
from multipack.shapes.json_values import flag_of, number_of, real_of

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""File names of an adapter."""
_PREFIX = "base_model.model."
_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_HEAD = "lm_head.weight"
_MOST_BYTES = 1 << 36  # of adapter_model.safetensors
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora"),
        *("use_dora", "base_model_name_or_path", "task_type", "inference_mode", "auto_mapping", "revision"),
        *("exclude_modules", "fan_in_fan_out", "init_lora_weights", "peft_version", "loftq_config"),
        *("runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
        *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"),
    }
)
"""Settings of peft that are read, or do not change what a saved adapter computes."""
_FLAGS = ("use_dora", "use_rslora", "fan_in_fan_out", "inference_mode", "ensure_weight_tying")


def to_peft(
    shape: ModelShape, config: AdapterConfig, state: Mapping[str, Tensor], alphas: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of adapter_config.json, and the tensors, of an adapter.

    Args:
        shape: of the decoder.
        config: of the adapter.
        state: the trained tensors by name.
        alphas: matrix → its alpha, where it differs from `config.alpha`.

    Raises:
        ValueError: peft cannot have this adapter on transformers' model.
    """
    modules, tensors = modules_of(shape), dict[str, Tensor]()
    targets, whole = list[str](), list[str]()
    patterns: dict[str, dict[str, float]] = {"rank_pattern": {}, "alpha_pattern": {}}
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
        if "lora_a" in held[found[0]] and (rank := len(state[f"{found[0]}.lora_a"])) != config.rank:
            patterns["rank_pattern"][theirs] = rank
        if found[0] in alphas:
            patterns["alpha_pattern"][theirs] = alphas[found[0]]
        for own in held[found[0]]:
            tensors[f"{_PREFIX}{theirs}.{_NAMES.get(own, own)}"] = state[f"{found[0]}.{own}"]
    if shape.scores:
        whole.append("score")
        tensors[f"{_PREFIX}score.weight"] = state["score.weight"]
    base, revision = hub_name(config.base)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if shape.scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        **({"revision": revision} if revision else {}),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "use_dora": config.name == "dora",
        "target_modules": targets,
        "modules_to_save": whole or None,
        **{name: values for name, values in patterns.items() if values},
        "bias": "none",
        "fan_in_fan_out": any(transposed for *_, transposed in modules),
        "inference_mode": True,
    }, tensors


def peft_chain(folder: Path) -> list[Path]:
    """An adapter, its base, the base of that adapter, …, and last the model; a folder of a model is alone.

    Raises:
        ValueError: an adapter_config.json names no folder, or bases form a circle.
    """
    chain = [folder]
    while (chain[-1] / PEFT_CONFIG).is_file():
        base = _base_of(chain[-1])
        if base.resolve() in {each.resolve() for each in chain}:
            raise ValueError(
                f"{folder / PEFT_CONFIG}: base_model_name_or_path leads back to {base}: name a model there"
            )
        chain.append(base)
    return chain


def peft_base(folder: Path) -> Path:
    """The folder that an adapter's base_model_name_or_path names: a model, or another adapter.

    Raises:
        ValueError: see `peft_chain`.
    """
    return peft_chain(folder)[1]


def tokenizer_folder(folder: Path) -> Path:
    """The first folder of `peft_chain` that has a tokenizer.json; the model's if none has.

    Raises:
        ValueError: see `peft_chain`.
    """
    chain = peft_chain(folder)
    return next((each for each in chain if (each / "tokenizer.json").is_file()), chain[-1])


def _base_of(folder: Path) -> Path:
    """The folder that base_model_name_or_path of an adapter names."""
    given = read_json(folder / PEFT_CONFIG)
    name, revision = (str(given.get(key) or "") for key in ("base_model_name_or_path", "revision"))
    for path in (Path(name).expanduser(), folder / name):
        if name and path.is_dir():
            return path
    try:
        found = model_folder(f"{name}@{revision}" if revision else name, "base_model_name_or_path")
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


def from_peft(folder: Path, shape: ModelShape) -> tuple[AdapterConfig, dict[str, Tensor], dict[str, float]]:
    """An adapter in peft's format: its settings, its tensors by the decoder's names, and the `alphas` of `to_peft`.

    Args:
        folder: has adapter_config.json and adapter_model.safetensors.
        shape: of the decoder, see `peft_shape`.

    Raises:
        ValueError: it is not LoRA or DoRA, has a setting that is not computed here, is damaged, or belongs to another
            model.
    """
    config, given = _config(folder), read_json(folder / PEFT_CONFIG)
    sizes, found = parameter_shapes(shape), dict[str, Tensor]()
    wanted_ranks, own_alphas = dict[str, int](), dict[str, float]()
    back = {theirs: (ours, turned) for theirs, ours, turned in modules_of(shape)}
    back |= {"score": (("score",), False)} if shape.scores else {}
    saved = {name.removeprefix(_PREFIX): value for name, value in _saved(folder).items()}
    _check_outside(folder, shape, saved, back)
    outside = [each for each, (ours, _) in back.items() if {"embedding", "head", "score"} & {*ours}]
    adapted = _adapted(folder, config, saved)
    check_targets(folder / PEFT_CONFIG, given, adapted, outside)
    ranks, alphas = (
        by_pattern(folder / PEFT_CONFIG, name, given.get(name), default, adapted)
        for name, default in (("rank_pattern", config.rank), ("alpha_pattern", config.alpha))
    )
    for name, value in saved.items():
        if shape.tied and name == _HEAD:
            continue  # equal to the embedding
        module, own = _split(name)
        ours, turned = back.get(module, ((), False))
        if turned and own == "weight":
            value = value.t()
        rows = [sizes[f"{each}.weight"][0] for each in ours if f"{each}.weight" in sizes]
        joined = own != "lora_a" and len(rows) > 1 and sum(rows) == len(value)
        parts = torch.split(value, rows) if joined else [value] * len(rows)
        for each, part in zip(ours, parts, strict=False):
            found[f"{each}.{own}"] = part.to(torch.float32).contiguous()
            wanted_ranks[each] = int(ranks(module))
            if own == "lora_a" and (alpha := alphas(module)) != config.alpha:
                own_alphas[each] = alpha
        if not rows:
            raise ValueError(
                f"{folder}: {name} belongs to no module of the model that base_model_name_or_path names"
            )
    for name, value in found.items():
        module, _, own = name.rpartition(".")
        rows, columns = (*sizes[f"{module}.weight"], 0)[:2]
        rank = wanted_ranks[module]
        adapter = {"lora_a": (rank, columns), "lora_b": (rows, rank), "magnitude": (rows,)}
        wanted = adapter.get(own) or tuple(sizes.get(name, ()))
        if tuple(value.shape) != wanted:
            raise ValueError(
                f"{folder} is an adapter of another model than base_model_name_or_path names: its {name} is"
                f" {tuple(value.shape)}, and there it is {wanted}"
            )
    return config, found, own_alphas


def _check_outside(
    folder: Path, shape: ModelShape, saved: Mapping[str, Tensor], back: Mapping[str, tuple[Any, bool]]
) -> None:
    """Check what an adapter changes outside of blocks: the embedding, and the head, which may be the same matrix.

    `back` is Hugging Face's module → (the decoder's modules, whether the matrix is transposed).

    Raises:
        ValueError: an adapter of their own changes their rows, or matrices that must be the same differ.
    """
    for name in saved:
        module, layer, _ = name.partition(".base_layer.")
        module, rows, _ = (name if not layer else module).partition(".lora_embedding_")
        if layer or rows:
            raise ValueError(
                f"{folder}: the adapter of {module} changes the vocabulary's rows, which is not computed here; merge"
                " the adapter with peft"
            )
    table = next(f"{theirs}.weight" for theirs, (ours, _) in back.items() if "embedding" in ours)
    held = [saved[name] for name in (table, _HEAD) if name in saved]
    if shape.tied and held and not (len(held) == 2 and torch.equal(*held)):
        raise ValueError(
            f"{folder}: modules_to_save has {table if _HEAD not in saved else _HEAD} of a model whose head is its"
            " embedding, and the other matrix is not the same (ensure_weight_tying=True trains both); merge the"
            " adapter with peft"
        )


def _adapted(folder: Path, config: AdapterConfig, saved: Mapping[str, Tensor]) -> list[str]:
    """The modules of transformers that have an adapter, each with all of its tensors.

    Raises:
        ValueError: a tensor is missing or superfluous: peft would take random values, or leave it out.
    """
    held = dict[str, set[str]]()
    for module, own in map(_split, saved):
        held.setdefault(module, set()).add(own)
    wanted = {"lora_a", "lora_b"} | ({"magnitude"} if config.name == "dora" else set())
    adapted = [module for module, own in held.items() if own & _NAMES.keys()]
    for module in adapted:
        if held[module] != wanted:
            names = (
                ", ".join(_NAMES.get(own, own) for own in sorted(each)) for each in (held[module], wanted)
            )
            raise ValueError(
                f"{folder / PEFT_WEIGHTS}: {module} has {next(names)}, and an adapter with"
                f" use_dora={config.name == 'dora'} has {next(names)}; save it again with peft"
            )
    return adapted


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
    base = str(peft_base(folder))
    try:
        flags = {name: flag_of(given, name) for name in _FLAGS}
        return AdapterConfig(
            "dora" if flags["use_dora"] else "lora",
            rank=number_of(given, ("r",)),
            alpha=real_of(given, ("lora_alpha",), 0),
            dropout=real_of(given, ("lora_dropout",), 0),
            rank_stabilized=flags["use_rslora"],
            base=base,
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _split(name: str) -> tuple[str, str]:
    """A tensor of peft's → its module of transformers, and its parameter's name here, such as `lora_a`."""
    for own, theirs in _NAMES.items():
        for suffix in (f".{theirs}", f".{theirs}.weight"):
            if name.endswith(suffix):
                return name.removesuffix(suffix), own
    module, _, own = name.rpartition(".")
    return module, own
