"""Names, weights and configuration of a decoder, to and from Hugging Face's models.

The families are in shapes/families.py. GPT-2 stores matrices as (in, out), the transpose of the others. All families
rotate the two halves of a head, so rows keep their order. pretrained.py reads folders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multipack.models.decoder import Decoder
from multipack.models.foreign import foreign_names
from multipack.shapes import SIZES, ModelShape, read_json
from multipack.shapes.config_json import LLAMA3_SCALING, rotated_layers
from multipack.shapes.families import BY_TYPE, FAMILIES, SQRT_WIDTH, Family

_FREE = (
    *(
        "layers",
        "heads",
        "kv_heads",
        "d_model",
        "d_ff",
        "vocabulary_size",
        "context",
        "head_dim",
        "tied",
        "dropout",
    ),
    *("norm_eps", "rope_theta", "rope_type", "rope_factor", "rope_context", "rope_attention", "unsupported"),
    "rope_factors",
    *("window_layers", "qkv_bias", "scores", "family"),
)
"""Fields that models of every family choose, or that are compared by their effect."""
_SCORE = "score.weight"
"""The head of scores, here and in transformers."""
_CLASSIFIERS = {"gemma3_text": "Gemma3TextForSequenceClassification", "granite": "", "vaultgemma": ""}
"""Family → class of transformers with a head of scores, where its name does not follow from the architecture's."""


def family_of(shape: ModelShape) -> Family:
    """The family of the file that a shape is of; of other shapes the first one that can represent the decoder.

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


def _differing(shape: ModelShape, family: Family) -> list[str]:
    """Fields of a shape that a family does not have."""
    default = ModelShape(layers=1).to_dict()
    fixed = {name: value for name, value in default.items() if name not in (*_FREE, *family.settings)}
    fixed |= family.switches
    if fixed.get("embedding_scale") == SQRT_WIDTH:
        fixed["embedding_scale"] = math.sqrt(shape.d_model)
    if family.always_bias:  # missing ones are zeros
        fixed.pop("bias")
    found = [name for name, value in fixed.items() if getattr(shape, name) != value]
    if not (shape.bias or family.always_bias) and shape.qkv_bias != family.switches.get("qkv_bias", False):
        found.append("qkv_bias")
    if shape.rope_factor != 1.0 and shape.rope_type not in family.rope_types:
        found.append("rope_type")
    if family.settings.get("unrotated_every") == "layer_types" and shape.unrotated_every != shape.full_every:
        found.append("unrotated_every")
    found += ["window_layers"] if shape.window_layers not in (0, shape.layers) else []
    scalar = (shape.attention_scale or shape.head_width**-0.5) ** -2
    if (
        family.settings.get("attention_scale") == "query_pre_attn_scalar"
        and abs(scalar - round(scalar)) > 1e-6
    ):
        found.append("attention_scale")
    if fixed["positions"] == "learned":
        found += ["kv_heads"] if shape.kv_heads != shape.heads else []
        found += ["head_dim"] if shape.head_width * shape.heads != shape.d_model else []
    return list(dict.fromkeys(found))


def to_huggingface(shape: ModelShape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a decoder's parameters to Hugging Face's; biases that only the family has are zeros.

    Args:
        shape: shape of the decoder.
        state: the decoder's parameters by name.

    Returns:
        Hugging Face's tensors by name.

    Raises:
        ValueError: see `family_of`.
    """
    if shape.architecture:
        return {theirs: state[ours] for ours, theirs in foreign_names(shape).items() if ours in state}
    family, converted = family_of(shape), dict[str, Tensor]()
    for theirs, ours, transposed in family.tensors.modules(shape.layers):
        for kind in ("weight", "bias"):
            parts = [state[f"{name}.{kind}"] for name in ours if f"{name}.{kind}" in state]
            if parts:
                joined = parts[0] if len(parts) == 1 else torch.cat(parts)
                is_transposed = transposed and kind == "weight"
                converted[f"{theirs}.{kind}"] = (joined.t() if is_transposed else joined).contiguous()
        weight = converted.get(f"{theirs}.weight")
        if weight is not None and family.always_bias and ours[0] not in ("embedding", "positions", "head"):
            converted.setdefault(f"{theirs}.bias", weight.new_zeros(weight.shape[-1]))
    return converted | ({_SCORE: state[_SCORE]} if _SCORE in state else {})


