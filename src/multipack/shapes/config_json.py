"""The fields of a `ModelShape` from a Hugging Face config.json.

The file is read as JSON; no code is imported. Fields have the same meaning and the same defaults as in the models' own
configuration classes. Every decoder of known cost can be planned for; `unsupported` says why the decoder computes
another function, if it does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multipack.shapes.families import BY_TYPE, SQRT_WIDTH, Family
from multipack.shapes.json_values import mapping_of, number_of, read_json, real_of
from multipack.shapes.rotation import rope_type_of

_GATED = (
    *("llama", "mistral", "mixtral", "phi3", "phimoe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "vaultgemma", "gemma3_text", "smollm3"),
    *("olmo", "olmo2", "olmo3", "olmoe", "cohere", "cohere2", "granite", "granitemoe", "glm4", "glm4_moe"),
)
_PLAIN = ("gpt2", "gptj", "gpt_neox", "gpt_bigcode", "starcoder2", "phi")
"""Model types with and without a gate in the feed-forward layer, which their files do not state."""

MOST_LAYERS, MOST_WIDTH = 1 << 12, 1 << 24
"""Most layers and heads; largest width, vocabulary and context. Larger numbers are mistakes or damage, which would
exhaust memory or overflow before another check."""

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

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Turns in the trained context up to which llama3's scaling divides a frequency, and from which it keeps it."""
YARN_TURNS = 32, 1
"""Turns in the trained context from which yarn keeps a frequency, and up to which it divides it."""
_SCALINGS: dict[str, tuple[tuple[str, ...], dict[str, tuple[Any, ...]]]] = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "dynamic": (("factor",), {}),
    "llama3": (
        ("factor", "original_max_position_embeddings"),
        {name: (value,) for name, value in LLAMA3_SCALING.items()},
    ),
    "longrope": (("short_factor", "long_factor"), {}),
    "yarn": (
        ("factor",),
        {"beta_fast": (None, YARN_TURNS[0]), "beta_slow": (None, YARN_TURNS[1]), "truncate": (None, True)},
    ),
}
"""Scaling of rotary frequencies → the settings that it needs, and the values of others that the decoder computes."""
_WIDTHS = {name for names in _NAMES.values() for name in names}
_COUNTS = re.compile(r"(\w+_)?(layers?|heads?|blocks|experts?|groups?)(_per_tok(en)?)?")
"""Names of widths and lengths, and of numbers of modules."""
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")
_NO_WINDOW: dict[str, Any] = {"use_sliding_window": False, "max_window_layers": 28}
_QWEN: dict[str, Any] = {**_NO_WINDOW, "sliding_window": 4096}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_GEMMA: dict[str, Any] = {**_TIED, "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256}
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA2: dict[str, Any] = {**_GEMMA, **_CAPS, "sliding_window_pattern": 2}
_HEAD_128: dict[str, Any] = {"head_dim": 128}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096},
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3_moe"), _QWEN),
    "qwen3": {**_QWEN, "head_dim": 128},
    "smollm3": {**_NO_WINDOW, **_TIED, "no_rope_layer_interval": 4, "rope_theta": 2_000_000.0},
    **dict.fromkeys(("gpt2", "gpt_bigcode", "cohere"), _TIED),
    "starcoder2": {**_TIED, "use_bias": True},
    "cohere2": {**_TIED, "sliding_window_pattern": 4},
    "gemma": {**_TIED, "head_dim": 256},
    **dict.fromkeys(("gemma2", "vaultgemma"), _GEMMA2),
    "gemma3_text": {
        **_GEMMA,
        "sliding_window_pattern": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "gpt_oss": {"sliding_window_pattern": 2},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "granite": {"attention_multiplier": 1.0},
    **dict.fromkeys(("internlm3", "iquestcoder", "ministral3", "seed_oss"), _HEAD_128),
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0},
}
"""Model type → defaults of fields that its files may omit."""

