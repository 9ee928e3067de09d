"""Small shapes of both families, and models of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
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
    return {
        "gpt2": gpt2,
        "gpt2-no-bias": dataclasses.replace(gpt2, bias=False),
        "llama": small,
        "llama-gqa": dataclasses.replace(small, kv_heads=2, head_dim=6),
        "llama-untied-bias": dataclasses.replace(small, kv_heads=1, tied=False, bias=True, rope_theta=50.0),
        "llama3": dataclasses.replace(small, kv_heads=2, head_dim=16, rope_theta=5e5, rope_factor=32.0),
        "qwen2": dataclasses.replace(small, kv_heads=2, qkv_bias=True),
    }[name]


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
