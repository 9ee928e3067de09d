"""Names, weights and configuration of a decoder, to and from Hugging Face's Llama, Mistral, Qwen2 and GPT-2.

The tables `LLAMA` and `GPT2` pair Hugging Face's modules (`theirs`) with the decoder's (`ours`). GPT-2 stores matrices
as (in, out), the transpose of the others. Both rotate the two halves of a head, so rows keep their order. pretrained.py
reads folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multipack.models.decoder import Decoder
from multipack.shapes import LLAMA3_SCALING, SIZES, ModelShape, is_llama3, read_json


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
        ignored: pattern of the names of buffers in old files, which are no parameters.
        supported: setting in config.json → the values for which the decoder computes the same.
    """

    model_types: tuple[str, ...]
    prefix: str
    layers: str
    outer: dict[str, str]
    inner: dict[str, tuple[str, ...]]
    transposed: frozenset[str]
    ignored: re.Pattern[str]
    supported: dict[str, tuple[Any, ...]]

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
    model_types=("llama", "mistral", "qwen2"),
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
    supported={"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)},
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
    supported={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
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
    if shape.window and (shape.bias or shape.qkv_bias):
        differing["Llama"] += ["window", "bias" if shape.bias else "qkv_bias"]
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
        weight = converted.get(f"{theirs}.weight")
        if weight is not None and family is GPT2 and ours[0] not in ("embedding", "positions", "head"):
            converted.setdefault(f"{theirs}.bias", weight.new_zeros(weight.shape[-1]))
    return converted


class Origin(NamedTuple):
    """Location of a decoder's parameter: rows (or columns, if transposed) of one of Hugging Face's tensors."""

    name: str
    rows: slice
    transposed: bool

    def of(self, tensor: Any) -> Tensor:
        """The parameter's value, from the tensor or from a lazy slice of a safetensors file."""
        part: Tensor = tensor[:, self.rows].t() if self.transposed else tensor[self.rows]
        return part.contiguous()


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
                rows = slice(first, stop)
                found[name] = Origin(f"{theirs}.{kind}", rows, transposed and kind == "weight")
                first = stop
    return {name: found[name] for name in sizes}


def parameter_shapes(shape: ModelShape) -> dict[str, torch.Size]:
    """Name → shape of a decoder's parameters, without allocating them.

    Raises:
        ValueError: see `Decoder`.
    """
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(shape).named_parameters()}


def build_decoder(shape: ModelShape, state: Mapping[str, Tensor]) -> Decoder:
    """Build a decoder in evaluation mode whose parameters are these tensors, without a copy.

    Args:
        shape: shape of the decoder.
        state: its parameters by name.

    Raises:
        RuntimeError: names or shapes of the parameters do not match `shape`.
    """
    with torch.device("meta"):
        model = Decoder(shape)
    model.load_state_dict(dict(state), assign=True)
    return model.eval()


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The content of a config.json for the same model in transformers.

    Raises:
        ValueError: see `family_of`.
    """
    is_gpt2 = family_of(shape) is GPT2
    common = {
        **{names[int(is_gpt2)]: getattr(shape, field) for field, names in SIZES.items()},
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
    }
    if is_gpt2:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **common,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": shape.norm_eps,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
        }
    architecture, kind = "LlamaForCausalLM", "llama"
    own: dict[str, Any] = {"attention_bias": shape.bias, "mlp_bias": shape.bias}
    if shape.window:
        architecture, kind, own = "MistralForCausalLM", "mistral", {"sliding_window": shape.window}
    elif shape.qkv_bias and not shape.bias:
        architecture, kind, own = "Qwen2ForCausalLM", "qwen2", {"use_sliding_window": False}
    rotation: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_factor != 1.0:
        rotation = {"rope_type": "llama3", "factor": shape.rope_factor, **LLAMA3_SCALING}
        own["rope_scaling"] = rotation
    return {
        "architectures": [architecture],
        "model_type": kind,
        **common,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        # Both spellings: transformers 4 reads the first, 5 the second.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {**rotation, "rope_theta": shape.rope_theta},
        "attention_dropout": 0.0,
        **own,
    }


def decoder_shape(source: Mapping[str, Any] | Path) -> ModelShape:
    """The shape of the decoder that is equivalent to the model of a config.json.

    Args:
        source: the file's content, or its path.

    Raises:
        ValueError: the family or a setting is not supported; the message names it.
        FileNotFoundError: the file does not exist.
    """
    where = source if isinstance(source, Path) else "config.json"
    config = read_json(source) if isinstance(source, Path) else source
    kind = str(config.get("model_type"))
    known = {name: family for family in (LLAMA, GPT2) for name in family.model_types}
    if kind not in known:
        raise ValueError(f"{where}: model_type={kind!r} is not supported; choose one of {', '.join(known)}")
    family = known[kind]
    differing = [name for name, values in family.supported.items() if config.get(name) not in (None, *values)]
    differing += [
        name for name in ("rope_scaling", "rope_parameters") if not _known_rotation(config.get(name))
    ]
    if config.get("quantization_config"):
        differing.append("quantization_config")
    if bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        differing += [name for name in ("attention_bias", "mlp_bias") if name in config]
    if differing:
        found = ", ".join(f"{name}={config[name]!r}" for name in differing)
        raise ValueError(f"{where}: {found} is not supported by this decoder")
    try:
        shape = ModelShape.from_huggingface(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    # In these families a sliding window applies to all layers or to none.
    return replace(shape, bias=family is GPT2 or bool(config.get("attention_bias")), window_layers=0)


def _known_rotation(scaling: Any) -> bool:
    if scaling is None:
        return True
    if not isinstance(scaling, Mapping):
        return False
    is_plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    return (is_plain or is_llama3(scaling)) and scaling.get("partial_rotary_factor", 1.0) == 1.0
