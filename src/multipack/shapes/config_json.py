"""Hugging Face's config.json, read into the fields of a `ModelShape` and written from one.

The file is read as JSON; no code is imported. Fields have the same meaning and the same defaults as in the
models' own configuration classes. Any model of known cost can be planned for; the field `unsupported` names
the settings for which `Decoder` would compute another function. families.py has families and their settings,
rotation.py rotary positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multipack.shapes.families import BY_TYPE, FAMILIES, SIZES, Family
from multipack.shapes.json_values import mapping_of, number_of, read_json, real_of
from multipack.shapes.rotation import is_of_family, of_full_layers, read_rotation, written_rotation

_GATED = (
    *("mixtral", "phimoe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    *("qwen2_moe", "qwen3_moe", "olmo", "olmoe"),
    *("cohere", "cohere2", "granitemoe", "glm4", "glm4_moe"),
)
"""Model types without a row in families.py whose feed-forward layers have a gate, which files do not state."""
_PLAIN = {"norm": "layernorm", "activation": "gelu", "bias": True}
_SWITCHES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gptj", "gpt_neox", "phi"), _PLAIN),
    "gpt_bigcode": {**_PLAIN, "positions": "learned"},
    "qwen2_moe": {"qkv_bias": True},
}
"""Model type without a row there → field of `ModelShape` → value, where it is not Llama's."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), BY_TYPE["qwen2"].defaults),
    **{kind: {"tie_word_embeddings": True} for kind in ("gpt_bigcode", "cohere")},
    "cohere2": {"tie_word_embeddings": True, "sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window_pattern": 2},
    **{kind: family.defaults for kind, family in BY_TYPE.items()},
}
"""Model type → settings that its files may omit, with their values."""

MOST_LAYERS, MOST_WIDTH = 1 << 12, 1 << 24
"""Most layers and heads; largest width, vocabulary and context. Larger numbers are mistakes or damage, which would
exhaust memory or overflow before another check."""

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

_WIDTHS = {name for names in _NAMES.values() for name in names}
_COUNTS = re.compile(r"(\w+_)?(layers?|heads?|blocks|experts?|groups?)(_per_tok(en)?)?")
"""Names of sizes; and the pattern of numbers of modules, also of settings that are not read."""
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")

