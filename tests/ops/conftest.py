"""Documents, packs and padded rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.documents import Document


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(7)


@pytest.fixture
def document():
    """(length, seed) → Document."""

    def make(length: int, seed: int = 0) -> Document:
        tokens = np.random.default_rng([seed, length]).integers(0, 50, length).astype(np.uint16)
        return Document(tokens, np.array([[0, length]], dtype=np.int64))

    return make


@pytest.fixture
def documents(document):
    """Five documents of unequal lengths, one of a single token."""
    return [document(length, seed=index) for index, length in enumerate((7, 1, 12, 3, 9))]


@pytest.fixture
def pack():
    """(documents, pad_to) → PackedBatch."""

    def make(documents, pad_to=None):
        return PackedCollator(max_documents=8, max_seqlen=64, pad_to=pad_to, pad_id=3)(documents)

    return make


@pytest.fixture
def pad():
    """Documents → PackedBatch of padded rows."""
    return PaddedCollator(pad_id=3)


@pytest.fixture
def distance():
    """(a, b) → ‖a − b‖ / ‖b‖ over all elements."""
    return lambda a, b: ((a - b).norm() / b.norm()).item()
