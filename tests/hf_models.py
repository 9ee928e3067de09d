"""Tiny models of transformers in folders, runs that train them, and shapes of all families."""

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch

from multipack.data.text.tokenizer import byte_tokenizer
from multipack.shapes import ModelShape
from multipack.shapes.families import BY_TYPE

SIZES = {
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
MORE = {
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": True},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 8,
    },
    "gpt_oss": {"num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 8, "sliding_window": 3},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 24, "dropout": 0.0},
    "cohere": {"num_key_value_heads": 2, "logit_scale": 0.5},
    "phi": {"resid_pdrop": 0.0},
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 8,
        "num_key_value_heads": 4,
    },
    "phi3": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 40,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 9.0]},
    },
    "phimoe": {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 40,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 2.0],
            "long_factor": [3.0, 9.0],
            "short_mscale": 1.2,
            "long_mscale": 1.4,
            "original_max_position_embeddings": 40,
        },
    },
    "llama": {"max_position_embeddings": 40, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "jamba": {"num_key_value_heads": 2, "num_experts": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False},
}


def save_model(kind, folder, dtype=torch.float32, change=None, **sizes):
    """A tiny model of this kind with random weights that `change` changes, and its folder with a tokenizer of bytes."""
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **MORE.get(kind, {}), **sizes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
        if change is not None:
            change(model)
    with redirect_stderr(StringIO()):
        model.save_pretrained(folder)
    byte_tokenizer().save(Path(folder) / "tokenizer.json")
    return model


def dequantize(quantize, model):
    """Replace the matrices of linear layers and experts of blocks by the values that quantized ones stand for."""
    for weight in quantized_matrices(model):
        weight.copy_(quantize(weight.flatten(0, -2)).to(torch.float32).view(weight.shape))


def quantized_matrices(model):
    """The matrices of linear layers and experts of blocks."""
    parameters = [
        (module, *each)
        for module in model.model.layers.modules()
        for each in module.named_parameters(recurse=False)
    ]
    return [
        each
        for module, name, each in parameters
        if each.dim() == 3 or (isinstance(module, torch.nn.Linear) and name == "weight")
    ]


def short_run(tmp_path):
    """Words of a run of four steps on short documents, without a model."""
    file = tmp_path / "documents.jsonl"
    lines = [json.dumps({"text": "abcdefghij"[number % 7 :] * 3}) for number in range(60)]
    file.write_text("\n".join(lines) + "\n")
    plan = "plan.capacity=64 plan.packs_per_step=2 plan.window=4"
    steps = "train.steps=4 train.eval_every=0 train.checkpoint_every=2 train.device=cpu train.dtype=fp32"
    return ["data=jsonl", f"data.path={file}", *plan.split(), *steps.split()]


def run_words(tmp_path, folder):
    """Words of a run of four steps of the model of transformers in a folder."""
    return [*short_run(tmp_path), *f"log.every=0 optimizer.lr=0.01 model=hf:{folder}".split()]


_SOME_WINDOWS = {"window": 3, "full_every": 2}
_LONG = {"rope_type": "longrope", "rope_factor": 4.0, "rope_context": 4}
_YARN = {"rope_type": "yarn", "rope_factor": 4.0, "head_dim": 16}
FAMILY_SHAPES = {
    "gpt2": {"bias": True},
    "gpt2-no-bias": {},
    "llama": {},
    "llama-gqa": {"kv_heads": 2, "head_dim": 6},
    "llama-untied-bias": {"kv_heads": 1, "tied": False, "bias": True, "rope_theta": 50.0},
    "llama3": {"kv_heads": 2, "head_dim": 16, "rope_theta": 5e5, "rope_factor": 32.0},
    "linear": {"rope_type": "linear", "rope_factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_factor": 4.0, "context": 6},
    "yarn": {**_YARN, "rope_context": 64, "rope_theta": 50.0},
    "longrope": {**_LONG, "rope_factors": (1.0, 1.1, 1.5, 2.5, 1.2, 2.0, 4.0, 9.0)},
    "mistral": {"window": 3},
    "ministral3": {
        **_YARN,
        "rope_context": 4,
        "rope_attention": 1.0,
        "attention_growth": 0.5,
        "kv_heads": 2,
    },
    "ministral": _SOME_WINDOWS,
    "qwen2": {"kv_heads": 2},
    "qwen3": {"kv_heads": 2, "head_dim": 12},
    "gemma": {},
    "gemma2": {
        **_SOME_WINDOWS,
        "kv_heads": 2,
        "attention_scale": 5**-0.5,
        "attention_cap": 2.0,
        "logit_cap": 3.0,
    },
    "vaultgemma": {**_SOME_WINDOWS, "attention_scale": 5**-0.5, "logit_cap": 3.0},
    "gemma3_text": {
        **_SOME_WINDOWS,
        "kv_heads": 2,
        "attention_scale": 5**-0.5,
        "window_theta": 20.0,
        "rope_theta": 100.0,
        "rope_type": "linear",
        "rope_factor": 8.0,
    },
    "phi3": {"kv_heads": 2, "head_dim": 16, "rope_width": 12, "window": 5, "tied": False},
    "phi3-long": {
        **_LONG,
        "head_dim": 8,
        "rope_width": 6,
        "window": 20,
        "tied": False,
        "rope_attention": 1.3,
        "rope_factors": (1.0, 1.1, 1.5, 2.0, 4.0, 9.0),
    },
    "olmo2": {"tied": False},
    "olmo3": {
        **_SOME_WINDOWS,
        "tied": False,
        "kv_heads": 2,
        "rope_attention": 1.5,
        "window_theta": 10_000.0,
        "rope_type": "yarn",
        "rope_factor": 8.0,
    },
    "exaone4": {**_SOME_WINDOWS, "unrotated_every": 2},
    "smollm3": {"kv_heads": 2, "unrotated_every": 2},
    "granite": {
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "attention_scale": 0.0625,
        "logit_divisor": 49.0,
    },
    "seed_oss": {"kv_heads": 2, "tied": False},
    "starcoder2": {"bias": True, "kv_heads": 2, "window": 4},
}
"""Families and variants of them, and of Llama → their values beside the family's switches."""


def family_shape(name):
    """A small `ModelShape` of two layers."""
    small = {"layers": 2, "heads": 4, "kv_heads": 4, "d_model": 32, "d_ff": 48}
    family = BY_TYPE.get(name.partition("-")[0], BY_TYPE["llama"])
    return ModelShape(
        **{**small, "vocabulary_size": 50, "context": 16, **family.switches_of(32), **FAMILY_SHAPES[name]}
    )
