"""Blocks computed again on the way back: the same numbers bit for bit, and fewer bytes in between."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.models.compile import compile_blocks
from multipack.models.decoder import Decoder
from multipack.models.recompute import recompute_blocks

KINDS = ["full", "selective"]


class Watch(TorchDispatchMode):
    """What runs beneath autograd, and which bytes are still held of what it made."""

    def __init__(self):
        super().__init__()
        self.calls, self.made = Counter(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls[function.name()] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return out

    def held(self, but=()):
        """Bytes that are alive, without views of the tensors `but`."""
        known = {tensor.untyped_storage()._cdata for tensor in but}
        return sum(
            size for key, (alive, size) in self.made.items() if key not in known and not alive.expired()
        )


def results(model, batch, seed=5):
    """Loss, gradients, and the random number that follows."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(batch)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()], torch.rand(1)


def same(found, expected):
    assert torch.equal(found[0], expected[0])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_same_bit_for_bit(model, documents, pack, kind, dropout):
    for block in model.blocks:
        block.dropout = dropout
    batch, names = pack(documents), list(model.state_dict())
    expected = results(model, batch)
    recompute_blocks(model, kind)
    same(results(model, batch), expected)
    assert list(model.state_dict()) == names
    recompute_blocks(model, "none")
    same(results(model, batch), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["gpt2", "llama-gqa"], indirect=True)
def test_under_autocast(model, documents, pack, kind):
    batch = pack(documents)
    found = []
    for each in ("none", kind):
        recompute_blocks(model, each)
        with torch.autocast("cpu", torch.bfloat16):
            model.zero_grad()
            loss = model(batch)
        loss.backward()  # outside, as engines do: what is computed again is cast as it was
        found.append((loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_compiled_blocks_draw_the_same_dropout(shape, documents, pack, distance, gradients, kind, dropout):
    torch.compiler.reset()
    model = Decoder(dataclasses.replace(shape, dropout=dropout))
    reference, batch = copy.deepcopy(model), pack(documents)
    recompute_blocks(model, kind)
    for each in (reference, model):
        compile_blocks(each, backend="aot_eager")
    expected, found = results(reference, batch), results(model, batch)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert distance(gradients(model), gradients(reference)) < 1e-6
    assert torch.equal(found[2], expected[2])
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
def test_inductor(model, documents, pack, distance, gradients, kind):
    reference, batch = copy.deepcopy(model), pack(documents)
    recompute_blocks(model, kind)
    compile_blocks(model)
    results(model, batch)
    results(reference, batch)
    assert distance(gradients(model), gradients(reference)) < 1e-6
    torch.compiler.reset()


@pytest.mark.parametrize("shape", ["gpt2", "llama-gqa"], indirect=True)
def test_bytes_that_wait_for_the_backward_pass(shape, document, pack):
    """Counted on four layers, and near what the formulas of the module's docstring say."""
    shape = dataclasses.replace(shape, layers=4, d_ff=96, context=64)
    model = Decoder(shape)
    batch = pack([document(40, seed=1), document(24, seed=2)])
    held = {}
    for kind in ("none", "selective", "full"):
        recompute_blocks(model, kind)
        x, rotation = model.embed(batch).detach().requires_grad_(), model.rotation(batch)
        with Watch() as watch:
            for block in model.blocks:
                x = block(x, batch, rotation)
        # One layer's output is in x, whatever was kept; the first one's input was there before.
        held[kind] = watch.held(but=model.parameters()) / (4 * shape.layers * batch.num_slots * shape.d_model)
        del x
    keys = shape.kv_heads * shape.head_width / shape.d_model
    heads = shape.heads * shape.head_width / shape.d_model
    feed_forward = (4 if shape.gated else 2) * shape.d_ff / shape.d_model
    assert held["full"] == pytest.approx(1, rel=0.05)
    selective = 2 + 2 * heads + 2 * keys + feed_forward / 2
    assert held["selective"] == pytest.approx(selective, rel=0.05)
    norms = 0 if shape.norm == "layernorm" else 2  # torch's RMSNorm on a CPU keeps two more
    assert held["none"] == pytest.approx(4 + norms + 2 * heads + 2 * keys + feed_forward, rel=0.1)
    assert held["full"] < 0.15 * held["selective"] < 0.15 * 0.65 * held["none"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("shape", ["gpt2", "llama-gqa"], indirect=True)
def test_selective_computes_no_product_again(shape, documents, pack, dropout):
    model, batch, calls = Decoder(dataclasses.replace(shape, dropout=dropout)), pack(documents), {}
    for kind in ("none", "selective", "full"):
        recompute_blocks(model, kind)
        with Watch() as watch:
            model(batch).backward()
        calls[kind] = watch.calls
    costly = ("aten::mm", "aten::addmm", "multipack::document_attention")
    assert all(calls["selective"][name] == calls["none"][name] for name in costly)
    assert calls["full"]["multipack::document_attention"] == 2 * shape.layers
    again = sum(calls["full"][name] - calls["none"][name] for name in costly[:2])
    products = (7 if shape.gated else 6) - (not dropout)  # the last one's output serves nothing but dropout
    assert again == shape.layers * products
    assert sum(calls["selective"].values()) > sum(calls["none"].values())


def test_evaluation_computes_nothing_again(model, documents, pack):
    recompute_blocks(model, "full")
    model.eval()
    with Watch() as watch:
        model(pack(documents)).backward()
    assert watch.calls["multipack::document_attention"] == len(model.blocks)


def test_other_kinds_are_refused(model):
    with pytest.raises(
        ValueError, match=r"train.recompute=some is unknown; there are none, full and selective"
    ):
        recompute_blocks(model, "some")