def modules_of(shape: ModelShape) -> list[tuple[str, tuple[str, ...], bool]]:
    """Hugging Face's module, the decoder's modules, and whether Hugging Face's matrix is transposed, for all modules.

    Raises:
        ValueError: see `family_of`.
    """
    if not shape.architecture:
        return list(family_of(shape).tensors.modules(shape.layers))
    pairs = [
        (ours.rpartition(".")[0], theirs.rpartition(".")[0]) for ours, theirs in foreign_names(shape).items()
    ]
    return [(theirs, (ours,), False) for ours, theirs in dict.fromkeys(pairs)]


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
    for theirs, ours, transposed in family_of(shape).tensors.modules(shape.layers):
        for kind in ("weight", "bias"):
            first = 0
            for name in (f"{name}.{kind}" for name in ours if f"{name}.{kind}" in sizes):
                stop = first + sizes[name][0]
                rows = slice(first, stop)
                found[name] = Origin(f"{theirs}.{kind}", rows, transposed and kind == "weight")
                first = stop
    if shape.scores:
        found[_SCORE] = Origin(_SCORE, slice(0, shape.scores), False)
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
    family = family_of(shape)
    names = {name: getattr(shape, field) for field, (name, *_) in SIZES.items()}
    common = {
        "architectures": [family.architecture],
        **(_classifier(shape, family) if shape.scores else {}),
        "model_type": family.model_type,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "pad_token_id": None,  # some families have one beyond small vocabularies
        family.activation: next(iter(family.supported[family.activation])),
    }
    if family.model_type == "gpt2":
        return {
            **common,
            **{second: getattr(shape, field) for field, (_, second, *_) in SIZES.items()},
            "layer_norm_epsilon": shape.norm_eps,
            **dict.fromkeys(("embd_pdrop", "resid_pdrop"), shape.dropout),
            "attn_pdrop": 0.0,
        }
    fixed = {
        name: values[0]
        for name, values in family.supported.items()
        if name not in (family.activation, "hidden_activation")
    }
    epsilon = "norm_epsilon" if shape.norm == "layernorm" else "rms_norm_eps"
    return {
        **common,
        **names,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        epsilon: shape.norm_eps,
        "attention_dropout": 0.0,
        **fixed,
        **_written_rotation(shape, family),
        **_written_settings(shape, family),
    }


def _classifier(shape: ModelShape, family: Family) -> dict[str, Any]:
    """The settings of a model with scores."""
    name = re.sub("ForCausalLM|LMHeadModel", "ForSequenceClassification", family.architecture)
    name = _CLASSIFIERS.get(family.model_type, name)
    if not name:
        raise ValueError(
            f"transformers has no {family.model_type} with scores (…ForSequenceClassification): train a reward model"
            " from another family"
        )
    labels = {f"LABEL_{number}": number for number in range(shape.scores)}
    return {
        "architectures": [name],
        "id2label": {str(number): label for label, number in labels.items()},
        "label2id": labels,
    }


def _written_settings(shape: ModelShape, family: Family) -> dict[str, Any]:
    """The settings of a family, as in config.json."""
    found: dict[str, Any] = {}
    for field, name in family.settings.items():
        value = getattr(shape, field)
        if field == "bias":
            found |= {name: value} | ({"mlp_bias": value} if name == "attention_bias" else {})
        elif field in ("window", "attention_cap", "logit_cap"):
            found[name] = value or None
        elif field == "full_every":
            kinds = ("full_attention", "sliding_attention")
            found[name] = [kinds[shape.window_of(layer) > 0] for layer in range(shape.layers)]
            found |= {"sliding_window_pattern": value} if value else {}
        elif field == "rope_width":
            found[name] = shape.rotary_width / shape.head_width
        elif name in ("layer_types", "llama_4_scaling_beta"):
            continue  # written with `full_every`, and in rope_parameters
        elif field == "unrotated_every":
            found |= {name: rotated_layers(shape.layers, value), "use_sliding_window": False}
            found |= {"no_rope_layer_interval": value} if value else {}
        elif field == "attention_scale":
            value = value or shape.head_width**-0.5
            found[name] = value if name.endswith("multiplier") else round(value**-2)
        elif field == "window_theta":
            found |= {name: value or shape.rope_theta} if name != "rope_theta" else {}
        else:
            found[name] = value
    return found


