"""Causal models of transformers to probe: loaded from this machine, or tiny with random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multipack.machine import import_extra
from multipack.ops.attention.foreign_attention import register
from multipack.ops.attention.row_mask import NAME
from multipack.shapes import SIZES
from multipack.untrusted import config_from_folder, from_folder

LAYERS = r"(num_|n_)?(hidden_|encoder_|decoder_)?(layers?|blocks)"
"""Pattern of a number of layers."""
TINY: tuple[tuple[int, str], ...] = (
    (256, r"(.*_)?vocab_size(_per_.*)?"),
    (4, r"n_heads?|num_heads|.*_attention_heads"),
    (2, r".*(kv|key_value)(_n)?_heads"),
    (8, r"mamba_n(um)?_heads|n_mamba_heads|(mamba_)?d_head|.*head_dim|attention_head_size|d_kv|kv_channels"),
    (4, r"rotary_dim"),
    (16, r"qk_head_dim"),
    (
        32,
        r"hidden_size|d_model|n_embd|((hidden|embed|emb|embedding|word_embed_proj)_)?dim|embedding_size|lru_width",
    ),
    (48, r".*(intermediate_(size|dim)|ffn_dim|d_ff|ff_dim|n_inner|ffn_hidden_size)"),
    (8, r".*_rank|((mamba_)?d_state|(ssm_)?state_size)"),
    (64, r"mamba_d_ssm|index_topk"),
    (4, r".*num_experts|n_routed_experts|num_local_experts"),
    (2, r"num_experts_per_tok|moe_top_?k|top_k_experts|moe_k"),
    (1, r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers|(mamba_)?n_?groups"),
    (128, r"max_position_embeddings|n_positions|max_seq_len|seq_len|n_ctx"),
    (
        4,
        r"sliding_window|attention_(window|chunk)_size|local_attention|window_size",
    ),  # below a document's length
    (0, r"num_(nextn_predict|mtp)_layers"),
)
"""Value in a tiny model → pattern of a setting's whole name. The last pattern that matches decides."""

MISSING = {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
"""Values of settings that a configuration needs and leaves empty."""
COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks")
"""Names of the number of layers: a longer list with that many entries holds a value for each layer."""


def tiny_config(config: Any) -> Any:
    """A configuration of the same architecture of transformers with small sizes.

    It has two layers, of the first kinds of the architecture, or one of each kind if there are more.

    Raises:
        ValueError: the small sizes contradict each other in this architecture, or other errors of its configuration.
    """
    return type(config).from_dict(_shrunk(config.to_dict(), layers=2))


def _shrunk(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """The values of a configuration, and of configurations inside it, with small sizes."""
    kinds = values.get("layer_types") or values.get("layers_block_type")
    if isinstance(kinds, list) and kinds:
        chosen = kinds[:layers]
        chosen += [kind for kind in dict.fromkeys(kinds) if kind not in chosen]  # one of each further kind
        layers = len(chosen)
    counts = {values.get(name) for name in COUNTS}
    made: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            made[name] = _shrunk(value, layers)
        elif name == "per_layer_config" and value:
            made[name] = {number: each for number, each in value.items() if int(number) < layers}
        elif isinstance(value, list) and len(value) > layers and len(value) in counts:
            made[name] = chosen if value is kinds else value[:layers]
        elif isinstance(value, int) and not isinstance(value, bool):
            made[name] = _small(name, value, layers)
        else:
            made[name] = value
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            made[name] = _fit_factors(values[name], _rotary_head(values), _rotary_head(made))
    for name in MISSING.keys() & made.keys():
        made[name] = MISSING[name] if made[name] is None else made[name]
    if values.get("num_key_value_heads") in (None, values.get("num_attention_heads")):
        made |= {name: made["num_attention_heads"] for name in ("num_key_value_heads",) if name in values}
    if "expand" in values and "num_attention_heads" not in values and "num_heads" in values:
        made["num_heads"] = 8  # heads of a state-space layer of width expand · hidden_size
    return made


def _rotary_head(values: dict[str, Any]) -> int:
    """Width of a head, or of its part with rotary positions; 0 = unknown."""
    width, heads = (
        next(filter(None, map(values.get, names)), 0) for names in (SIZES["d_model"], SIZES["heads"])
    )
    return int(values.get("qk_rope_head_dim") or values.get("head_dim") or (width // heads if heads else 0))


def _fit_factors(scaling: dict[str, Any], old: int, new: int) -> dict[str, Any]:
    """Rotary parameters whose lists have a factor for each pair of elements of a head, for heads of a new width."""
    made: dict[str, Any] = {}
    for name, value in scaling.items():
        if isinstance(value, dict):
            made[name] = _fit_factors(value, old, new)
        elif name in ("short_factor", "long_factor") and isinstance(value, list) and old:
            size = len(value) * new // old
            made[name] = [value[at * len(value) // size] for at in range(size)]
        else:
            made[name] = value
    return made


def _small(name: str, value: int, layers: int) -> int:
    """An integer's value in a tiny model: ids of tokens fit its vocabulary, and some counts do not grow."""
    if name.endswith(("token_id", "token_index")):
        return value % 250 if value > 250 else value
    if value > 0 and re.fullmatch(LAYERS, name):
        return layers
    sizes = [size for size, pattern in TINY if re.fullmatch(pattern, name)]
    if not sizes or value <= 0:
        return value
    return min(sizes[-1], value) if re.search(r"expert|rank|group|topk|kv|key_value", name) else sizes[-1]


def tiny_model(config: Any, attention: str | None = None) -> nn.Module:
    """A tiny causal model of this architecture, with random weights.

    Raises:
        ValueError: the small sizes contradict each other in this architecture.
    """
    transformers = import_extra("transformers", "a tiny model", "hf")
    try:
        small = tiny_config(config)
        if hasattr(small, "is_decoder"):
            small.is_decoder = True
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                small, attn_implementation=attention
            )
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"no tiny model of {config.model_type} can be built ({reason[:200]})") from error
    return model


def load_causal_model(source: str, attention: str | None = None, tiny: bool = False) -> tuple[nn.Module, str]:
    """A causal model of transformers, read from this machine only; code in its folder is not run.

    Args:
        source: a folder with a config.json, the name of a model in the local cache, or of an architecture.
        attention: implementation of attention; None = the model's own.
        tiny: build a tiny model with random weights, as without weights in the folder.

    Returns:
        The model, and its description.

    Raises:
        ValueError: there is no such model here, or it cannot be built.
    """
    transformers = import_extra("transformers", "multipack probe", "hf")
    if attention == NAME:
        register()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if source in transformers.CONFIG_MAPPING and not Path(source).is_dir():
        return tiny_model(transformers.CONFIG_MAPPING[source](), attention), f"{source}, tiny, random weights"
    try:
        config = config_from_folder(transformers, source, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{source} is no run, no architecture of transformers and no model on this machine ({reason})"
        ) from error
    if tiny or (Path(source).is_dir() and not list(Path(source).glob("*.safetensors"))):
        return tiny_model(config, attention), f"{config.model_type}, tiny, random weights"
    try:
        model = from_folder(
            transformers.AutoModelForCausalLM,
            source,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            dtype="auto",
            attn_implementation=attention,
        )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{source} cannot be loaded ({reason}); --tiny probes its architecture") from error
    return model, f"{config.model_type}, {type(model).__name__}"
