"""Small shapes of all families, and models of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.shapes import ModelShape

VOCABULARY = 50


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(7)


@pytest.fixture
def single():
    """Tokens → PackedBatch of one document without targets."""

    def make(tokens):
        none = np.zeros((0, 2), dtype=np.int64)
        return PackedCollator(1, len(tokens))([Document(np.asarray(tokens, dtype=np.uint32), none)])

    return make


def make_shape(name: str) -> ModelShape:
    """Two layers of each family and its variants."""
    small = ModelShape(
        layers=2, heads=4, kv_heads=4, d_model=32, d_ff=48, vocabulary_size=VOCABULARY, context=16
    )
    gpt2 = dataclasses.replace(small, positions="learned", norm="layernorm", activation="gelu", bias=True)
    gemma = {"norm": "rmsnorm+1", "activation": "geglu", "embedding_scale": 32**0.5}
    some_windows = {"window": 3, "full_every": 2}
    changes = {
        "llama": {},
        "llama-gqa": {"kv_heads": 2, "head_dim": 6},
        "llama-untied-bias": {"kv_heads": 1, "tied": False, "bias": True, "rope_theta": 50.0},
        "llama3": {"kv_heads": 2, "head_dim": 16, "rope_theta": 5e5, "rope_factor": 32.0},
        "linear": {"rope_type": "linear", "rope_factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "rope_factor": 4.0, "context": 6},
        "yarn": {
            "rope_type": "yarn",
            "rope_factor": 4.0,
            "rope_context": 64,
            "head_dim": 16,
            "rope_theta": 50.0,
        },
        "longrope": {
            "rope_type": "longrope",
            "rope_factor": 4.0,
            "rope_context": 4,
            "rope_factors": (1.0, 1.1, 1.5, 2.5, 1.2, 2.0, 4.0, 9.0),
        },
        "mistral": {"window": 3},
        "ministral3": {
            "rope_type": "yarn",
            "rope_factor": 4.0,
            "rope_context": 4,
            "rope_attention": 1.0,
            "attention_growth": 0.5,
            "kv_heads": 2,
            "head_dim": 16,
        },
        "ministral": some_windows,
        "qwen2": {"kv_heads": 2, "qkv_bias": True},
        "qwen3": {"kv_heads": 2, "head_norm": "head", "head_dim": 12},
        "gemma": gemma,
        "gemma2": {
            **gemma,
            **some_windows,
            "norms": "around",
            "kv_heads": 2,
            "attention_scale": 5**-0.5,
            "attention_cap": 2.0,
            "logit_cap": 3.0,
        },
        "vaultgemma": {**gemma, **some_windows, "attention_scale": 5**-0.5, "logit_cap": 3.0},
        "gemma3_text": {
            **gemma,
            **some_windows,
            "norms": "around",
            "head_norm": "head",
            "kv_heads": 2,
            "attention_scale": 5**-0.5,
            "window_theta": 20.0,
            "rope_theta": 100.0,
            "rope_type": "linear",
            "rope_factor": 8.0,
        },
        "phi3": {"kv_heads": 2, "head_dim": 16, "rope_width": 12, "window": 5, "tied": False},
        "phi3-long": {
            "head_dim": 8,
            "rope_width": 6,
            "window": 20,
            "tied": False,
            "rope_type": "longrope",
            "rope_factor": 4.0,
            "rope_context": 4,
            "rope_attention": 1.3,
            "rope_factors": (1.0, 1.1, 1.5, 2.0, 4.0, 9.0),
        },
        "olmo2": {"norms": "after", "head_norm": "all", "tied": False},
        "olmo3": {
            "norms": "after",
            "head_norm": "all",
            "tied": False,
            "kv_heads": 2,
            "rope_attention": 1.5,
            **some_windows,
            "window_theta": 10_000.0,
            "rope_type": "yarn",
            "rope_factor": 8.0,
        },
        "exaone4": {"norms": "after", "head_norm": "head", **some_windows, "unrotated_every": 2},
        "smollm3": {"kv_heads": 2, "unrotated_every": 2},
        "granite": {
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "attention_scale": 0.0625,
            "logit_divisor": 49.0,
        },
        "seed_oss": {"kv_heads": 2, "qkv_bias": True, "tied": False},
        "starcoder2": {"norm": "layernorm", "activation": "gelu", "bias": True, "kv_heads": 2, "window": 4},
    }
    if name.startswith("gpt2"):
        return dataclasses.replace(gpt2, bias=name == "gpt2")
    return dataclasses.replace(small, **changes[name])


@pytest.fixture(params=["gpt2", "llama-gqa"])
def shape(request) -> ModelShape:
    """By default two shapes with all switches between them; `indirect` parametrization takes any of `make_shape`."""
    return make_shape(request.param)


@pytest.fixture
def model(shape):
    """A decoder of that shape whose weights (norms and biases too) are all far from their initial values."""
    model = Decoder(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture
def gradients():
    """Model → one flat vector of all its gradients."""
    return lambda model: torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
