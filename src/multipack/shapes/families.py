"""The table of config.json: families of models on Hugging Face that the decoder computes, one row a `model_type`.

A row says how the family differs from Llama: the fields of `ModelShape` that it fixes (`switches`), fields that its
config.json states (`settings`, which read and write), what its files leave out (`defaults`), and the names of its
tensors. config_json.py reads and writes files with it, models/huggingface.py tensors, adapter.py takes peft's names
from it. The table stands here and not beside the weights in models/, because planning reads config.json without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from multipack.shapes.json_values import mapping_of, number_of, real_of

SQRT_WIDTH = "√d_model"
"""Value of the switch `embedding_scale` that follows from the width."""

Config = Mapping[str, Any]
"""The content of a config.json, without empty settings and with the defaults of its family."""
Fields = Mapping[str, Any]
"""Fields of `ModelShape` that were read before: sizes, windows."""

SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "d_ff": ("intermediate_size", "n_inner"),
    "vocabulary_size": ("vocab_size", "vocab_size"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}
"""Field that every model has → its names in config.json files: Llama's first, GPT-2's second, then others."""


@dataclass(frozen=True)
class Setting:
    """A field of `ModelShape` that config.json files of a family state.

    Attributes:
        field: of `ModelShape`.
        read: (content, fields read before) → the field's value; None = it was read before.
        write: shape → the settings that state it, unless another field's do.
        fits: shape → whether the settings can state its value.
        contradicts: content → the settings for which the decoder would compute another function.

    `write` and `fits` take a `ModelShape`, whose module imports this one.
    """

    field: str
    read: Callable[[Config, Fields], Any] | None = None
    write: Callable[[Any], dict[str, Any]] = lambda _: {}
    fits: Callable[[Any], bool] = lambda _: True
    contradicts: Callable[[Config], list[str]] = lambda _: []


def _number(field: str, name: str, default: float) -> Setting:
    """A field that is one number; if 0 is the default, files state it as null."""
    return Setting(
        field,
        lambda config, _: real_of(config, (name,), default),
        lambda shape: {name: getattr(shape, field) or (0.0 if default else None)},
    )


def _biases_differ(config: Config) -> list[str]:
    names = ("attention_bias", "mlp_bias")
    same = bool(config.get(names[0])) == bool(config.get(names[1]))
    return [] if same else [name for name in names if name in config]


BIAS = Setting(
    "bias",
    lambda config, _: bool(config.get("attention_bias")),
    lambda shape: {"attention_bias": shape.bias, "mlp_bias": shape.bias},
    contradicts=_biases_differ,
)
WINDOW = Setting("window", write=lambda shape: {"sliding_window": shape.window or None})


def _layer_types(shape: Any) -> dict[str, Any]:
    kinds = ("full_attention", "sliding_attention")
    written = {"layer_types": [kinds[shape.window_of(layer) > 0] for layer in range(shape.layers)]}
    return written | ({"sliding_window_pattern": shape.full_every} if shape.full_every else {})


SOME_WINDOWS = (WINDOW, Setting("full_every", write=_layer_types))


def window_theta(name: str) -> Setting:
    """The base of the frequencies in layers with a window: `name`, or rope_parameters in newer files."""

    def read(config: Config, fields: Fields) -> float:
        if not fields.get("window"):
            return 0.0
        newer = mapping_of(mapping_of(config, "rope_parameters"), "sliding_attention")
        return real_of(newer, ("rope_theta",), 0.0) or real_of(config, (name, "rope_theta"), 10_000.0)

    def write(shape: Any) -> dict[str, Any]:
        # `written_rotation` writes rope_theta, of the other layers, and both bases in rope_parameters.
        return {} if name == "rope_theta" else {name: shape.window_theta or shape.rope_theta}

    return Setting("window_theta", read, write)


def _rope_width(config: Config, fields: Fields) -> int:
    part = real_of({**mapping_of(config, "rope_parameters"), **config}, ("partial_rotary_factor",), 1.0)
    width = fields["head_dim"] or fields["d_model"] // fields["heads"]
    return 0 if part == 1.0 else int(width * part)


ROPE_WIDTH = Setting(
    "rope_width",
    _rope_width,
    lambda shape: {"partial_rotary_factor": shape.rotary_width / shape.head_width},
)


def _unrotated_every(config: Config) -> int | None:
    """Which layers have no positions: every n-th; 0 = none, None = no such pattern."""
    layers, every = number_of(config, SIZES["layers"]), number_of(config, ("no_rope_layer_interval",))
    listed = config.get("no_rope_layers")
    if not isinstance(listed, list):
        return every if every <= layers else 0
    return next((n for n in range(layers + 1) if listed == _rotated(layers, n)), None)


def _rotated(layers: int, unrotated_every: int) -> list[int]:
    """1 for each layer with rotary positions, 0 for the others."""
    return [int(not unrotated_every or (layer + 1) % unrotated_every != 0) for layer in range(layers)]


def _written_unrotated(shape: Any) -> dict[str, Any]:
    every = shape.unrotated_every
    written = {"no_rope_layers": _rotated(shape.layers, every), "use_sliding_window": False}
    return written | ({"no_rope_layer_interval": every} if every else {})


NO_ROPE_LAYERS = Setting(
    "unrotated_every",
    lambda config, _: _unrotated_every(config) or 0,
    _written_unrotated,
    contradicts=lambda config: ["no_rope_layers"] if _unrotated_every(config) is None else [],
)
UNROTATED_WHERE_FULL = Setting(
    "unrotated_every",
    lambda _, fields: fields.get("full_every", 0),
    fits=lambda shape: shape.unrotated_every == shape.full_every,
)
ATTENTION_MULTIPLIER = Setting(
    "attention_scale",
    lambda config, _: real_of(config, ("attention_multiplier",), 0.0),
    lambda shape: {"attention_multiplier": shape.attention_scale or shape.head_width**-0.5},
)


def _pre_attention_scalar(shape: Any) -> float:
    """Number s where 1 / √s is the factor of products of queries and keys; files state it as an integer."""
    return float((shape.attention_scale or shape.head_width**-0.5) ** -2)


def _read_scalar(config: Config, _: Fields) -> float:
    scalar = real_of(config, ("query_pre_attn_scalar",), 0.0)
    if scalar <= 0:
        raise ValueError(f"the configuration's query_pre_attn_scalar must be positive, got {scalar:g}")
    return math.pow(scalar, -0.5)


PRE_ATTENTION_SCALAR = Setting(
    "attention_scale",
    _read_scalar,
    lambda shape: {"query_pre_attn_scalar": round(_pre_attention_scalar(shape))},
    fits=lambda shape: abs(_pre_attention_scalar(shape) - round(_pre_attention_scalar(shape))) <= 1e-6,
)


def _growth(config: Config, _: Fields) -> float:
    both = {**mapping_of(config, "rope_scaling"), **mapping_of(config, "rope_parameters")}
    return real_of(both, ("llama_4_scaling_beta",), 0.0)


ATTENTION_GROWTH = Setting("attention_growth", _growth)  # written in rope_parameters
ATTENTION_CAP = _number("attention_cap", "attn_logit_softcapping", 0.0)
LOGIT_CAP = _number("logit_cap", "final_logit_softcapping", 0.0)
EMBEDDING_SCALE = _number("embedding_scale", "embedding_multiplier", 1.0)
RESIDUAL_SCALE = _number("residual_scale", "residual_multiplier", 1.0)
LOGIT_DIVISOR = _number("logit_divisor", "logits_scaling", 1.0)


ENDS = (".weight", ".bias")
"""Ends of the names of a module's tensors, here and there."""


