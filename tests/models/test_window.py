"""A decoder with a sliding window."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from multipack.models.decoder import Decoder


@pytest.mark.parametrize("window_layers", [0, 2])
def test_each_layer_sees_its_window(shape, pack, documents, window_layers):
    """Two layers that see three tokens each: the last position depends on at most five tokens."""
    model = Decoder(dataclasses.replace(shape, window=3, window_layers=window_layers)).double()
    batch = pack(documents)
    before = model.hidden(batch)
    end = 20  # of the third document, 12 tokens long
    for distance in range(1, 12):
        changed = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
        changed.input_ids[end - 1 - distance] = (batch.input_ids[end - 1 - distance] + 1) % 50
        after = model.hidden(changed)
        assert torch.equal(before[end - 1], after[end - 1]) == (distance > 4)


def test_a_window_as_long_as_documents_changes_nothing(shape, pack, documents):
    model = Decoder(dataclasses.replace(shape, window=12))
    full = Decoder(shape)
    full.load_state_dict(model.state_dict())
    batch = pack(documents)
    assert torch.equal(model.hidden(batch), full.hidden(batch))
    narrow = Decoder(dataclasses.replace(shape, window=11))
    narrow.load_state_dict(model.state_dict())
    assert not torch.equal(narrow.hidden(batch), full.hidden(batch))


def test_a_window_in_some_layers_is_refused(shape):
    some = dataclasses.replace(shape, window=3, window_layers=1)
    with pytest.raises(ValueError, match=r"window_layers=1 .*window_layers=0.*model.window=0"):
        Decoder(some)
