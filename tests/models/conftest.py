"""Small shapes of all families, and models of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_models import family_shape
from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.shapes import ModelShape


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


@pytest.fixture(params=["gpt2", "llama-gqa"])
def shape(request) -> ModelShape:
    """By default two shapes with all switches between them; `indirect` parametrization takes any of `FAMILY_SHAPES`."""
    return family_shape(request.param)


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