@dataclass(frozen=True)
class Tensors:
    """Names of a family's tensors.

    Attributes:
        prefix: prefix of all names except the head's; omitted in files of models without a head.
        layers: name between the prefix and a layer's number.
        outer: Hugging Face's module → the decoder's module, outside of layers; the embedding first.
        inner: Hugging Face's module → the decoder's modules, in a layer; several are joined along their rows.
        transposed: Hugging Face's modules whose matrices are (in, out).
        ignored: pattern of the names of buffers in old files, which are not parameters.
    """

    prefix: str
    layers: str
    outer: dict[str, str]
    inner: dict[str, tuple[str, ...]]
    transposed: frozenset[str] = frozenset()
    ignored: re.Pattern[str] = re.compile(r".*\.rotary_emb\.inv_freq")

    def modules(self, shape: Any) -> Iterator[tuple[str, tuple[str, ...], bool]]:
        """The modules of a model of a `ModelShape`.

        Yields:
            Hugging Face's module, the decoder's modules, and whether Hugging Face's matrix is transposed.
        """
        for theirs, ours in self.outer.items():
            yield self.prefix + theirs, (ours,), False
        for number in range(shape.layers):
            for theirs, names in self.inner.items():
                where = f"{self.prefix}{self.layers}.{number}.{theirs}"
                yield where, tuple(f"blocks.{number}.{name}" for name in names), theirs in self.transposed
        yield "lm_head", ("head",), False

    def full_name(self, name: str) -> str:
        """The name of a tensor with the prefix, which is added if it is missing."""
        bare = (*self.outer, self.layers)
        return self.prefix + name if name.startswith(tuple(f"{part}." for part in bare)) else name

    def renamed(self, removed: tuple[str, ...] = (), **added: tuple[str, ...]) -> Tensors:
        """The same names without some modules of a layer, and with others; `__` in a keyword is a dot."""
        kept = {theirs: ours for theirs, ours in self.inner.items() if theirs not in removed}
        return replace(self, inner=kept | {name.replace("__", "."): ours for name, ours in added.items()})


