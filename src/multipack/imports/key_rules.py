"""Rules for batches, optimizers, documents, parallelism and objectives, where a key takes more than another name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multipack.imports.data_sets import data_settings
from multipack.imports.models import has_decoder, model_type
from multipack.imports.outcome import NOTHING, Honored, Keys, NotHonored
from multipack.parallel.optimizers import OptimizerName

# --- batches and optimizers -----------------------------------------------------------------------------


def packs(value: Any, keys: Keys) -> Honored:
    """Packs of a step; without packing, documents of a step. `value`: packs of a micro-batch."""
    packs, ranks = int(value) * int(keys.get("gradient_accumulation_steps") or 1), 1
    for name in ("dp_shard_size", "dp_replicate_size"):
        ranks *= max(int(keys.get(name) or 1), 1)
    note = f"{packs} packs a step on one device; Axolotl multiplies by devices: on N set plan.packs_per_step={packs}·N"
    if ranks > 1:
        note = f"{packs} packs a step on each of {ranks} data-parallel ranks"
    settings = {"plan.packs_per_step": packs * ranks}
    if not keys.get("sample_packing"):  # a step of this number of documents, as without packing
        settings["plan.max_documents"] = 1
        note += (
            ". Without sample_packing a pack holds one document: without plan.max_documents=1 a step has more"
        )
    return Honored(settings, note)


def accumulation(value: Any, keys: Keys) -> Honored:
    """Micro-batches of a step, which `packs` multiplies; its note stands at micro_batch_size if that is there."""
    found = packs(keys.get("micro_batch_size") or 1, keys)
    return replace(found, note="") if keys.get("micro_batch_size") else found


_OPTIMIZERS: dict[str, tuple[OptimizerName, str]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("adamw", "")),
    "paged_adamw_32bit": ("adamw", "its states are not paged: parallel.offload keeps them on the host"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), ("adamw_8bit", "")),
    "paged_adamw_8bit": ("adamw_8bit", "its states are not paged"),
    "adamw_torch_4bit": ("adamw_8bit", "its states have 8 bits instead of 4"),
    "muon": ("muon", "its learning rate is scaled as by optimizer.name=muon"),
}


def optimizer(value: Any, keys: Keys) -> Honored:
    """The optimizer, and the bits of its states."""
    if value not in _OPTIMIZERS:
        raise NotHonored(f"optimizer={value}: there are {', '.join(_OPTIMIZERS)}")
    name, note = _OPTIMIZERS[value]
    return Honored({"optimizer.name": name}, note)


_SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}


def schedule(value: Any, keys: Keys) -> Honored:
    """The learning-rate schedule."""
    if value not in _SCHEDULES:
        raise NotHonored(f"lr_scheduler={value}: there are {', '.join(_SCHEDULES)}")
    settings: dict[str, Any] = {"optimizer.schedule": _SCHEDULES[value]}
    if value == "constant":
        settings["optimizer.warmup_steps"] = 0
    return Honored(settings)


# --- documents, evaluation, objectives ------------------------------------------------------------------


def data(value: Any, keys: Keys) -> Honored:
    """The data sets."""
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list) or not all(isinstance(each, Mapping) for each in entries):
        raise NotHonored("a data set is given by path and type")
    found, commands = data_settings(entries, keys, model_type(keys))
    settings = {f"data.{name}": each for name, each in found.items()}
    if keys.get("streaming") and found["source"] == "huggingface":
        settings["data.stream"] = True
    return Honored(settings, commands=tuple(commands))


def validation(value: Any, keys: Keys) -> Honored:
    """The share of validation documents."""
    if float(value) >= 1:
        raise NotHonored(f"val_set_size={value} documents: data.validation is a share, such as 0.05")
    return Honored({"data.validation": float(value)} | ({"train.eval_every": 50} if float(value) else {}))


def special_tokens(value: Any, keys: Keys) -> Honored:
    """Special tokens, which the tokenizer's files define here; the padding token has no effect on packs."""
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # of SentencePiece
    changed = {
        name: token for name, token in value.items() if name != "pad_token" and token != usual.get(name)
    }
    if not changed:
        return NOTHING  # no token attends to the padding of a pack
    kinds = [str(each.get("type", "")) for each in keys.get("datasets") or ()]
    if set(changed) == {"eos_token"} and kinds and all(each.startswith("chat_template") for each in kinds):
        return Honored(note="chats end as their template writes it; eos_token is for the export")
    name = next(iter(changed))
    raise NotHonored(f"{name}={changed[name]}: the special tokens are those of the tokenizer's files")


