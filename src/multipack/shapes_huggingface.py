"""The fields of a `ModelShape` from a Hugging Face config.json.

The file is read as JSON; no code is imported. Fields have the same meaning and the same defaults as in the models' own
configuration classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multipack.atomic import read_file

_GATED = (
    *("llama", "mistral", "mixtral", "phi3", "phimoe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "smollm3"),
    *("olmo", "olmo2", "olmo3", "olmoe", "cohere", "cohere2", "granite", "granitemoe", "glm4", "glm4_moe"),
)
_PLAIN = ("gpt2", "gptj", "gpt_neox", "gpt_bigcode", "starcoder2", "phi")
"""Model types with and without a gate in the feed-forward layer, which their files do not state."""

SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "d_ff": ("intermediate_size", "n_inner"),
    "vocabulary_size": ("vocab_size", "vocab_size"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}
"""Field that every model has → its names in config.json files: Llama's first, GPT-2's second, then others."""

_NAMES: dict[str, tuple[str, ...]] = {
    **SIZES,
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
    "expert_width": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "shared_width": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "kv_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "nope_width": ("qk_nope_head_dim",),
    "rope_width": ("qk_rope_head_dim",),
    "value_width": ("v_head_dim",),
}
"""Field → its names in config.json files."""

LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What all Llama models with scaled rotary frequencies share; only their `factor` differs."""
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
_NO_WINDOW: dict[str, Any] = {"use_sliding_window": False}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_GEMMA: dict[str, Any] = {**_TIED, "head_dim": 256, "sliding_window": 4096}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _NO_WINDOW),
    "smollm3": {**_NO_WINDOW, **_TIED},
    **dict.fromkeys(("gpt2", "gpt_bigcode", "cohere"), _TIED),
    "cohere2": {**_TIED, "sliding_window_pattern": 4},
    "gemma": {**_TIED, "head_dim": 256},
    "gemma2": {**_GEMMA, "sliding_window_pattern": 2},
    "gemma3_text": {
        **_GEMMA,
        "sliding_window_pattern": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "gpt_oss": {"sliding_window_pattern": 2},
}
"""Model type → defaults of fields that its files may omit."""

