from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.ops.attention.flex import block_mask
from multipack.ops.attention.masks import document_mask, mask_4d, once_a_batch

none = np.zeros((0, 2), dtype=np.int64)


def batch_of(lengths, pad_to=None):
    documents = [Document(np.zeros(length, dtype=np.uint16), none) for length in lengths]
    return PackedCollator(len(lengths) + 3, 2048, pad_to=pad_to)(documents)


def test_masks_of_two_documents(pack, document):
    batch = pack([document(3), document(2)], pad_to=6)
    mask = document_mask(batch)
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    expected += [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == expected
    windowed = document_mask(batch, window=2)
    expected[2] = [0, 1, 1, 0, 0, 0]
    assert windowed.int().tolist() == expected


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_4d_masks_equal_the_dense_mask(pack, documents, dtype, window):
    visible = document_mask(batch := pack(documents, pad_to=40), window)
    mask = mask_4d(batch, dtype, window)
    assert mask.shape == (1, 1, 40, 40)
    assert torch.equal(mask[0, 0] if dtype is None else mask[0, 0] == 0, visible)
    assert mask.dtype == (dtype or torch.bool)
    assert visible.diagonal().all()  # padding attends to itself: no row is empty
    for options, named in (((torch.int64, window), r"torch.int64"), ((dtype, 0), "window")):
        with pytest.raises(ValueError, match=named):
            mask_4d(batch, *options)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.one_of(st.none(), st.integers(1, 400)),
    st.integers(0, 150),
)
def test_blocks_equal_those_of_create_block_mask(lengths, window, padding):
    batch = batch_of(lengths, sum(lengths) + padding)
    slots, seen = batch.num_slots, document_mask(batch, window)
    ours = block_mask(batch, window)
    theirs = create_block_mask(lambda b, h, q, kv: seen[q, kv], None, None, slots, slots, device="cpu")
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        count, expected = (getattr(mask, name + "_num_blocks") for mask in (ours, theirs))
        assert torch.equal(count, expected)
        for row, number in enumerate(count[0, 0].tolist()):
            got, wanted = (getattr(mask, name + "_indices")[0, 0, row, :number] for mask in (ours, theirs))
            assert torch.equal(got, wanted)
    positions = torch.arange(slots)
    told = ours.mask_mod(torch.tensor(0), torch.tensor(0), positions[:, None], positions)
    assert torch.equal(told, seen)


def test_results_of_a_batch_are_cached_and_freed(pack, documents):
    made = []

    def make():
        made.append(weakref.ref(thing := torch.ones(1)))
        return thing

    batch = pack(documents)
    for key, number in ((("a", None), 1), (("a", None), 1), (("a", 3), 2)):
        once_a_batch(batch, key, make)
        assert len(made) == number
    batch.cu_seqlens.add_(0)  # new bounds in the same tensor
    once_a_batch(batch, ("a", None), make)
    assert len(made) == 3
    del batch
    gc.collect()
    assert not any(reference() is not None for reference in made)
