import numpy as np
import pytest
import torch

from multipack.data.packs.collate import PackedCollator, pad_documents
from multipack.data.views.documents import IGNORE, Document
from multipack.planning.plan import plan


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
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 8]
    assert batch.lengths == (5, 2, 1)
    assert (batch.num_documents, batch.num_tokens, batch.num_target_tokens, batch.num_slots) == (3, 8, 4, 8)
    assert batch.max_seqlen == 128
    assert batch.cu_seqlens.dtype == torch.int32
    assert {batch.input_ids.dtype, batch.targets.dtype, batch.position_ids.dtype} == {torch.int64}


def test_fixed_shape_is_free_shape_and_one_document_of_padding():
    free = PackedCollator(max_documents=3, max_seqlen=6)([A, B])
    fixed = PackedCollator(max_documents=3, max_seqlen=6, pad_to=12, pad_id=2)([A, B])
    assert fixed.input_ids.tolist() == [*free.input_ids.tolist(), 2, 2, 2, 2, 2]
    assert fixed.targets.tolist() == [*free.targets.tolist(), *[IGNORE] * 5]
    assert fixed.position_ids.tolist() == [*free.position_ids.tolist(), 0, 1, 2, 3, 4]
    assert fixed.cu_seqlens.tolist() == [0, 5, 7, 12]
    assert (fixed.num_tokens, fixed.num_target_tokens) == (free.num_tokens, free.num_target_tokens)
    assert fixed.lengths == (5, 2, 5)
    full = PackedCollator(max_documents=3, max_seqlen=6, pad_to=7)([A, B])
    assert full.lengths == (5, 2)


@pytest.mark.parametrize(("pad_to", "multiple", "slots"), [(None, 1, 1), (8, 1, 8), (None, 4, 4)])
def test_an_empty_pack_is_a_weightless_document(pad_to, multiple, slots):
    batch = PackedCollator(max_documents=2, max_seqlen=4, pad_to=pad_to, multiple=multiple)([])
    assert batch.lengths == (slots,)
    assert batch.cu_seqlens.tolist() == [0, slots]
    assert batch.targets.tolist() == [IGNORE] * slots
    assert (batch.num_documents, batch.num_tokens, batch.num_target_tokens) == (0, 0, 0)


def test_padding_gives_rows_of_one_width():
    batch = pad_documents([A, B], 9, "document")
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 3, 4, 9, 9, 9]
    assert batch.targets.tolist() == [IGNORE, 7, 8, 9, IGNORE, 4, *[IGNORE] * 4]
    assert batch.cu_seqlens.tolist() == [0, 5, 10]
    assert (batch.num_tokens, batch.num_target_tokens, batch.lengths) == (7, 4, (5, 5))
    packed = PackedCollator(max_documents=3, max_seqlen=5, loss_weighting="document")([A, B])
    assert batch.weights.tolist() == [*packed.weights.tolist(), 0, 0, 0]
    assert batch.denominator == packed.denominator == 2


def test_every_document_has_the_same_weight():
    shape = {"max_documents": 3, "max_seqlen": 8, "pad_to": 24}
    batch = PackedCollator(**shape, loss_weighting="document")([A, B, C])
    third = np.float32(1 / 3)
    assert batch.weights[batch.targets != IGNORE].tolist() == [third, third, third, 1]
    assert (batch.weights[batch.targets == IGNORE] == 0).all()
    assert batch.weights.dtype == torch.float32
    assert batch.denominator == 2  # C has no target
    token = PackedCollator(**shape)([A, B, C])
    assert token.weights is None
    assert token.targets.tolist() == batch.targets.tolist()
    assert token.denominator == token.num_target_tokens


def test_a_prompt_without_an_answer_weighs_nothing():
    prompt_only = document([1, 2, 3], (0, 1))
    batch = PackedCollator(max_documents=2, max_seqlen=6, loss_weighting="document")([prompt_only, B])
    assert batch.weights.tolist() == [0, 0, 0, 1, 0]
    assert batch.denominator == 1
    empty = PackedCollator(max_documents=2, max_seqlen=6, loss_weighting="document")([])
    assert empty.weights.tolist() == [0]
    assert empty.denominator == 0


def test_a_collator_takes_from_a_plan_what_both_must_agree_in():
    made = plan([3, 9, 5, 1], capacity=16, packs_per_step=2, loss_weighting="document")
    collate = PackedCollator.of(made, pad_to=16, pad_id=7)
    assert collate == PackedCollator(made.most_documents, 9, 16, 7, "document")


@pytest.mark.parametrize(
    ("options", "documents", "complaint"),
    [
        ({"max_documents": 2}, [A, B, C], "3 documents in one pack, but the plan has at most 2"),
        ({"pad_to": 6}, [A, B], "7 tokens does not fit into pad_to=6"),
        ({"max_seqlen": 4}, [A], "a document of 5 tokens exceeds max_seqlen=4"),
        ({"loss_weighting": "sequence"}, [], "'sequence' is unknown; choose one of token, document"),
        ({"pad_to": 10, "multiple": 4}, [], r"pad_to=10 is not a multiple of 4.*use 8"),
        ({"multiple": 0}, [], "multiple"),
    ],
)
def test_impossible_packs_are_refused(options, documents, complaint):
    with pytest.raises(ValueError, match=complaint):
        PackedCollator(**{"max_documents": 3, "max_seqlen": 8, **options})(documents)


@pytest.mark.parametrize("fixed", [False, True])
def test_kernels_start_few_thread_blocks_without_work(fixed):
    """Attention kernels start ⌈max_seqlen / 128⌉ thread blocks for every entry of `cu_seqlens`, and head.

    One document of a pack that is much longer than the others sets the number for all: a factor of 5 is near the
    least that one launch per pack can have. Bounds of the whole plan would make it 380.
    """
    draw = np.random.default_rng(0).lognormal(np.log(120), 1.0, 4000)  # lengths of a chat corpus
    made = plan(np.clip(draw, 2, 8192).astype(np.int64), capacity=8192, packs_per_step=4)
    collate = PackedCollator.of(made, pad_to=8192 if fixed else None)
    launched, working = 0, 0
    for step in range(made.num_steps):
        for pack in made.packs(step):
            batch = collate([document(np.zeros(length)) for length in made.lengths[pack]])
            launched += batch.max_seqlen // 128 * (len(batch.cu_seqlens) - 1)
            working += sum(-(-length // 128) for length in batch.lengths)
    assert launched <= 6 * working
    assert made.longest // 128 * made.most_documents * made.num_packs > 100 * working
