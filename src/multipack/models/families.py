"""Conversion of a decoder's names, weights and configuration to and from Hugging Face's Llama, Mistral and GPT-2.

    multipack                              Llama, Mistral                      GPT-2
    embedding                              model.embed_tokens                  transformer.wte
    positions                                                                  transformer.wpe
    blocks.N.attention_norm                model.layers.N.input_layernorm      transformer.h.N.ln_1
    blocks.N.attention.query, key, value   ….self_attn.q_proj, k_proj, v_proj  ….attn.c_attn, joined
    blocks.N.attention.output              ….self_attn.o_proj                  ….attn.c_proj
    blocks.N.feed_forward_norm             ….post_attention_layernorm          ….ln_2
    blocks.N.feed_forward.gate, up         ….mlp.gate_proj, up_proj            ….mlp.c_fc
    blocks.N.feed_forward.down             ….mlp.down_proj                     ….mlp.c_proj
    norm                                   model.norm                          transformer.ln_f
    head                                   lm_head                             lm_head

GPT-2 stores matrices as (in, out), the transpose of the others. Both sides rotate the two halves of a head, so rows
keep their order. pretrained.py reads folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from multipack.models.decoder import Decoder
from multipack.shapes import ModelShape


@dataclass(frozen=True)
class Family:
    """Tensor names of a family of Hugging Face models.

    Attributes:
        model_types: values of `model_type` in config.json.
        prefix: prefix of all names except the head's; omitted in files of models without a head.
        layers: name between the prefix and a layer's number.
        outer: Hugging Face's module → the decoder's module, outside of layers.
        inner: Hugging Face's module → the decoder's modules, in a layer; several are joined along their rows.
        transposed: Hugging Face's modules whose matrices are (in, out).
        ignored: pattern of the names of buffers in old files.
    """

    model_types: tuple[str, ...]
    prefix: str
    layers: str
    outer: dict[str, str]
    inner: dict[str, tuple[str, ...]]
    transposed: frozenset[str]
    ignored: re.Pattern[str]

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


LLAMA = Family(
    model_types=("llama", "mistral"),
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
    transposed=frozenset(),
    ignored=re.compile(r".*\.rotary_emb\.inv_freq"),
)
GPT2 = Family(
    model_types=("gpt2",),
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


def family_of(shape: ModelShape) -> Family:
    """The family that can represent a decoder of this shape.

    Raises:
        ValueError: no family can; the message gives the reasons.
    """
    llama = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu"}
    gpt2 = {"positions": "learned", "norm": "layernorm", "activation": "gelu", "kv_heads": shape.heads}
    differing = {
        family: [name for name, value in wanted.items() if getattr(shape, name) != value]
        for family, wanted in (("Llama", llama), ("GPT-2", gpt2))
    }
    if shape.window and shape.bias:
        differing["Llama"] += ["window", "bias"]
    if shape.sliding_layers not in (0, shape.layers):
        differing["Llama"].append("window_layers")
    if shape.window:
        differing["GPT-2"].append("window")
    if shape.head_width * shape.heads != shape.d_model:
        differing["GPT-2"].append("head_dim")
    for name, family in (("Llama", LLAMA), ("GPT-2", GPT2)):
        if not differing[name]:
            return family
    reasons = "; ".join(
        f"{name} has no {', '.join(f'model.{key}={getattr(shape, key)}' for key in keys)}"
        for name, keys in differing.items()
    )
    raise ValueError(f"transformers has no model for this decoder: {reasons}")


def to_huggingface(shape: ModelShape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a decoder's parameters to Hugging Face's; biases that only GPT-2 has are zeros.

    Args:
        shape: shape of the decoder.
        state: the decoder's parameters by name.

    Returns:
        Hugging Face's tensors by name.

    Raises:
        ValueError: see `family_of`.
    """
    family, converted = family_of(shape), dict[str, Tensor]()
    for theirs, ours, transposed in family.modules(shape.layers):
        for kind in ("weight", "bias"):
            parts = [state[f"{name}.{kind}"] for name in ours if f"{name}.{kind}" in state]
            if parts:
                joined = parts[0] if len(parts) == 1 else torch.cat(parts)
                is_transposed = transposed and kind == "weight"
                converted[f"{theirs}.{kind}"] = (joined.t() if is_transposed else joined).contiguous()
        if (
            family is GPT2
            and f"{theirs}.weight" in converted
            and ours[0] not in ("embedding", "positions", "head")
        ):
            weight = converted[f"{theirs}.weight"]
            converted.setdefault(f"{theirs}.bias", weight.new_zeros(weight.shape[-1]))
    return converted