_UNKNOWN_COST = (
    *("is_encoder_decoder", "attention_chunk_size", "attention_types", "index_topk", "altup_num_inputs"),
    *("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "ssm_cfg", "mamba_d_state"),
    "linear_num_key_heads",
)
"""Fields of models that the cost formula does not cover: encoders, chunked or sparse attention, recurrences."""


def fields_of(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Read the fields of a `ModelShape` from a Hugging Face configuration.

    Args:
        source: the file's content, its path, or the folder of config.json.

    Raises:
        ValueError: the model is not a decoder of known cost; the message names the missing or unknown fields.
        FileNotFoundError: the file does not exist.
    """
    given = source if isinstance(source, Mapping) else read_json(Path(source))
    text = _mapping(given, "text_config")
    if text:  # the language model inside a multimodal model
        given = {"model_type": f"{given.get('model_type')}_text", **text}
    kind = str(given.get("model_type", "?"))
    filled = {**_DEFAULTS.get(kind, {}), **given}
    config = {name: value for name, value in filled.items() if value is not None}
    _check_known(kind, config)
    found = {field: _number(config, names) for field, names in _NAMES.items()}
    if found["d_ff"] == 0 and kind in ("gpt2", "gptj", "gpt_bigcode"):
        found["d_ff"] = 4 * found["d_model"]
    if config.get("multi_query"):
        found["kv_heads"] = 1
    if found["kv_rank"]:  # latent attention has a key for every head
        found["kv_heads"] = found["head_dim"] = 0
    needed = [*SIZES]
    needed += ["experts_per_token"] if found["experts"] else []
    needed += ["nope_width", "value_width"] if found["kv_rank"] else []
    missing = [" or ".join(dict.fromkeys(_NAMES[field])) for field in needed if not found[field]]
    if missing:
        raise ValueError(f"the configuration of model_type={kind!r} lacks {'; '.join(missing)}")
    # Files of dense models may name settings that they do not use.
    if not found["experts"]:
        found |= dict.fromkeys(("experts_per_token", "expert_width", "shared_experts", "shared_width"), 0)
    elif found["shared_width"] and not found["shared_experts"]:
        found["shared_experts"] = 1
    if not found["kv_rank"]:
        found |= dict.fromkeys(("query_rank", "nope_width", "rope_width", "value_width"), 0)
    return {
        **found,
        **_layers_that_differ(config, found),
        "positions": "learned" if kind in ("gpt2", "gpt_bigcode") else "rope",
        "norm": "layernorm" if kind in _PLAIN else "rmsnorm",
        "activation": "gelu" if kind in _PLAIN else "swiglu",
        "bias": kind in _PLAIN,
        "qkv_bias": kind in ("qwen2", "qwen2_moe"),
        "tied": bool(config.get("tie_word_embeddings", False)),
        # The cost does not depend on these; a model with other frequencies in some layers is not an error.
        **_rotation(config),
        "norm_eps": _real(config, _EPSILONS, 1e-5),
    }


def _check_known(kind: str, config: Mapping[str, Any]) -> None:
    """Check that the model is a decoder of known cost."""
    other = [name for name in _UNKNOWN_COST if config.get(name)]
    if other:
        raise ValueError(
            f"model_type={kind!r} with {', '.join(other)} is a model whose cost is not known here"
        )
    if kind not in _GATED + _PLAIN and config.get("hidden_act") not in ("silu", "swish"):
        raise ValueError(
            f"model_type={kind!r} is unknown and hidden_act={config.get('hidden_act')!r} does not determine whether its"
            " feed-forward layer is gated; give a ModelShape instead"
        )


def _layers_that_differ(config: Mapping[str, Any], found: dict[str, int]) -> dict[str, int]:
    """The fields `window`, `window_layers` and `dense_layers`, of models whose layers differ."""
    layers = found["layers"]
    window = _number(config, ("sliding_window",)) if config.get("use_sliding_window", True) else 0
    kinds, pattern = config.get("layer_types"), _number(config, ("sliding_window_pattern",))
    sliding = layers
    if isinstance(kinds, list):
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != layers:
            raise ValueError(
                f"layer_types must name {layers} layers of known cost, got {unknown or len(kinds)}"
            )
        sliding = kinds.count("sliding_attention")
    elif pattern:
        sliding = layers - layers // pattern
    elif config.get("use_sliding_window"):
        sliding = max(layers - _number(config, ("max_window_layers",)), 0)
    fields = {"window": window, "window_layers": sliding} if window and sliding else {}
    if found["experts"]:
        first, every = _number(config, ("first_k_dense_replace",)), _number(config, ("moe_layer_freq",)) or 1
        step, dense = _number(config, ("decoder_sparse_step",)) or 1, tuple(config.get("mlp_only_layers", ()))
        with_experts = [
            i
            for i in range(layers)
            if i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense
        ]
        fields["dense_layers"] = layers - len(with_experts)
    return fields


def _rotation(config: Mapping[str, Any]) -> dict[str, float]:
    """The fields `rope_theta` and `rope_factor`."""
    both = [found for name in ("rope_parameters", "rope_scaling") if (found := _mapping(config, name))]
    theta = next(filter(None, (_real(each, ("rope_theta",), 0.0) for each in (config, *both))), 10_000.0)
    factors = {_real(each, ("factor",), 1.0) if is_llama3(each) else 1.0 for each in both} or {1.0}
    if len(factors) > 1:
        raise ValueError("the configuration's rope_parameters and rope_scaling differ")
    return {"rope_theta": theta, "rope_factor": factors.pop()}


def is_llama3(scaling: Mapping[str, Any]) -> bool:
    """Whether this is the scaling of rotary frequencies of Llama 3.1 and later, which `rope_factor` describes."""
    kind, shared = scaling.get("rope_type", scaling.get("type")), LLAMA3_SCALING
    return kind == "llama3" and all(scaling.get(name) == value for name, value in shared.items())


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _real(config: Mapping[str, Any], names: tuple[str, ...], default: float) -> float:
    """The value of the first of these fields that is present; `default` if none is."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ValueError(f"the configuration's {names[0]} must be a number, got {value!r}")
    return float(value)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The value of the first of these fields that is present, an integer of at least 0; 0 if none is."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"the configuration's {name} must be an integer of at least 0, got {value!r}")
        return value
    return 0


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; for a folder, in its config.json.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is larger than 64 MiB, or does not hold a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; give a model's config.json, or its folder")
    text = read_file(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {type(content).__name__}, not the object that describes a model")
    return content
