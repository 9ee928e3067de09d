"""Rules for the base model and its adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multipack.imports.outcome import NOTHING, Honored, Keys, NotHonored
from multipack.shapes import SHAPES
from multipack.shapes.adapter import ALIASES
from multipack.shapes.config_json import language_config
from multipack.shapes.families import BY_TYPE
from multipack.shapes.hub_names import model_type_of
from multipack.shapes.json_values import read_json
from multipack.training.other_names import by_name
from multipack.untrusted import matching

NOT_HERE = by_name(
    {
        "falcon_h1 granitemoehybrid nemotron_h qwen3_next qwen3_5 qwen3_5_moe": "its recurrent layers keep documents of"
        " a pack apart only with the packages causal_conv1d and flash-linear-attention",
        "jamba": "its recurrent layers carry state from one document of a pack into the next",
        "mistral4": "transformers has no causal language model of it",
        "falcon glm_moe_dsa gptj mpt": "its attention computes with its mask",
        "gemma3n lfm2_moe": "not probed: whether it keeps documents of a pack apart is unknown",
        "qwen": "its code is on the hub, and no code of the hub is executed",
        "glm4v lfm2_vl llava mllama paddleocr_vl qwen2_vl voxtral": "images and sound are not trained",
    }
)
"""Types of models that are not trained here → the reason."""
_QUANTIZED = ("nvfp4", "bnb-nf4", "prequantized", "gptq", "awq", "-fp8")
"""Parts of the names of models whose files hold quantized weights."""


LANGUAGE_MODELS = {"gemma3": "gemma3_text", "mistral3": "ministral3"}
"""Type of models with images → type of their language model, which is trained alone."""


def model_type(keys: Keys) -> str:
    """The `model_type` of the base model, by the config.json of a folder, else by its name; empty = unknown."""
    name = str(keys.get("base_model", ""))
    file = Path(name).expanduser() / "config.json"
    if file.is_file():
        return str(language_config(read_json(file)).get("model_type", ""))
    kind = model_type_of(name)
    return LANGUAGE_MODELS.get(kind, kind)


def base_model(value: Any, keys: Keys) -> Honored:
    """The weights to start from, and the architecture where it is not the decoder's."""
    kind, name = model_type(keys), str(value)
    if revision := keys.get("revision_of_model"):
        name = f"{name}@{revision}"
    if reason := NOT_HERE.get(kind):
        raise NotHonored(f"{kind} is not trained here: {reason}")
    if quantized := next((part for part in _QUANTIZED if part in name.lower()), ""):
        raise NotHonored(
            f"its weights are quantized ({quantized.strip('-')}): give a model with weights in 16 bits"
        )
    if not kind:
        return Honored(
            {"train.init_from": name}, "the architecture is not known by this name; the run checks it"
        )
    if kind not in BY_TYPE:
        return Honored({"model": f"hf:{name}"}, f"{kind} is trained with the code of transformers")
    if keys.get("reinit_weights"):
        preset = name.rpartition("/")[2].lower()
        if preset not in SHAPES:
            raise NotHonored(f"reinit_weights: there is no preset {preset}; give model.* and tokenizer.path")
        return Honored({"model": preset, "tokenizer.kind": "transformers", "tokenizer.path": name})
    return Honored({"train.init_from": name})


_TEKKEN_ONLY = ("devstral-small-25", "magistral-small-25", "mistral-small-3")
"""Beginnings of names of models without a tokenizer.json and a chat template."""


def mistral_tokenizer(value: Any, keys: Keys) -> Honored:
    """mistral-common, which writes chats: a chat template in the tokenizer's files replaces it."""
    name = str(keys.get("base_model", "")).rpartition("/")[2].lower()
    if name.startswith(_TEKKEN_ONLY):
        raise NotHonored(
            "chats written by mistral-common: this model comes without a tokenizer.json and a template"
        )
    return Honored(note="chats are written by the template of the tokenizer's files, not by mistral-common")


def quantized_files(value: Any, keys: Keys) -> Honored:
    """The format of quantized weights: MXFP4, which gpt-oss has, is read in 16 bits."""
    dequantized = (keys.get("model_quantization_config_kwargs") or {}).get("dequantize")
    if value == "Mxfp4Config" and dequantized:
        return NOTHING
    raise NotHonored("a quantized model: give one with weights in 16 bits")