_UNKNOWN_COST = (
    *("is_encoder_decoder", "attention_chunk_size", "attention_types", "index_topk", "altup_num_inputs"),
    *("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "ssm_cfg", "mamba_d_state"),
    "linear_num_key_heads",
)
"""Fields of models that the cost formula does not cover: encoders, chunked or sparse attention, recurrences."""


def check_sizes(config: Mapping[str, Any]) -> None:
    """Check the sizes of a model, and those of the models inside it, before something is made of them.

    Raises:
        ValueError: a number of layers, heads, experts or of something else that names begin or end with, or a width, is
            negative or beyond `MOST_LAYERS` or `MOST_WIDTH`.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value)
        elif isinstance(value, int | float) and (name in _WIDTHS or _COUNTS.fullmatch(name)):
            most = MOST_LAYERS if _COUNTS.fullmatch(name) else MOST_WIDTH
            if not abs(value) <= most:
                raise ValueError(f"{name}={value!r:.40} is more than {most:,}")


def fields_of(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Read the fields of a `ModelShape` from a Hugging Face configuration.

    Args:
        source: the file's content, its path, or the folder of config.json.

    Raises:
        ValueError: the model is not a decoder of known cost; the message names the missing or unknown fields.
        FileNotFoundError: the file does not exist.
    """
    given = source if isinstance(source, Mapping) else read_json(Path(source))
    text = mapping_of(given, "text_config")
    if text:  # the language model inside a multimodal model
        given = {"model_type": f"{given.get('model_type')}_text", **text}
    kind = str(given.get("model_type", "?"))
    filled = {**_DEFAULTS.get(kind, {}), **given}
    config = {name: value for name, value in filled.items() if value is not None}
    _check_known(kind, config)
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
    # Files of dense models may name settings that they do not use.
    if not found["experts"]:
        found |= dict.fromkeys(("experts_per_token", "expert_width", "shared_experts", "shared_width"), 0)
    elif found["shared_width"] and not found["shared_experts"]:
        found["shared_experts"] = 1
    if not found["kv_rank"]:
        found |= dict.fromkeys(("query_rank", "nope_width", "rope_width", "value_width"), 0)
    found |= _layers_that_differ(config, found)
    fields = {
        **found,
        "positions": "learned" if kind == "gpt_bigcode" else "rope",
        "norm": "layernorm" if kind in _PLAIN else "rmsnorm",
        "activation": "gelu" if kind in _PLAIN else "swiglu",
        "bias": kind in _PLAIN,
        "qkv_bias": kind == "qwen2_moe",
        "tied": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": real_of(config, _EPSILONS, 1e-5),
        # The cost does not depend on these; a model with other frequencies in some layers is not an error.
        **_rotation(config),
    }
    family = BY_TYPE.get(kind)
    if family is not None:
        fields["family"] = kind
        fields |= _family_fields(family, config, fields)
    if not (fields["experts"] or fields["kv_rank"]):
        problem = _unsupported(kind, family, config, bool(fields.get("window")))
        fields |= {"unsupported": problem} if problem else {}
    return fields


def _family_fields(family: Family, config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of a family, and the fields that its files state."""
    found: dict[str, Any] = {"bias": family.always_bias, **family.switches}
    if found.get("embedding_scale") == SQRT_WIDTH:
        found["embedding_scale"] = math.sqrt(fields["d_model"])
    if "window" not in family.settings and not config.get("use_sliding_window"):
        found |= {"window": 0, "window_layers": 0, "full_every": 0}
    width = fields["head_dim"] or fields["d_model"] // fields["heads"]
    for field, name in family.settings.items():
        if field in ("embedding_scale", "residual_scale", "logit_divisor", "attention_cap", "logit_cap"):
            found[field] = real_of(config, (name,), 0.0 if field.endswith("cap") else 1.0)
        elif field == "attention_scale":
            value = real_of(config, (name,), 0.0)
            found[field] = value if name.endswith("multiplier") else value**-0.5
        elif field == "bias":
            found[field] = bool(config.get(name))
        elif field == "rope_width":
            part = real_of({**mapping_of(config, "rope_parameters"), **config}, (name,), 1.0)
            found[field] = 0 if part == 1.0 else int(width * part)
        elif field == "unrotated_every":
            every = _unrotated_every(config, fields["layers"])
            found[field] = fields.get("full_every", 0) if name == "layer_types" else every
        elif field == "attention_growth":
            old, new = (mapping_of(config, each) for each in ("rope_scaling", "rope_parameters"))
            found[field] = real_of({**old, **new}, (name,), 0.0)
        elif field == "window_theta" and fields.get("window"):
            both = mapping_of(config, "rope_parameters")
            found[field] = real_of(mapping_of(both, "sliding_attention"), ("rope_theta",), 0.0) or real_of(
                config, (name, "rope_theta"), 10_000.0
            )
    return found


def _unrotated_every(config: Mapping[str, Any], layers: int) -> int:
    """Which layers have no positions: every n-th; 0 = none."""
    every, listed = number_of(config, ("no_rope_layer_interval",)), config.get("no_rope_layers")
    if not isinstance(listed, list):
        return every if every <= layers else 0
    return next((n for n in range(layers + 1) if listed == rotated_layers(layers, n)), 0)


def rotated_layers(layers: int, unrotated_every: int) -> list[int]:
    """1 for each layer with rotary positions, 0 for the others: `no_rope_layers` in config.json."""
    return [int(not unrotated_every or (layer + 1) % unrotated_every != 0) for layer in range(layers)]


def _unsupported(kind: str, family: Family | None, config: Mapping[str, Any], windowed: bool) -> str:
    """Settings for which the decoder would compute another function than the model; empty if there are none.

    `windowed` is whether a layer has a window.
    """
    if family is None:
        return f"model_type={kind!r}"
    differing = [name for name, values in family.supported.items() if config.get(name) not in (None, *values)]
    if "use_sliding_window" in differing and not windowed:
        differing.remove("use_sliding_window")
    differing += [
        name
        for name in ("rope_scaling", "rope_parameters")
        if not _known_rotation(_full_attention(config, name), family)
    ]
    differing += ["quantization_config"] if config.get("quantization_config") else []
    if family.settings.get("bias") == "attention_bias" and bool(config.get("attention_bias")) != bool(
        config.get("mlp_bias")
    ):
        differing += [name for name in ("attention_bias", "mlp_bias") if name in config]
    listed, layers = config.get("no_rope_layers"), number_of(config, SIZES["layers"])
    if isinstance(listed, list) and listed != rotated_layers(layers, _unrotated_every(config, layers)):
        differing.append("no_rope_layers")
    return ", ".join(f"{name}={config[name]!r}" for name in differing)


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
    window = number_of(config, ("sliding_window",)) if config.get("use_sliding_window", True) else 0
    kinds, pattern = config.get("layer_types"), number_of(config, ("sliding_window_pattern",))
    if layers > MOST_LAYERS:
        return {}  # more than a shape may have, which its check reports
    if isinstance(kinds, list):
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != layers:
            raise ValueError(
                f"layer_types must name {layers} layers of known cost, got {unknown or len(kinds)}"
            )
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif pattern:
        sliding = _with_windows(layers, pattern)
    elif config.get("use_sliding_window"):
        sliding = [layer >= number_of(config, ("max_window_layers",)) for layer in range(layers)]
    else:
        sliding = [True] * layers
    fields: dict[str, int] = {}
    if window and any(sliding):
        every = next((n for n in range(1, layers + 1) if sliding == _with_windows(layers, n)), 0)
        count = 0 if every or all(sliding) else sum(sliding)
        fields = {"window": window, "full_every": every, "window_layers": count}
    if found["experts"]:
        first, every = (
            number_of(config, ("first_k_dense_replace",)),
            number_of(config, ("moe_layer_freq",)) or 1,
        )
        step, dense = (
            number_of(config, ("decoder_sparse_step",)) or 1,
            tuple(config.get("mlp_only_layers", ())),
        )
        with_experts = [
            i
            for i in range(layers)
            if i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense
        ]
        fields["dense_layers"] = layers - len(with_experts)
    return fields


def _with_windows(layers: int, full_every: int) -> list[bool]:
    return [(layer + 1) % full_every > 0 for layer in range(layers)]


def _full_attention(config: Mapping[str, Any], name: str) -> Any:
    """A setting of rotary positions: that of layers without a window, if layers have their own."""
    value = config.get(name)
    return value.get("full_attention", value) if isinstance(value, Mapping) else value


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions, of layers without a window."""
    both = [
        found
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(found := _full_attention(config, name), Mapping) and found
    ]
    sources = [*both, config] if config.get("rope_parameters") else [config, *both]
    theta = next(filter(None, (real_of(each, ("rope_theta",), 0.0) for each in sources)), 10_000.0)
    read = [_scaling({**config, **each}) for each in both]
    if any(each != read[0] for each in read):
        raise ValueError("the configuration's rope_parameters and rope_scaling differ")
    return {"rope_theta": theta, **(read[0] if read else {})}


def _scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of scaled rotary frequencies; none if they are not scaled, or in an unknown way."""
    kind = rope_type_of(config)
    if kind == "default" or not _known_rotation(config):
        return {}
    fields: dict[str, Any] = {"rope_type": kind, "rope_factor": real_of(config, ("factor",), 1.0)}
    if kind in ("linear", "dynamic"):
        return fields
    context = ("original_max_position_embeddings", "max_position_embeddings")
    fields["rope_context"] = number_of(config, context)
    if kind != "llama3":
        fields["rope_attention"] = real_of(config, ("attention_factor",), 0.0)
    if kind == "longrope":
        growth = number_of(config, context[1:]) / max(fields["rope_context"], 1)
        fields["rope_factor"] = real_of(config, ("factor",), growth)
        each = [*config["short_factor"], *config["long_factor"]]
        fields["rope_factors"] = [real_of({"long_factor": value}, ("long_factor",), 0.0) for value in each]
    both = [real_of(config, (name,), 0.0) for name in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and not fields["rope_attention"] and all(both):
        first, second = (0.1 * each * math.log(fields["rope_factor"]) + 1.0 for each in both)
        fields["rope_attention"] = first / second
    return fields


def _known_rotation(scaling: Any, family: Family | None = None) -> bool:
    """Whether the decoder computes these rotary positions, and the family has them."""
    if scaling is None:
        return True
    if not isinstance(scaling, Mapping):
        return False
    kind = str(rope_type_of(scaling))
    if family is not None:
        own = {"partial_rotary_factor": "rope_width", "llama_4_scaling_beta": "attention_growth"}
        if any(scaling.get(name) not in (None, 1.0) and own[name] not in family.settings for name in own):
            return False
        if kind not in ("default", *family.rope_types):
            return False
    if kind not in _SCALINGS:
        return False
    needed, constants = _SCALINGS[kind]
    if kind == "longrope" and not all(isinstance(scaling.get(name), list) for name in needed):
        return False
    return all(scaling.get(name) is not None for name in needed) and all(
        scaling.get(name) in values for name, values in constants.items()
    )