LLAMA = Tensors(
    prefix="model.",
    layers="layers",
    outer={"embed_tokens": "embedding", "norm": "norm"},
    inner={
        "input_layernorm": ("attention_norm",),
        "self_attn.q_proj": ("attention.query",),
        "self_attn.k_proj": ("attention.key",),
        "self_attn.v_proj": ("attention.value",),
        "self_attn.o_proj": ("attention.output",),
        "post_attention_layernorm": ("feed_forward_norm",),
        "mlp.gate_proj": ("feed_forward.gate",),
        "mlp.up_proj": ("feed_forward.up",),
        "mlp.down_proj": ("feed_forward.down",),
    },
)


_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}


@dataclass(frozen=True)
class Family:
    """A `model_type`.

    Attributes:
        model_type: its value in config.json.
        architecture: class of transformers.
        switches: field of `ModelShape` → the value that the family has; other fields have Llama's, the default.
        settings: the fields of `ModelShape` that a model of the family chooses.
        supported: setting in config.json → the values for which the decoder computes the same. A missing setting has
            the family's default, which must be among them.
        defaults: setting that files may omit → its value.
        tensors: names of the tensors.
        activation: name of the activation's setting.
        always_bias: whether all matrices and norms have biases; missing ones are written as zeros.
        rope_types: scalings of rotary frequencies that transformers computes for the family.
        classifier: class of transformers with a head of scores; None = by the architecture's name, empty = there is
            none.
    """

    model_type: str
    architecture: str
    switches: dict[str, Any] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=_SILU.copy)
    defaults: dict[str, Any] = field(default_factory=dict)
    tensors: Tensors = LLAMA
    activation: str = "hidden_act"
    always_bias: bool = False
    rope_types: tuple[str, ...] = ("llama3", "linear", "dynamic", "yarn", "longrope")
    classifier: str | None = None

    @property
    def title(self) -> str:
        """The name for people: `Qwen2`."""
        name = re.sub("ForCausalLM|LMHeadModel", "", self.architecture)
        return name if self.model_type.startswith(name.lower()) else self.model_type

    @property
    def fields(self) -> set[str]:
        """The fields of `ModelShape` that `settings` state."""
        return {setting.field for setting in self.settings}

    def switches_of(self, width: int) -> dict[str, Any]:
        """The switches of a model of this width."""
        scale = self.switches.get("embedding_scale")
        return self.switches | ({"embedding_scale": math.sqrt(width)} if scale == SQRT_WIDTH else {})

    @property
    def score_architecture(self) -> str:
        """Class of transformers with a head of scores; empty = there is none."""
        if self.classifier is not None:
            return self.classifier
        return re.sub("ForCausalLM|LMHeadModel", "ForSequenceClassification", self.architecture)