def has_decoder(keys: Keys) -> bool:
    """Whether the decoder computes the base model."""
    return model_type(keys) in BY_TYPE


# --- adapters -------------------------------------------------------------------------------------------

_MATRICES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
_LAYERS = ("model.layers.0", "model.language_model.layers.0", "language_model.model.layers.0")


def adapter(value: Any, keys: Keys) -> Honored:
    """LoRA, QLoRA or DoRA."""
    peft = keys.get("peft") or {}
    settings: dict[str, Any] = {"adapter.name": "dora" if keys.get("peft_use_dora") else "lora"}
    if value not in ("lora", "qlora"):
        raise NotHonored(f"adapter={value}: there are lora, qlora and DoRA")
    if value == "qlora" or keys.get("load_in_4bit") or peft.get("weight_dtype") == "nf4":
        double = (keys.get("bnb_config_kwargs") or {}).get("bnb_4bit_use_double_quant", True)
        settings |= {"adapter.quantize": "nf4", "adapter.double_quantize": bool(double)}
    if not (keys.get("lora_target_linear") or keys.get("lora_target_modules")):
        if not has_decoder(keys):
            raise NotHonored(
                "lora_target_modules is missing: peft's defaults for this architecture are not known here"
            )
        settings["adapter.targets"] = ["q_proj", "v_proj"]
    return Honored(settings)


def targets(value: Any, keys: Keys) -> Honored:
    """The adapted matrices, by names or by a regular expression on full names."""
    if keys.get("lora_target_linear"):
        return NOTHING  # all linear layers, these among them
    if isinstance(value, str):
        names = [
            f"{layer}.{module}.{matrix}"
            for module, matrices in _MATRICES.items()
            for matrix in matrices
            for layer in _LAYERS
        ]
        (found,) = matching([value], names, whole=True)
        matched = (
            name.rpartition(".")[2] for name, is_matched in zip(names, found, strict=True) if is_matched
        )
        if not (matches := list(dict.fromkeys(matched))):
            raise NotHonored(f"lora_target_modules={value} matches no matrix of attention or feed-forward")
        return Honored({"adapter.targets": matches})
    names = [str(name).rpartition(".")[2] if has_decoder(keys) else str(name) for name in value]
    if has_decoder(keys) and (unknown := [name for name in names if name not in ALIASES]):
        raise NotHonored(f"{unknown[0]} is no matrix of this decoder: there are {', '.join(ALIASES)}")
    return Honored({"adapter.targets": names})


def quantized_base(value: Any, keys: Keys) -> Honored:
    """`load_in_8bit` and `load_in_4bit`: frozen weights of few bits."""
    if not keys.get("adapter"):
        raise NotHonored("training weights that are held in few bits: give adapter: lora")
    if keys.get("adapter") == "qlora" or keys.get("load_in_4bit"):
        return Honored({"adapter.quantize": "nf4"})
    return Honored({"adapter.quantize": "int8"}, "activations are not quantized: products are in train.dtype")


def peft(value: Any, keys: Keys) -> Honored:
    """Options of peft that are not keys."""
    if other := sorted(set(value) - {"backend", "weight_dtype"}):
        raise NotHonored(f"peft.{other[0]} has no equivalent")
    return NOTHING


def unfrozen(value: Any, keys: Keys) -> Honored:
    """Regular expressions on the names of trained parameters; no effect if they name the whole language model."""
    everything = {"model.language_model", "lm_head"}
    if keys.get("adapter") or everything <= {str(pattern).strip("^.*$") for pattern in value}:
        return NOTHING  # adapters are trained anyway
    raise NotHonored(
        "freezing by regular expressions: name what is frozen in optimizer.rules=[blocks.0 freeze, …]"
    )


def remote_code(value: Any, keys: Keys) -> Honored:
    """Code of the hub, which is not executed; architectures that transformers has do not need it."""
    if not model_type(keys):
        raise NotHonored(
            "no code of the hub is executed, and the architecture is not known by the model's name"
        )
    return NOTHING


def model_class(value: Any, keys: Keys) -> Honored:
    """`model_type`, a class of transformers."""
    if str(value).endswith(("ForCausalLM", "ForConditionalGeneration")) or keys.get("reward_model"):
        return NOTHING
    raise NotHonored(f"model_type={value}: causal language models are trained")
