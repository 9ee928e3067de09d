"""Small shapes of both families, and a plain reference decoder."""

from __future__ import annotations

import dataclasses
import math

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
def reference_logits():
    """(model, tokens) → (l, V) float64 logits of one document, written out from the papers."""

    def norm(shape, x, weights, name):
        if shape.norm == "layernorm":
            x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(
                x.var(-1, unbiased=False, keepdim=True) + shape.norm_eps
            )
        else:
            x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + shape.norm_eps)
        x = x * weights[name + ".weight"]
        return x + weights[name + ".bias"] if name + ".bias" in weights else x

    def linear(x, weights, name):
        y = x @ weights[name + ".weight"].T
        return y + weights[name + ".bias"] if name + ".bias" in weights else y

    def turn(x, theta):
        count, _, width = x.shape
        y = torch.empty_like(x)
        for i in range(width // 2):
            angle = torch.arange(count, dtype=torch.float64) * theta ** (-2 * i / width)
            c, s = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
            a, b = x[..., i], x[..., i + width // 2]
            y[..., i], y[..., i + width // 2] = a * c - b * s, a * s + b * c
        return y

    def attend(shape, x, weights, name):
        count, width = x.shape[0], shape.head_width
        q, k, v = (
            linear(x, weights, f"{name}.{part}").view(count, -1, width) for part in ("query", "key", "value")
        )
        if shape.positions == "rope":
            q, k = turn(q, shape.rope_theta), turn(k, shape.rope_theta)
        heads = []
        for head in range(shape.heads):
            kv = head // (shape.heads // shape.kv_heads)
            scores = q[:, head] @ k[:, kv].T / math.sqrt(width)
            scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
            heads.append(torch.softmax(scores, -1) @ v[:, kv])
        return linear(torch.cat(heads, -1), weights, name + ".output")

    def logits(model, tokens):
        shape = model.shape
        weights = {name: value.detach().double() for name, value in model.state_dict().items()}
        tokens = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
        x = weights["embedding.weight"][tokens]
        if shape.positions == "learned":
            x = x + weights["positions.weight"][: len(tokens)]
        for layer in range(shape.layers):
            block = f"blocks.{layer}"
            x = x + attend(
                shape, norm(shape, x, weights, block + ".attention_norm"), weights, block + ".attention"
            )
            y = norm(shape, x, weights, block + ".feed_forward_norm")
            up = linear(y, weights, block + ".feed_forward.up")
            if shape.activation == "swiglu":
                gate = linear(y, weights, block + ".feed_forward.gate")
                up = up * gate * torch.sigmoid(gate)
            else:
                up = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
            x = x + linear(up, weights, block + ".feed_forward.down")
        head = weights["embedding.weight" if shape.tied else "head.weight"]
        return norm(shape, x, weights, "norm") @ head.T

    return logits


@pytest.fixture
def gradients():
    """Model → one flat vector of all its gradients."""
    return lambda model: torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