_HEAD_NORMS = {
    "self_attn__q_norm": ("attention.query_norm",),
    "self_attn__k_norm": ("attention.key_norm",),
}
_AFTER = {
    "post_attention_layernorm": ("attention_out_norm",),
    "post_feedforward_layernorm": ("feed_forward_out_norm",),
}
PHI = LLAMA.renamed(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    self_attn__qkv_proj=("attention.query", "attention.key", "attention.value"),
    mlp__gate_up_proj=("feed_forward.gate", "feed_forward.up"),
)
_OLMO_NAMES = LLAMA.renamed(("input_layernorm",), **_AFTER, **_HEAD_NORMS)
_STARCODER = LLAMA.renamed(
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    mlp__c_fc=("feed_forward.up",),
    mlp__c_proj=("feed_forward.down",),
)
_GPT2 = Tensors(
    prefix="transformer.",
    layers="h",
    outer={"wte": "embedding", "wpe": "positions", "ln_f": "norm"},
    inner={
        "ln_1": ("attention_norm",),
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": ("attention.output",),
        "ln_2": ("feed_forward_norm",),
        "mlp.c_fc": ("feed_forward.up",),
        "mlp.c_proj": ("feed_forward.down",),
    },
    transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    ignored=re.compile(r".*\.attn\.(masked_)?bias"),
)

