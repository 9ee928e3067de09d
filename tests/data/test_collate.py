import numpy as np
import pytest
import torch

from multipack.data.batch import IGNORE
from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.documents import Document


def document(tokens, *spans):
    ranges = np.array(spans or [(0, len(tokens))], dtype=np.int64).reshape(-1, 2)
    return Document(np.array(tokens, dtype=np.uint16), ranges)


A = document([5, 6, 7, 8, 9], (2, 5))
B = document([3, 4])
C = document([1])


def test_a_pack_is_its_documents_end_to_end():
    batch = PackedCollator(max_documents=3, max_seqlen=6)([A, B, C])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 3, 4, 1]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert batch.targets.tolist() == [IGNORE, 7, 8, 9, IGNORE, 4, IGNORE, IGNORE]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 8, 8]
    assert batch.lengths == (5, 2, 1)
    assert (batch.num_documents, batch.num_tokens, batch.num_target_tokens, batch.num_slots) == (3, 8, 4, 8)
    assert batch.max_seqlen == 6
    assert batch.cu_seqlens.dtype == torch.int32
    assert {batch.input_ids.dtype, batch.targets.dtype, batch.position_ids.dtype} == {torch.int64}


def test_fixed_shape_is_free_shape_and_one_document_of_padding():
    free = PackedCollator(max_documents=3, max_seqlen=6)([A, B])
    fixed = PackedCollator(max_documents=3, max_seqlen=6, pad_to=12, pad_id=2)([A, B])
    assert fixed.input_ids.tolist() == [*free.input_ids.tolist(), 2, 2, 2, 2, 2]
    assert fixed.targets.tolist() == [*free.targets.tolist(), *[IGNORE] * 5]
    assert fixed.position_ids.tolist() == [*free.position_ids.tolist(), 0, 1, 2, 3, 4]
    assert fixed.cu_seqlens.tolist() == [0, 5, 7, 12, 12]
    assert free.cu_seqlens.shape == fixed.cu_seqlens.shape
    assert (fixed.num_tokens, fixed.num_target_tokens) == (free.num_tokens, free.num_target_tokens)
    assert fixed.lengths == (5, 2, 5)
    full = PackedCollator(max_documents=3, max_seqlen=6, pad_to=7)([A, B])
    assert full.lengths == (5, 2)


def test_every_pack_of_a_plan_has_the_same_shapes():
    collate = PackedCollator(max_documents=4, max_seqlen=5, pad_to=10)
    shapes = {
        (tuple(batch.input_ids.shape), tuple(batch.cu_seqlens.shape), batch.max_seqlen)
        for batch in (collate(pack) for pack in ([A], [A, B, C], [B, B, B, B], []))
    }
    assert shapes == {((10,), (6,), 10)}


@pytest.mark.parametrize("pad_to", [None, 8])
def test_an_empty_pack_is_a_weightless_document(pad_to):
    batch = PackedCollator(max_documents=2, max_seqlen=4, pad_to=pad_to)([])
    slots = pad_to or 1
    assert batch.lengths == (slots,)
    assert batch.cu_seqlens.tolist() == [0, slots, slots, slots]
    assert batch.targets.tolist() == [IGNORE] * slots
    assert (batch.num_documents, batch.num_tokens, batch.num_target_tokens) == (0, 0, 0)


def test_targets_never_cross_documents():
    rng = np.random.default_rng(0)
    for _ in range(50):
        documents = [document(rng.integers(0, 99, rng.integers(1, 9))) for _ in range(rng.integers(1, 6))]
        batch = PackedCollator(max_documents=6, max_seqlen=9, pad_to=64)(documents)
        ends = np.cumsum(batch.lengths)
        assert (batch.targets[ends - 1] == IGNORE).all()
        inside = np.flatnonzero(batch.targets.numpy() != IGNORE)
        assert (batch.targets[inside] == batch.input_ids[inside + 1]).all()
        assert batch.num_target_tokens == sum(len(each.tokens) - 1 for each in documents)


def test_too_much_is_refused():
    with pytest.raises(ValueError, match="3 documents in one pack, but the plan has at most 2"):
        PackedCollator(max_documents=2, max_seqlen=5)([A, B, C])
    with pytest.raises(ValueError, match="7 tokens does not fit into pad_to=6"):
        PackedCollator(max_documents=2, max_seqlen=5, pad_to=6)([A, B])
    with pytest.raises(ValueError, match="a document of 5 tokens exceeds max_seqlen=4"):
        PackedCollator(max_documents=2, max_seqlen=4)([A])


def test_padding_gives_rows_of_one_width():
    batch = PaddedCollator(pad_id=9)([A, B])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 3, 4, 9, 9, 9]
    assert batch.targets.tolist() == [IGNORE, 7, 8, 9, IGNORE, 4, *[IGNORE] * 4]
    assert batch.cu_seqlens.tolist() == [0, 5, 10]
    assert (batch.num_tokens, batch.num_target_tokens, batch.lengths) == (7, 4, (5, 5))


def test_to_moves_tensors_and_keeps_the_rest():
    batch = PackedCollator(max_documents=3, max_seqlen=6)([A, B])
    moved = batch.to("meta")
    assert moved.input_ids.device.type == moved.cu_seqlens.device.type == "meta"
    assert moved.lengths == batch.lengths
