"""Quantized experts: the module of transformers beside one with the values that its matrices stand for."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from multipack.ops.experts import QuantizedExperts
from multipack.ops.int8 import Int8
from multipack.ops.lora import add_adapters, quantize
from multipack.ops.nf4 import Nf4
from multipack.shapes.adapter import AdapterConfig

transformers = pytest.importorskip("transformers", "5.2", reason="transformers >= 5.2 is not installed")
FORMATS = {"nf4": Nf4, "int8": Int8}


def model_of(way):
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(hidden_size=64, intermediate_size=128, num_local_experts=4)
    config._experts_implementation = way
    model = nn.Module()
    model.blocks = nn.ModuleList([MixtralExperts(config)])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_compute_with_dequantized_matrices_and_keep_none(way, name, monkeypatch):
    torch.manual_seed(0)
    config = AdapterConfig("lora", quantize=name)
    model = model_of(way)
    expected = model_of(way).requires_grad_(False)
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        one.copy_(quantize(other, config).to(torch.float32).view(other.shape))
    add_adapters(model, config)
    assert isinstance(model.blocks[0], QuantizedExperts)
    assert {each.dtype for each in model.parameters()} == {torch.uint8}

    made, original = [], FORMATS[name].to

    def to(self, dtype):
        found = original(self, dtype)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(FORMATS[name], "to", to)
    x, experts = torch.randn(9, 64), torch.tensor([[0, 3]] * 5 + [[3, 1]] * 4)  # none for expert 2
    results, share = [], torch.rand(9, 2)
    for each, recomputed in ((model, False), (model, True), (expected, False)):
        each.blocks[0].recomputed = recomputed
        given = x.clone().requires_grad_()
        compute = partial(checkpoint, each.blocks[0], use_reentrant=False) if recomputed else each.blocks[0]
        made.clear()
        out = compute(given, experts, share)
        if each is model:
            assert len(made) == 2
            # That way of transformers gathers copies.
            assert all(found() is None for found in made) or (way == "batched_mm" and not recomputed)
        out.square().sum().backward()
        results.append((out.detach(), given.grad))
    for one, again, other in zip(*results, strict=True):
        assert torch.equal(one, again)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_experts_of_a_frozen_model_have_the_dtype_of_products():
    model = model_of("eager")
    model.blocks.append(nn.LayerNorm(4))
    add_adapters(model, AdapterConfig("lora"), torch.bfloat16)
    assert {each.dtype for each in model.blocks[0].parameters()} == {torch.bfloat16}
    assert model.blocks[1].weight.dtype == torch.float32
