"""Preference pairs as two documents of one pack."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from multipack.data.batch import IGNORE, PackedBatch
from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.data.preference import (
    PreferenceBatch,
    PreferenceCollator,
    PreferencePair,
    PreferencePairs,
    halves,
)


def pair_document(prompt, chosen, rejected, seed=0):
    """A document of prompt + chosen, prompt + rejected, with the prompts no targets."""
    border, total = prompt + chosen, 2 * prompt + chosen + rejected
    tokens = np.random.default_rng([seed, total]).integers(0, 50, total).astype(np.uint16)
    spans = np.array([[prompt, border], [border + prompt, total]], dtype=np.int64)
    return Document(tokens, spans, border=border)


class View:
    """What `PreferencePairs` asks of documents."""

    def __init__(self, documents):
        self._documents = documents

    def __len__(self):
        return len(self._documents)

    def __getitem__(self, index):
        return self._documents[index]

    def names(self, index):
        return f"pairs.jsonl:{index + 1}"


@pytest.fixture
def plan():
    """A plan's word on packs: three pairs at most, forty tokens."""
    return SimpleNamespace(most_documents=3, longest=40, align=1, loss_weighting="document")


def test_the_halves_are_the_documents_that_were_joined():
    document = pair_document(prompt=3, chosen=4, rejected=2)
    chosen, rejected = halves(document)
    assert np.array_equal(np.concatenate([chosen.tokens, rejected.tokens]), document.tokens)
    assert chosen.spans.tolist() == [[3, 7]]
    assert rejected.spans.tolist() == [[3, 5]]
    assert (chosen.shifted_targets() != IGNORE).sum() == 4
    assert (rejected.shifted_targets() != IGNORE).sum() == 2


def test_a_target_that_runs_over_the_border_is_cut_there():
    document = Document(np.arange(9, dtype=np.uint16), np.array([[0, 9]]), border=5)
    chosen, rejected = halves(document)
    assert chosen.spans.tolist() == [[0, 5]]
    assert rejected.spans.tolist() == [[0, 4]]
    assert rejected.shifted_targets().tolist() == [6, 7, 8, IGNORE]


@pytest.mark.parametrize("border", [0, 9, -1])
def test_a_document_without_a_border_is_refused_and_named(border):
    document = Document(np.arange(9, dtype=np.uint16), np.array([[0, 9]]), border=border)
    with pytest.raises(
        ValueError, match=rf"pairs\.jsonl:1: a document of 9 tokens with border={border} is no"
    ):
        PreferencePairs(View([document]))[0]


@pytest.mark.parametrize(
    ("spans", "half"), [([[5, 9]], "chosen"), ([[1, 4]], "rejected"), ([[0, 1], [6, 9]], "chosen")]
)
def test_a_half_without_targets_is_refused(spans, half):
    document = Document(np.arange(9, dtype=np.uint16), np.array(spans), border=5)
    with pytest.raises(ValueError, match=f"the {half} half of this preference pair has no target"):
        halves(document)


def test_a_pack_of_pairs_is_a_pack_of_their_halves(plan):
    documents = [pair_document(2, 3, 4), pair_document(1, 5, 2, seed=1)]
    reference = np.array([[-1.0, -2.0], [-3.0, -4.0]])
    pairs = PreferencePairs(View(documents), reference)
    batch = PreferenceCollator.of(plan)([pairs[0], pairs[1]])
    each = [half for document in documents for half in halves(document)]
    plain = PackedCollator(6, 40)(each)
    for name in ("input_ids", "targets", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    assert batch.lengths == (5, 6, 6, 3)
    assert (batch.num_pairs, batch.denominator, batch.num_documents) == (2, 2, 4)
    assert batch.reference.tolist() == reference.tolist()
    assert batch.reference.dtype == torch.float64


def test_moving_a_batch_moves_its_reference_too(plan):
    pairs = PreferencePairs(View([pair_document(2, 3, 4)]), np.zeros((1, 2)))
    batch = PreferenceCollator.of(plan)([pairs[0]]).to("meta")
    assert isinstance(batch, PreferenceBatch)
    assert batch.reference.device.type == batch.input_ids.device.type == "meta"
    assert batch.denominator == 1


def test_fixed_shapes_end_in_a_padding_document(plan):
    batch = PreferenceCollator.of(plan, pad_to=40, pad_id=7)(
        [PreferencePair(*halves(pair_document(2, 3, 4)))]
    )
    assert batch.num_slots == 40
    assert batch.input_ids[-1] == 7
    assert batch.num_documents == 2
    assert len(batch.cu_seqlens) == 8
    assert batch.reference is None


def test_a_pack_without_pairs_is_weightless(plan):
    batch = PreferenceCollator.of(plan)([])
    assert isinstance(batch, PackedBatch)
    assert batch.denominator == 0
    assert batch.reference.shape == (0, 2)


def test_what_does_not_go_together_is_refused(plan):
    pair = PreferencePair(*halves(pair_document(2, 3, 4)))
    known = PreferencePair(pair.chosen, pair.rejected, np.zeros(2))
    with pytest.raises(ValueError, match="only 1 of 2 pairs have reference values"):
        PreferenceCollator.of(plan)([pair, known])
    with pytest.raises(ValueError, match=r"plan\.align=8 does not go with preference pairs"):
        PreferenceCollator.of(SimpleNamespace(**{**vars(plan), "align": 8}))
    with pytest.raises(ValueError, match=r"1 pairs need reference values \(1, 2\), got \(2, 2\)"):
        PreferencePairs(View([pair_document(2, 3, 4)]), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="8 documents in one pack, but the plan has at most 6"):
        PreferenceCollator.of(plan)([pair] * 4)
