"""Steps on meta tensors, which have no values: every operation that would wait for a device raises."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.ops.attention import table
from multipack.shapes import SHAPES


@pytest.fixture
def _varlen(monkeypatch):
    """`auto` chooses on meta tensors what it chooses on GPUs."""
    (row,) = (row for row in table.BACKENDS if row.name == "varlen")
    there = dataclasses.replace(row, devices=("meta",), generations=None)
    monkeypatch.setattr(table, "BACKENDS", (there,))
    # Autocast knows no meta tensors, and is not used here.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: nullcontext())


class Copies(TorchDispatchMode):
    """Bytes of each tensor of the host that an operator reads for a result on the device."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if any(x.is_meta for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self.sizes += [x.nbytes for x in read if not x.is_meta]
        return out


@pytest.mark.parametrize("name", ["llama-1b", "gpt2"])
@pytest.mark.usefixtures("_varlen")
def test_a_step_never_waits_for_the_device(name):
    shape = SHAPES[name].with_vocabulary(SHAPES[name].vocabulary_size or 50_304)
    lengths, spans = (700, 300, 20), np.array([[5, 20]])
    batch = PackedCollator(4, 1024)([Document(np.zeros(length, np.uint32), spans) for length in lengths])
    with torch.device("meta"):
        model = Decoder(shape).bfloat16()
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            loss = model.train(trains)(batch.to("meta"))
    with Copies() as copies:
        model.train()(batch.to("meta")).backward()
    slots, bounds = 8 * batch.num_slots, 4 * 4
    assert sorted(copies.sizes) == [bounds, slots, slots, slots]  # of a pack: four copies, 24 bytes a slot
    assert loss.is_meta
    assert all(parameter.grad.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        loss.item()
