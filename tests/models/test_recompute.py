"""Activation checkpointing and tiles: equal losses and gradients, and fewer bytes kept."""

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
from multipack.models.recompute import recompute_blocks, tile_layers
from multipack.ops.lora import add_adapters, is_adapter
from multipack.shapes.adapter import AdapterConfig

KINDS = ["full", "selective"]


class Watch(TorchDispatchMode):
    """Operators called, shapes of their outputs, and the storages that they made."""

    def __init__(self):
        super().__init__()
        self.calls, self.made, self.shapes = Counter(), {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls[function.name()] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
                self.shapes.add(tuple(tensor.shape))
        return out


def results(model, batch, autocast=False):
    """Loss, gradients, and the random number that follows."""
    model.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(batch)
    loss.backward()  # outside autocast, as engines do: what is recomputed is cast as it was
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return loss.detach(), gradients, torch.rand(1)


def close(found, expected, tolerance):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert (found[1] - expected[1]).norm() <= tolerance * expected[1].norm()


@pytest.mark.parametrize(
    ("shape", "dropout", "autocast", "tiles"),
    [
        *(
            (name, *case)
            for name in ("gpt2", "llama-gqa")
            for case in ((0.0, True, 1), (0.3, False, 1), (0.3, False, 3))
        ),
        *(("gemma3_text", 0.0, True, 1), ("granite", 0.3, False, 1)),
    ],
    indirect=["shape"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_blocks_equal_kept_ones_bit_for_bit(
    model, documents, pack, kind, dropout, autocast, tiles
):
    for block in model.blocks:
        block.dropout = dropout
    tile_layers(model, tiles)
    batch, names = pack(documents), list(model.state_dict())
    expected = results(model, batch, autocast)
    for used in (kind, "none"):
        recompute_blocks(model, used)
        found = results(model, batch, autocast)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("tiles", [2, 5, 48])
def test_tiles_equal_the_whole(model, documents, pack, tiles):
    whole, batch = copy.deepcopy(model), pack(documents)
    tile_layers(model, tiles)
    assert list(model.state_dict()) == list(whole.state_dict())
    close(results(model, batch), results(whole, batch), 1e-6)
    for each in (model.eval(), whole.eval()):
        each.double()
    close(results(model, batch), results(whole, batch), 1e-13)


@pytest.mark.parametrize("shape", ["llama-gqa"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "tiles", "backend"),
    [
        pytest.param("selective", 1, "aot_eager", marks=pytest.mark.slow),
        pytest.param("full", 3, "aot_eager", marks=pytest.mark.slow),
        pytest.param("none", 3, "aot_eager", marks=pytest.mark.slow),
        pytest.param("selective", 1, "inductor", marks=pytest.mark.slow),
        pytest.param("full", 1, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(shape, documents, pack, kind, tiles, backend):
    torch.compiler.reset()
    model = Decoder(dataclasses.replace(shape, dropout=0.3 if backend == "aot_eager" else 0.0))
    reference, batch = copy.deepcopy(model), pack(documents)
    tile_layers(model, tiles)
    recompute_blocks(model, kind)
    for each in (reference, model):
        compile_blocks(each, backend=backend)
    expected, found = results(reference, batch), results(model, batch)
    close(found, expected, 1e-6)
    assert torch.equal(found[2], expected[2])
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_tiled_feed_forward_is_never_whole(shape, document, pack, kind):
    """Neither forward nor backward, and nothing of its width waits between them."""
    model = Decoder(dataclasses.replace(shape, d_ff=80, context=64))
    batch = pack([document(40, seed=1), document(24, seed=2)])
    tile_layers(model, 4)
    recompute_blocks(model, kind)
    with Watch() as watch:
        loss = model(batch)
        held = [
            alive for alive, size in watch.made.values() if size == 64 // 4 * 80 * 4 and not alive.expired()
        ]
        loss.backward()
    assert not held
    assert {shape[0] for shape in watch.shapes if len(shape) == 2 and shape[1] == 80} <= {
        1,
        16,
        shape.d_model,
    }  # (1, f) is a bias


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_selective_recomputes_no_product_and_no_attention(shape, documents, pack, dropout):
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
    products = (7 if shape.gated else 6) - (not dropout)  # the last output is read by dropout only
    assert again == shape.layers * products
    assert sum(calls["selective"].values()) > sum(calls["none"].values())


@pytest.mark.parametrize("settings", [{"name": "lora"}, {"name": "dora", "quantize": "int8"}])
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("shape", ["llama"], indirect=True)
def test_selective_keeps_no_update_of_an_adapter(shape, documents, pack, settings, tiles):
    """And gives the same losses and gradients."""
    adapter, model, found, calls = AdapterConfig(rank=2, **settings), Decoder(shape), [], []
    add_adapters(model, adapter)
    for name, each in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(each, std=0.1)
    trained = [each for each in model.parameters() if each.requires_grad]
    tile_layers(model, tiles)
    for kind in ("none", "selective", "full"):
        recompute_blocks(model, kind)
        with Watch() as watch:
            loss = model(pack(documents))
            found.append([loss.detach(), *torch.autograd.grad(loss, trained)])
        calls.append(watch.calls["aten::mm"])
    assert all(torch.equal(one, other) for one, *others in zip(*found, strict=True) for other in others)
    assert calls[0] + 6 * shape.layers <= calls[1] < calls[2]


def test_evaluation_recomputes_nothing(model, documents, pack):
    recompute_blocks(model, "full")
    model.eval()
    with Watch() as watch:
        model(pack(documents)).backward()
    assert watch.calls["multipack::document_attention"] == len(model.blocks)


def test_wrong_settings_are_refused(model):
    with pytest.raises(ValueError, match=r"train\.recompute=some .*selective"):
        recompute_blocks(model, "some")
    with pytest.raises(ValueError, match=r"train\.tiles"):
        tile_layers(model, 0)