@dataclass(frozen=True)
class Origin:
    """Location of a decoder's parameter in Hugging Face's tensors.

    Attributes:
        name: name of Hugging Face's tensor.
        first, stop: range of its rows (columns, if transposed).
        transposed: whether its matrix is the transpose of the decoder's.
    """

    name: str
    first: int
    stop: int
    transposed: bool

    def of(self, tensor: Any) -> Tensor:
        """The parameter's value, cut from Hugging Face's tensor.

        Args:
            tensor: the tensor, or a lazy slice of a safetensors file, of which only these rows are read.
        """
        rows: Tensor = (
            tensor[:, self.first : self.stop].t() if self.transposed else tensor[self.first : self.stop]
        )
        return rows.contiguous()


def origins(shape: ModelShape) -> dict[str, Origin]:
    """Name → origin of a decoder's parameters, in the order of `parameter_shapes`.

    Raises:
        ValueError: see `family_of`.
    """
    found, sizes = dict[str, Origin](), parameter_shapes(shape)
    for theirs, ours, transposed in family_of(shape).modules(shape.layers):
        for kind in ("weight", "bias"):
            first = 0
            for name in (f"{name}.{kind}" for name in ours if f"{name}.{kind}" in sizes):
                stop = first + sizes[name][0]
                found[name] = Origin(f"{theirs}.{kind}", first, stop, transposed and kind == "weight")
                first = stop
    return {name: found[name] for name in sizes}


def parameter_shapes(shape: ModelShape) -> dict[str, torch.Size]:
    """Name → shape of a decoder's parameters, without allocating them.

    Raises:
        ValueError: see `Decoder`.
    """
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(shape).named_parameters()}


def build_decoder(shape: ModelShape, state: Mapping[str, Tensor], attention: str = "auto") -> Decoder:
    """Build a decoder in evaluation mode whose parameters are these tensors, without a copy.

    Args:
        shape: shape of the decoder.
        state: its parameters by name.
        attention: name of an attention backend, or `"auto"`.

    Raises:
        ValueError: names or shapes of the parameters do not match `shape`.
    """
    with torch.device("meta"):
        model = Decoder(shape, attention=attention)
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if sizes != {name: tensor.shape for name, tensor in state.items()}:
        raise ValueError("the weights do not fit the decoder's shape")
    model.load_state_dict(dict(state), assign=True)
    return model.eval()


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The content of a config.json for the same model in transformers.

    Raises:
        ValueError: see `family_of`.
    """
    common = {"vocab_size": shape.vocabulary_size, "tie_word_embeddings": shape.tied, "use_cache": True}
    if family_of(shape) is GPT2:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **common,
            "n_embd": shape.d_model,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.d_ff,
            "n_positions": shape.context,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": shape.norm_eps,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
        }
    variant = (
        {"sliding_window": shape.window}
        if shape.window
        else {"attention_bias": shape.bias, "mlp_bias": shape.bias}
    )
    return {
        "architectures": ["MistralForCausalLM" if shape.window else "LlamaForCausalLM"],
        "model_type": "mistral" if shape.window else "llama",
        **common,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        # Both spellings: transformers 4 reads the first, 5 the second.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_dropout": 0.0,
        **variant,
    }


def decoder_shape(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape of the decoder that is equivalent to the model of a config.json.

    Args:
        config: the file's content.
        where: the file's name in error messages.

    Raises:
        ValueError: the family or a setting is not supported; the message names it.
    """
    kind = config.get("model_type")
    if kind not in (*LLAMA.model_types, *GPT2.model_types):
        known = ", ".join((*LLAMA.model_types, *GPT2.model_types))
        why = " (it has biases in query, key and value only)" if kind == "qwen2" else ""
        raise ValueError(f"{where}: model_type={kind!r}{why} is not supported; choose one of {known}")
    differing = [f"{name}={config[name]!r}" for name in _unsupported(config, kind) if name in config]
    if differing:
        raise ValueError(f"{where}: {', '.join(differing)} is not supported by this decoder")
    try:
        shape = ModelShape.from_huggingface(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    biased = kind in GPT2.model_types or bool(config.get("attention_bias"))
    # In these families a sliding window applies to all layers or to none.
    return replace(shape, bias=biased, window_layers=0)


def _unsupported(config: Mapping[str, Any], kind: Any) -> Iterator[str]:
    """Names of settings whose values this decoder does not support."""
    if config.get("quantization_config"):
        yield "quantization_config"
    if kind in GPT2.model_types:
        if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
            yield "activation_function"
        if not config.get("scale_attn_weights", True):
            yield "scale_attn_weights"
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if config.get(name):
                yield name
        return
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield "hidden_act"
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        if scaling is not None and not _plain_rotation(scaling):
            yield name
    if bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        yield from ("attention_bias", "mlp_bias")


def _plain_rotation(scaling: Any) -> bool:
    if not isinstance(scaling, Mapping):
        return False
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return bool(kind == "default" and scaling.get("partial_rotary_factor", 1.0) == 1.0)