def recompute(value: Any, keys: Keys) -> Honored:
    """Activation checkpointing."""
    note = "" if value is True else "activations are recomputed, and not kept on the host"
    return Honored({"train.recompute": "full"}, note)


def sharding(value: Any, keys: Keys) -> Honored:
    """`fsdp`, `fsdp_config` and `dp_shard_size`: how ranks divide weights."""
    config = dict(keys.get("fsdp_config") or {})
    config = {str(name).removeprefix("fsdp_"): each for name, each in config.items()}
    kinds = {*(keys.get("fsdp") or ()), str(config.get("sharding_strategy", "full_shard")).lower()}
    data = "hsdp" if "hybrid_shard" in kinds else "zero2" if "shard_grad_op" in kinds else "zero3"
    data = "zero2" if data == "zero3" and config.get("reshard_after_forward") is False else data
    data = "hsdp" if int(keys.get("dp_replicate_size") or 1) > 1 else data
    offload = {"parallel.offload": "cpu"} if config.get("offload_params") or "offload" in kinds else {}
    return Honored({"parallel.data": data, **offload})


def deepspeed(value: Any, keys: Keys) -> Honored:
    """The stage of ZeRO, by a file's name or its content."""
    if isinstance(value, dict):
        zero = value.get("zero_optimization") or {}
        stage, text = int(zero.get("stage", 0)), str(zero)
    else:
        found = re.search(r"zero_?(\d)", str(value).lower())
        if not found:
            raise NotHonored(
                f"deepspeed={value}: the stage is not in the name; give parallel.data=zero1, zero2 or zero3"
            )
        stage, text = int(found[1]), str(value)
    if not stage:
        return NOTHING
    offload = {"parallel.offload": "cpu"} if stage > 1 and "offload" in text.replace("none", "") else {}
    return Honored({"parallel.data": f"zero{stage}", **offload})


_PLUGINS = (
    *("CutCrossEntropyPlugin", "ExpertParallelPlugin", "KernelsPlugin", "LigerPlugin", "LMEvalPlugin"),
    *("MultipackPlugin", "SwanLabPlugin"),
)
"""Plugins that do not change what is trained, as the keys of these features."""


def plugins(value: Any, keys: Keys) -> Honored:
    """Plugins of features that have keys too."""
    names = [str(plugin).rpartition(".")[2] for plugin in value]
    if unknown := [name for name in names if name not in _PLUGINS]:
        raise NotHonored(f"plugin {unknown[0]} has no equivalent")
    return NOTHING


def preference(value: Any, keys: Keys) -> Honored:
    """The loss of preference pairs."""
    from multipack.models.objectives import find_loss  # imports torch

    loss = "sigmoid" if value == "dpo" else str(value)
    types = keys.get("dpo_loss_type") or [loss]
    loss = str(types[0] if isinstance(types, list) and len(types) == 1 else types)
    try:
        find_loss(loss)
    except ValueError as error:
        raise NotHonored(f"rl={value}: {error}") from error
    return Honored({"preference.loss": loss})


def num_labels(value: Any, keys: Keys) -> Honored:
    """A reward model has one score."""
    if value == 1 and keys.get("reward_model"):
        return NOTHING
    raise NotHonored("classifiers")


def compiled(value: Any, keys: Keys) -> Honored:
    """`torch_compile`."""
    if not has_decoder(keys):
        return Honored(note="models with the code of transformers are not compiled")
    return Honored({"train.compile": "auto" if value == "auto" else "true"})


def replicas(value: Any, keys: Keys) -> Honored:
    """Groups of ranks that hold the same shards."""
    return Honored({"parallel.data": "hsdp", "parallel.replicate": int(value)}) if int(value) > 1 else NOTHING


def overlong(value: Any, keys: Keys) -> Honored:
    """The policy for documents longer than a pack."""
    policies = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    if value not in policies:
        raise NotHonored(f"excess_length_strategy={value}: there are {', '.join(policies)}")
    return Honored({"data.overlong": policies[value]})