_GELU = ("gelu_new", "gelu_pytorch_tanh")
_NO_BIAS = {"attention_bias": (False,)}
_GEMMA: dict[str, Any] = {"norm": "rmsnorm+1", "activation": "geglu", "embedding_scale": SQRT_WIDTH}
_OLMO: dict[str, Any] = {"norms": "after", "head_norm": "all"}
_GEMMA2 = (*SOME_WINDOWS, PRE_ATTENTION_SCALAR, ATTENTION_CAP, LOGIT_CAP)
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_HEAD_128: dict[str, Any] = {"head_dim": 128}
_WINDOW: dict[str, Any] = {"sliding_window": 4096}
_NO_WINDOW: dict[str, Any] = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA_FILE: dict[str, Any] = {**_TIED, **_WINDOW, "head_dim": 256, "query_pre_attn_scalar": 256}
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA2_FILE: dict[str, Any] = {**_GEMMA_FILE, **_CAPS, "sliding_window_pattern": 2}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", settings=(BIAS,)),
    Family("mistral", "MistralForCausalLM", settings=(WINDOW,), defaults=_WINDOW),
    Family("ministral", "MinistralForCausalLM", settings=SOME_WINDOWS, defaults=_WINDOW),
    Family("ministral3", "Ministral3ForCausalLM", settings=(WINDOW, ATTENTION_GROWTH), defaults=_HEAD_128),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        switches={"qkv_bias": True},
        supported={**_SILU, "use_sliding_window": (False,)},
        defaults={**_NO_WINDOW, **_WINDOW},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        switches={"head_norm": "head"},
        supported={**_SILU, **_NO_BIAS, "use_sliding_window": (False,)},
        defaults={**_NO_WINDOW, **_WINDOW, **_HEAD_128},
        tensors=LLAMA.renamed(**_HEAD_NORMS),
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        switches=_GEMMA,
        supported={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "hidden_activation": ("gelu_pytorch_tanh",)},
        defaults={**_TIED, "head_dim": 256},
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        switches={**_GEMMA, "norms": "around"},
        settings=_GEMMA2,
        supported={**_NO_BIAS, "hidden_activation": ("gelu_pytorch_tanh",)},
        defaults=_GEMMA2_FILE,
        tensors=LLAMA.renamed(pre_feedforward_layernorm=("feed_forward_norm",), **_AFTER),
        activation="hidden_activation",
    ),
    Family(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        switches=_GEMMA,
        settings=_GEMMA2,
        supported={**_NO_BIAS, "hidden_activation": ("gelu_pytorch_tanh",)},
        defaults=_GEMMA2_FILE,
        tensors=LLAMA.renamed(
            ("post_attention_layernorm",), pre_feedforward_layernorm=("feed_forward_norm",)
        ),
        activation="hidden_activation",
        classifier="",
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        switches={**_GEMMA, "norms": "around", "head_norm": "head"},
        settings=(*SOME_WINDOWS, window_theta("rope_local_base_freq"), PRE_ATTENTION_SCALAR),
        supported={
            **_NO_BIAS,
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False,),
        },
        defaults={
            **_GEMMA_FILE,
            "sliding_window_pattern": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        tensors=LLAMA.renamed(pre_feedforward_layernorm=("feed_forward_norm",), **_AFTER, **_HEAD_NORMS),
        activation="hidden_activation",
        classifier="Gemma3TextForSequenceClassification",
    ),
    Family("phi3", "Phi3ForCausalLM", settings=(WINDOW, ROPE_WIDTH), tensors=PHI, rope_types=("longrope",)),
    Family("olmo2", "Olmo2ForCausalLM", switches=_OLMO, supported={**_SILU, **_NO_BIAS}, tensors=_OLMO_NAMES),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        switches=_OLMO,
        settings=(*SOME_WINDOWS, window_theta("rope_theta")),
        supported={**_SILU, **_NO_BIAS},
        defaults={**_WINDOW, "sliding_window_pattern": 4, "rope_theta": 500_000.0},
        tensors=_OLMO_NAMES,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        settings=(BIAS, NO_ROPE_LAYERS),
        supported={**_SILU, "use_sliding_window": (False,)},
        defaults={**_NO_WINDOW, **_TIED, "no_rope_layer_interval": 4, "rope_theta": 2_000_000.0},
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        switches={"norms": "after", "head_norm": "head"},
        settings=(*SOME_WINDOWS, UNROTATED_WHERE_FULL),
        defaults={**_WINDOW, "sliding_window_pattern": 4},
        tensors=_OLMO_NAMES,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        settings=(BIAS, EMBEDDING_SCALE, RESIDUAL_SCALE, ATTENTION_MULTIPLIER, LOGIT_DIVISOR),
        defaults={"attention_multiplier": 1.0},
        classifier="",
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        switches={"qkv_bias": True},
        supported={**_SILU, "attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,)},
        defaults=_HEAD_128,
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        switches={"norm": "layernorm", "activation": "gelu"},
        settings=(WINDOW,),
        supported={"hidden_act": ("gelu_pytorch_tanh", "gelu_new"), "use_bias": (True,)},
        defaults={**_TIED, "use_bias": True},
        tensors=_STARCODER,
        always_bias=True,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        switches={"positions": "learned", "norm": "layernorm", "activation": "gelu"},
        supported={
            "activation_function": _GELU,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        defaults=_TIED,
        tensors=_GPT2,
        activation="activation_function",
        always_bias=True,
    ),
)
"""The families; a decoder is exported as the first one that can represent it."""

BY_TYPE = {family.model_type: family for family in FAMILIES} | {
    name: replace(FAMILIES[0], model_type=name, defaults=_HEAD_128) for name in ("internlm3", "iquestcoder")
}
"""`model_type` → family, with names for Llama under which its models exist."""
