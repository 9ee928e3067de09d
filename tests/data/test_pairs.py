"""Preference pairs as two documents of one pack."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from multipack.data.packs.batch import PackedBatch
from multipack.data.packs.collate import PackedCollator, PreferenceBatch, PreferenceCollator, PreferencePairs
from multipack.data.views.documents import Documents
from multipack.data.views.shared_prefixes import SharedPrefixes
from multipack.planning.options import PlanOptions


@pytest.fixture
def plan():
    """Limits of a plan: three pairs in a pack, forty tokens."""
    return SimpleNamespace(most_documents=3, longest=40, min_prefix=None, loss_weighting="document")


@pytest.fixture
def documents(write_pairs):
    """Two pairs: a prompt of 2, answers of 3 and 4; a prompt of 1, answers of 5 and 2."""
    return Documents.whole(write_pairs([(2, 3, 4), (1, 5, 2)]))


@pytest.mark.parametrize(
    ("pair", "answer"), [((2, 0, 3), "chosen"), ((2, 3, 0), "rejected"), ((0, 1, 2), "chosen")]
)
def test_an_answer_without_targets_is_refused_and_named(write_pairs, pair, answer):
    with pytest.raises(ValueError, match=f"pair0: the {answer} answer has no target"):
        PreferencePairs(Documents.whole(write_pairs([pair])))[0]


def test_a_pair_fits_if_its_distinct_tokens_do(write_pairs):
    pairs = Documents.whole(write_pairs([(20, 3, 4), (1, 5, 2), (1, 30, 4)]))
    kept, report = pairs.fit(30, "drop", min_prefix=8)
    assert kept.lengths.tolist() == [47, 9]
    assert (report.documents, report.tokens) == (1, 36)
    assert pairs.fit(30, "drop")[0].lengths.tolist() == [9]
    items = SharedPrefixes.of(kept, "pairs", PlanOptions(capacity=30, packs_per_step=1), min_prefix=8).items()
    assert sorted(items.slots.tolist()) == [9, 27]


def test_a_pack_of_pairs_is_a_pack_of_their_answers(plan, documents):
    reference = np.array([[-1.0, -2.0], [-3.0, -4.0]])
    pairs = PreferencePairs(documents, reference)
    batch = PreferenceCollator.of(plan)([pairs[0], pairs[1]])
    plain = PackedCollator(6, 40)([*documents.members(0), *documents.members(1)])
    for name in ("input_ids", "targets", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    assert batch.lengths == (5, 6, 6, 3)
    assert (batch.denominator, batch.num_documents) == (2, 4)
    assert (batch.reference.tolist(), batch.reference.dtype) == (reference.tolist(), torch.float64)
    moved = batch.to("meta")
    assert isinstance(moved, PreferenceBatch)
    assert moved.reference.device.type == moved.input_ids.device.type == "meta"


def test_fixed_shapes_end_in_a_padding_document(plan, documents):
    batch = PreferenceCollator.of(plan, pad_to=40, pad_id=7)([PreferencePairs(documents)[0]])
    assert (batch.num_slots, batch.num_documents, len(batch.cu_seqlens)) == (40, 2, 4)
    assert batch.input_ids[-1] == 7
    assert batch.reference is None


def test_a_pack_without_pairs_is_weightless(plan):
    batch = PreferenceCollator.of(plan)([])
    assert isinstance(batch, PackedBatch)
    assert (batch.denominator, batch.reference.shape) == (0, (0, 2))


def test_impossible_batches_are_refused(plan, documents):
    pair = PreferencePairs(documents)[0]
    with pytest.raises(ValueError, match="8 documents in one pack, but the plan has at most 6"):
        PreferenceCollator.of(plan)([pair] * 4)