_UNKNOWN_COST = (
    *("is_encoder_decoder", "attention_chunk_size", "attention_types", "index_topk", "altup_num_inputs"),
    *("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "ssm_cfg", "mamba_d_state"),
    "linear_num_key_heads",
)
"""Fields of models that the cost formula does not cover: encoders, chunked or sparse attention, recurrences."""


def check_sizes(config: Mapping[str, Any]) -> None:
    """Check the sizes of a model, and of models inside it, before they determine the sizes of lists and tensors.

    Raises:
        ValueError: a count is beyond `MOST_LAYERS`, or a width beyond `MOST_WIDTH`.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value)
        elif isinstance(value, int | float) and (name in _WIDTHS or _COUNTS.fullmatch(name)):
            most = MOST_LAYERS if _COUNTS.fullmatch(name) else MOST_WIDTH
            if not abs(value) <= most:
                raise ValueError(f"{name}={value!r:.40} is more than {most:,}")


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: `text_config` of a model with images, or all."""
    text = mapping_of(config, "text_config")
    return {"model_type": f"{config.get('model_type')}_text", **text} if text else config


def fields_of(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The fields that `ModelShape.from_huggingface` reads; raises its errors."""
    given = language_config(source if isinstance(source, Mapping) else read_json(Path(source)))
    kind = str(given.get("model_type", "?"))
    family = BY_TYPE.get(kind)
    filled = {**_DEFAULTS.get(kind, {}), **given}
    config = {name: value for name, value in filled.items() if value is not None}
    _check_known(kind, config)
    found = _sizes(kind, config)
    fields = {
        **found,
        **_windows(config, found["layers"]),
        "dense_layers": _dense_layers(config, found["layers"]) if found["experts"] else 0,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": real_of(config, _EPSILONS, 1e-5),
        # The cost does not depend on these: an unknown scaling, or another one in some layers, is no error.
        **read_rotation(config),
        **_SWITCHES.get(kind, {}),
    }
    if family is not None:
        fields |= {"family": kind, **_family_fields(family, config, fields)}
    if not (fields["experts"] or fields["kv_rank"]):
        problem = _unsupported(kind, family, config, bool(fields.get("window")))
        fields |= {"unsupported": problem} if problem else {}
    return fields


def _sizes(kind: str, config: Mapping[str, Any]) -> dict[str, int]:
    """The fields that are counts and widths."""
    found = {field: number_of(config, names) for field, names in _NAMES.items()}
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
    if found["layers"] > MOST_LAYERS:  # before lists of them are made
        raise ValueError(f"num_hidden_layers={found['layers']} is more than {MOST_LAYERS:,}")
    # Files of dense models may name settings that they do not use.
    if not found["experts"]:
        found |= dict.fromkeys(("experts_per_token", "expert_width", "shared_experts", "shared_width"), 0)
    elif found["shared_width"] and not found["shared_experts"]:
        found["shared_experts"] = 1
    if not found["kv_rank"]:
        found |= dict.fromkeys(("query_rank", "nope_width", "rope_width", "value_width"), 0)
    return found


def _family_fields(family: Family, config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of a family, and the fields that its files state."""
    found = family.switches_of(fields["d_model"]) | {"bias": family.always_bias}
    if "window" not in family.fields and not config.get("use_sliding_window"):
        found |= {"window": 0, "window_layers": 0, "full_every": 0}
    return found | {each.field: each.read(config, fields) for each in family.settings if each.read}


def _unsupported(kind: str, family: Family | None, config: Mapping[str, Any], windowed: bool) -> str:
    """Settings for which the decoder would compute another function; `windowed` = a layer has a window."""
    if family is None:
        return f"model_type={kind!r}"
    differing = [name for name, values in family.supported.items() if config.get(name) not in (None, *values)]
    if "use_sliding_window" in differing and not windowed:
        differing.remove("use_sliding_window")
    differing += [
        name
        for name in ("rope_scaling", "rope_parameters")
        if not is_of_family(of_full_layers(config, name), family.rope_types, family.fields)
    ]
    differing += ["quantization_config"] if config.get("quantization_config") else []
    differing += [name for setting in family.settings for name in setting.contradicts(config)]
    return ", ".join(f"{name}={config[name]!r}" for name in differing)


def _check_known(kind: str, config: Mapping[str, Any]) -> None:
    """Check that the model is a decoder of known cost."""
    other = [name for name in _UNKNOWN_COST if config.get(name)]
    if other:
        raise ValueError(
            f"model_type={kind!r} with {', '.join(other)} is a model whose cost is not known here"
        )
    if kind not in (*BY_TYPE, *_GATED, *_SWITCHES) and config.get("hidden_act") not in ("silu", "swish"):
        raise ValueError(
            f"model_type={kind!r} is unknown and hidden_act={config.get('hidden_act')!r} does not determine whether its"
            " feed-forward layer is gated; give a ModelShape instead"
        )


def _windows(config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """The fields `window`, `full_every` and `window_layers`; none if no layer has a window."""
    window = number_of(config, ("sliding_window",)) if config.get("use_sliding_window", True) else 0
    sliding = _sliding(config, layers)
    if not window or not any(sliding):
        return {}
    every = next((n for n in range(1, layers + 1) if sliding == _with_windows(layers, n)), 0)
    count = 0 if every or all(sliding) else sum(sliding)
    return {"window": window, "full_every": every, "window_layers": count}


def _sliding(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer has a window, if there is one."""
    kinds, pattern = config.get("layer_types"), number_of(config, ("sliding_window_pattern",))
    if isinstance(kinds, list):
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != layers:
            raise ValueError(
                f"layer_types must name {layers} layers of known cost, got {unknown or len(kinds)}"
            )
        return [kind == "sliding_attention" for kind in kinds]
    if pattern:
        return _with_windows(layers, pattern)
    # Only Qwen's files say that windows are used, and from which layer on.
    first = number_of(config, ("max_window_layers",)) if config.get("use_sliding_window") else 0
    return [layer >= first for layer in range(layers)]


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Number of layers of a mixture without experts."""
    first = number_of(config, ("first_k_dense_replace",))
    every, step = (number_of(config, (name,)) or 1 for name in ("moe_layer_freq", "decoder_sparse_step"))
    with_experts = range(first + -first % every, layers, every)
    dense = config.get("mlp_only_layers", ())
    return layers - sum((layer + 1) % step == 0 and layer not in dense for layer in with_experts)


def _with_windows(layers: int, full_every: int) -> list[bool]:
    """Whether each layer has a window, if every n-th has none."""
    return [(layer + 1) % full_every > 0 for layer in range(layers)]


# --- writing ------------------------------------------------------------------------------------------

_FREE = {
    *SIZES,
    *("kv_heads", "head_dim", "tied", "dropout", "norm_eps"),
    *("rope_theta", "rope_type", "rope_factor", "rope_context", "rope_attention", "rope_factors"),
    *("window_layers", "qkv_bias", "scores", "family", "unsupported"),
}
"""Fields that models of every family choose, or that are compared by their effect."""


def family_of(shape: Any) -> Family:
    """The family of the file that a `ModelShape` was read from, or else the first that can represent the decoder.

    Families name and join tensors in different ways, which does not follow from the shape: Phi-3 and Llama may have
    equal shapes.

    Raises:
        ValueError: no family can; the message gives the reasons of the nearest one.
    """
    families = [BY_TYPE[shape.family]] if shape.family else FAMILIES
    differing = {family.model_type: _differing(shape, family) for family in families}
    nearest = min(differing, key=lambda name: len(differing[name]))
    if not differing[nearest]:
        return BY_TYPE[nearest]
    reasons = ", ".join(f"model.{name}={getattr(shape, name)}" for name in differing[nearest])
    raise ValueError(f"transformers has no model for this decoder: the nearest, {nearest}, has no {reasons}")


def _differing(shape: Any, family: Family) -> list[str]:
    """Fields of a shape whose values no model of the family has."""
    default = type(shape)(layers=1).to_dict()
    fixed = {name: value for name, value in default.items() if name not in _FREE | family.fields}
    fixed |= family.switches_of(shape.d_model)
    if family.always_bias:  # missing ones are zeros
        fixed.pop("bias")
    found = [name for name, value in fixed.items() if getattr(shape, name) != value]
    if not (shape.bias or family.always_bias) and shape.qkv_bias != family.switches.get("qkv_bias", False):
        found.append("qkv_bias")
    if shape.rope_factor != 1.0 and shape.rope_type not in family.rope_types:
        found.append("rope_type")
    found += [setting.field for setting in family.settings if not setting.fits(shape)]
    found += ["window_layers"] if shape.window_layers not in (0, shape.layers) else []
    if fixed["positions"] == "learned":
        found += ["kv_heads"] if shape.kv_heads != shape.heads else []
        found += ["head_dim"] if shape.head_width * shape.heads != shape.d_model else []
    return list(dict.fromkeys(found))


def config_of(shape: Any) -> dict[str, Any]:
    """The content of a config.json for the model of a `ModelShape` in transformers.

    Raises:
        ValueError: see `family_of`.
    """
    family = family_of(shape)
    written = {
        "architectures": [family.architecture],
        **(_classifier(shape, family) if shape.scores else {}),
        "model_type": family.model_type,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "pad_token_id": None,  # some families have one beyond small vocabularies
        family.activation: next(iter(family.supported[family.activation])),
    }
    if shape.positions == "learned":
        return {
            **written,
            **{second: getattr(shape, field) for field, (_, second, *_) in SIZES.items()},
            "layer_norm_epsilon": shape.norm_eps,
            **dict.fromkeys(("embd_pdrop", "resid_pdrop"), shape.dropout),
            "attn_pdrop": 0.0,
        }
    activations = (family.activation, "hidden_activation")
    written |= {first: getattr(shape, field) for field, (first, *_) in SIZES.items()}
    written |= {
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "norm_epsilon" if shape.norm == "layernorm" else "rms_norm_eps": shape.norm_eps,
        "attention_dropout": 0.0,
    }
    written |= {name: values[0] for name, values in family.supported.items() if name not in activations}
    written |= written_rotation(shape, family.fields)
    for setting in family.settings:
        written |= setting.write(shape)
    return written


def _classifier(shape: Any, family: Family) -> dict[str, Any]:
    """The settings of a model with scores."""
    if not family.score_architecture:
        raise ValueError(
            f"transformers has no {family.model_type} with scores (…ForSequenceClassification): train a reward model"
            " from another family"
        )
    labels = {f"LABEL_{number}": number for number in range(shape.scores)}
    return {
        "architectures": [family.score_architecture],
        "id2label": {str(number): label for label, number in labels.items()},
        "label2id": labels,
    }
