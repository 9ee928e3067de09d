"""Document weighting and alignment: losses and gradients equal those of documents alone."""

import dataclasses

import pytest
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.models.decoder import Decoder


@pytest.fixture
def collate():
    """(documents, options of the collator) → PackedBatch."""
    return lambda documents, **options: PackedCollator(max_documents=8, max_seqlen=64, pad_id=3, **options)(
        documents
    )


def gradients_of(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("loss_weighting", ["token", "document"])
def test_padding_changes_no_loss_and_no_gradient(model, documents, collate, distance, loss_weighting):
    tight = collate(documents, loss_weighting=loss_weighting)
    padded = collate(documents, pad_to=64, loss_weighting=loss_weighting)
    assert padded.num_slots > tight.num_slots
    losses = model(tight), model(padded)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    assert distance(gradients_of(model, losses[1]), gradients_of(model, losses[0])) < 1e-6


@pytest.mark.parametrize("shape", ["gpt2"], indirect=True)
def test_padding_may_exceed_the_position_table_but_documents_may_not(shape, document, collate):
    model = Decoder(dataclasses.replace(shape, context=9))
    fits = [document(9), document(5)]
    assert model(collate(fits, pad_to=32)).item() == pytest.approx(model(collate(fits)).item(), rel=1e-6)
    with pytest.raises(ValueError, match="a document of 10 tokens is longer than the table"):
        model(collate([document(10)], pad_to=16))