def _written_rotation(shape: ModelShape, family: Family) -> dict[str, Any]:
    """The settings of rotary positions in both spellings: transformers 4 reads the first, 5 the second."""
    scaling: dict[str, Any] = {}
    before: dict[str, Any] = {}
    if shape.rope_factor != 1.0:
        scaling = {"rope_type": shape.rope_type, "factor": shape.rope_factor}
        if shape.rope_type in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = shape.rope_context
        if shape.rope_type == "llama3":
            scaling |= LLAMA3_SCALING
        if shape.rope_type in ("yarn", "longrope") and shape.rope_attention:
            scaling["attention_factor"] = shape.rope_attention
        if shape.rope_type == "longrope":
            half = len(shape.rope_factors) // 2
            scaling["short_factor"] = [*shape.rope_factors[:half]]
            scaling["long_factor"] = [*shape.rope_factors[half:]]
            before["original_max_position_embeddings"] = shape.rope_context
            if shape.rope_factor == shape.context / shape.rope_context:
                del scaling["factor"]  # transformers 4 expects no more of Phi-3 than the lists
    if shape.attention_growth:
        scaling = {"rope_type": "default", **scaling, "llama_4_scaling_beta": shape.attention_growth}
        scaling["original_max_position_embeddings"] = shape.rope_context
    plain = {"rope_type": "default", "rope_theta": shape.rope_theta}
    both: dict[str, Any] = {**plain, **scaling, **before}
    if "rope_width" in family.settings:
        both["partial_rotary_factor"] = shape.rotary_width / shape.head_width
    if family.own_rotation:
        local = {**plain, "rope_theta": shape.window_theta or shape.rope_theta}
        both = {"full_attention": both, "sliding_attention": local}
    old = {"rope_theta": shape.rope_theta, **({"rope_scaling": scaling} if scaling else {})}
    return {**old, **before, "rope_parameters": both}


def scores_of(config: Mapping[str, Any]) -> int:
    """The number of scores of the model of a config.json, whose default is 2; 0 = it has logits."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    is_classifier = name.endswith("ForSequenceClassification")
    return len(config.get("id2label") or (0, 1)) if is_classifier else 0


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: `text_config` of a model with images, or all."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or not text:
        return config
    return {"model_type": f"{config.get('model_type')}_text", **text}


def language_name(name: str) -> str:
    """A tensor's name in a model with images → its name in the language model alone; empty if it is no part of that.

    Older files have `language_model.model.layers…`, newer ones `model.language_model.layers…`.
    """
    if name.startswith("lm_head."):
        return name
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.") if name.startswith("language_model.") else ""


def decoder_shape(source: Mapping[str, Any] | Path) -> ModelShape:
    """The shape of the decoder that is equivalent to the model of a config.json.

    Args:
        source: the file's content, or its path.

    Raises:
        ValueError: the family or a setting is not supported; the message names it.
        FileNotFoundError: the file does not exist.
    """
    where = source if isinstance(source, Path) else "config.json"
    config = language_config(read_json(source) if isinstance(source, Path) else source)
    kind = str(config.get("model_type"))
    if kind not in BY_TYPE:
        raise ValueError(
            f"{where}: model_type={kind!r} is not supported; choose one of {', '.join(BY_TYPE)}, or use model=hf:FOLDER"
        )
    try:
        shape = ModelShape.from_huggingface(config)
        shape = replace(shape, scores=scores_of(config))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    problem = f"{shape.unsupported} is not supported by this decoder" if shape.unsupported else ""
    if not problem and shape.window_layers not in (0, shape.layers):
        problem = (
            f"layer_types gives windows to {shape.window_layers} of {shape.layers} layers in no pattern of this"
            " decoder, which has them in all layers, or in all but every n-th"
        )
    if problem:
        raise ValueError(
            f"{where}: {problem}; use model=hf:{Path(where).parent if where is source else 'FOLDER'}"
        )
    return shape
