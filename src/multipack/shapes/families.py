"""Families of models on Hugging Face that the decoder computes: one row a `model_type`.

A row says how the family differs from Llama: the fields of `ModelShape` that it fixes (`switches`), those that its
config.json states (`settings`), and the names of its tensors. config_json.py reads config.json files with it, and
models/huggingface.py writes them, and reads and writes weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

SQRT_WIDTH = "√d_model"
"""Value of a switch that follows from the width."""


@dataclass(frozen=True)
class Tensors:
    """Names of a family's tensors.

    Attributes:
        prefix: prefix of all names except the head's; omitted in files of models without a head.
        layers: name between the prefix and a layer's number.
        outer: Hugging Face's module → the decoder's module, outside of layers; the embedding first.
        inner: Hugging Face's module → the decoder's modules, in a layer; several are joined along their rows.
        transposed: Hugging Face's modules whose matrices are (in, out).
        ignored: pattern of the names of buffers in old files, which are no parameters.
    """

    prefix: str
    layers: str
    outer: dict[str, str]
    inner: dict[str, tuple[str, ...]]
    transposed: frozenset[str] = frozenset()
    ignored: re.Pattern[str] = re.compile(r".*\.rotary_emb\.inv_freq")

    def modules(self, layers: int) -> Iterator[tuple[str, tuple[str, ...], bool]]:
        """Pairs of modules of a model with `layers` layers.

        Yields:
            Hugging Face's module, the decoder's modules, and whether Hugging Face's matrix is transposed.
        """
        for theirs, ours in self.outer.items():
            yield self.prefix + theirs, (ours,), False
        for number in range(layers):
            for theirs, names in self.inner.items():
                where = f"{self.prefix}{self.layers}.{number}.{theirs}"
                yield where, tuple(f"blocks.{number}.{name}" for name in names), theirs in self.transposed
        yield "lm_head", ("head",), False

    def full_name(self, name: str) -> str:
        """The name of a tensor with the prefix, which is added if it is missing."""
        bare = (*self.outer, self.layers)
        return self.prefix + name if name.startswith(tuple(f"{part}." for part in bare)) else name

    def renamed(self, removed: tuple[str, ...] = (), **added: tuple[str, ...]) -> Tensors:
        """The same names without some modules of a layer, and with others; `__` is a dot."""
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


@dataclass(frozen=True)
class Family:
    """A `model_type`.

    Attributes:
        model_type: its value in config.json.
        architecture: class of transformers.
        switches: field of `ModelShape` → the value that the family has; other fields have Llama's, the default.
        settings: field of `ModelShape` → its name in config.json, for fields that a model of the family chooses.
        supported: setting in config.json → the values for which the decoder computes the same. A missing setting has
            the family's default, which must be among them.
        tensors: names of the tensors.
        activation: name of the activation's setting.
        always_bias: whether all matrices and norms have biases; those that a decoder lacks are written as zeros.
        own_rotation: whether layers with and without windows have rotations of their own.
        rope_types: scalings of rotary frequencies that transformers computes for the family.
    """

    model_type: str
    architecture: str
    switches: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    supported: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    tensors: Tensors = LLAMA
    activation: str = "hidden_act"
    always_bias: bool = False
    own_rotation: bool = False
    rope_types: tuple[str, ...] = ("llama3", "linear", "dynamic", "yarn", "longrope")

    @property
    def title(self) -> str:
        """The name for people: `Qwen2`."""
        name = re.sub("ForCausalLM|LMHeadModel", "", self.architecture)
        return name if self.model_type.startswith(name.lower()) else self.model_type


_HEAD_NORMS = {
    "self_attn__q_norm": ("attention.query_norm",),
    "self_attn__k_norm": ("attention.key_norm",),
}
_AFTER = {
    "post_attention_layernorm": ("attention_out_norm",),
    "post_feedforward_layernorm": ("feed_forward_out_norm",),
}
_PHI = LLAMA.renamed(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    self_attn__qkv_proj=("attention.query", "attention.key", "attention.value"),
    mlp__gate_up_proj=("feed_forward.gate", "feed_forward.up"),
)
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
_SILU = {"hidden_act": ("silu", "swish")}
_NO_BIAS = {"attention_bias": (False,)}
_GEMMA: dict[str, Any] = {"norm": "rmsnorm+1", "activation": "geglu", "embedding_scale": SQRT_WIDTH}
_OLMO: dict[str, Any] = {"norms": "after", "head_norm": "all"}
_SOME_WINDOWS = {"window": "sliding_window", "full_every": "layer_types"}
_GEMMA2 = {
    **_SOME_WINDOWS,
    "attention_scale": "query_pre_attn_scalar",
    "attention_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", settings={"bias": "attention_bias"}, supported=_SILU),
    Family("mistral", "MistralForCausalLM", settings={"window": "sliding_window"}, supported=_SILU),
    Family("ministral", "MinistralForCausalLM", settings=_SOME_WINDOWS, supported=_SILU),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        settings={"window": "sliding_window", "attention_growth": "llama_4_scaling_beta"},
        supported=_SILU,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        switches={"qkv_bias": True},
        supported={**_SILU, "use_sliding_window": (False,)},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        switches={"head_norm": "head"},
        supported={**_SILU, **_NO_BIAS, "use_sliding_window": (False,)},
        tensors=LLAMA.renamed(**_HEAD_NORMS),
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        switches=_GEMMA,
        supported={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "hidden_activation": ("gelu_pytorch_tanh",)},
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        switches={**_GEMMA, "norms": "around"},
        settings=_GEMMA2,
        supported={**_NO_BIAS, "hidden_activation": ("gelu_pytorch_tanh",)},
        tensors=LLAMA.renamed(pre_feedforward_layernorm=("feed_forward_norm",), **_AFTER),
        activation="hidden_activation",
    ),
    Family(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        switches=_GEMMA,
        settings=_GEMMA2,
        supported={**_NO_BIAS, "hidden_activation": ("gelu_pytorch_tanh",)},
        tensors=LLAMA.renamed(
            ("post_attention_layernorm",), pre_feedforward_layernorm=("feed_forward_norm",)
        ),
        activation="hidden_activation",
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        switches={**_GEMMA, "norms": "around", "head_norm": "head"},
        settings={
            **_SOME_WINDOWS,
            "window_theta": "rope_local_base_freq",
            "attention_scale": "query_pre_attn_scalar",
        },
        supported={
            **_NO_BIAS,
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False,),
        },
        tensors=LLAMA.renamed(
            pre_feedforward_layernorm=("feed_forward_norm",),
            **_AFTER,
            **_HEAD_NORMS,
        ),
        activation="hidden_activation",
        own_rotation=True,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        settings={"window": "sliding_window", "rope_width": "partial_rotary_factor"},
        supported=_SILU,
        tensors=_PHI,
        rope_types=("longrope",),
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        switches=_OLMO,
        supported={**_SILU, **_NO_BIAS},
        tensors=LLAMA.renamed(("input_layernorm",), **_AFTER, **_HEAD_NORMS),
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        switches=_OLMO,
        settings={**_SOME_WINDOWS, "window_theta": "rope_theta"},
        supported={**_SILU, **_NO_BIAS},
        tensors=LLAMA.renamed(("input_layernorm",), **_AFTER, **_HEAD_NORMS),
        own_rotation=True,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        settings={"bias": "attention_bias", "unrotated_every": "no_rope_layers"},
        supported={**_SILU, "use_sliding_window": (False,)},
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        switches={"norms": "after", "head_norm": "head"},
        settings={**_SOME_WINDOWS, "unrotated_every": "layer_types"},
        supported=_SILU,
        tensors=LLAMA.renamed(("input_layernorm",), **_AFTER, **_HEAD_NORMS),
    ),
    Family("internlm3", "LlamaForCausalLM", settings={"bias": "attention_bias"}, supported=_SILU),
    Family("iquestcoder", "LlamaForCausalLM", settings={"bias": "attention_bias"}, supported=_SILU),
    Family(
        "granite",
        "GraniteForCausalLM",
        settings={
            "bias": "attention_bias",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention_scale": "attention_multiplier",
            "logit_divisor": "logits_scaling",
        },
        supported=_SILU,
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        switches={"qkv_bias": True},
        supported={
            **_SILU,
            "attention_bias": (True,),
            "attention_out_bias": (False,),
            "mlp_bias": (False,),
        },
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        switches={"norm": "layernorm", "activation": "gelu"},
        settings={"window": "sliding_window"},
        supported={"hidden_act": ("gelu_pytorch_tanh", "gelu_new"), "use_bias": (True,)},
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
        tensors=_GPT2,
        activation="activation_function",
        always_bias=True,
    ),
)
"""The families; a decoder is exported as the first one that can represent it."""

BY_TYPE = {family.model_type: family for family in FAMILIES}
"""`model_type` → family."""
