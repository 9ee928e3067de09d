"""Activation checkpointing and tiles with shards, divided tensors and divided tokens."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models.decoder import PARALLEL_PLAN, Decoder
from multipack.models.recompute import recompute_blocks, tile_layers
from multipack.parallel.context import divide_context
from multipack.parallel.tensor import divide_tensors
from multipack.shapes import ModelShape

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, d_model=32, d_ff=48, vocabulary_size=50, context=64)
LENGTHS = [(20, 9, 33), (5, 30)]


def batch_of(rank, pad_to=None):
    draw = np.random.default_rng(rank)
    documents = [
        Document(draw.integers(0, 50, length).astype(np.uint16), np.array([[rank, length]], dtype=np.int64))
        for length in LENGTHS[rank]
    ]
    return PackedCollator(8, 64, pad_to=pad_to)(documents)


def case_tensors(world, kind, tiles):
    """Loss and gradients of a model whose tensors two ranks divide, with the same pack."""
    model = model_of()
    divide_tensors(model, init_device_mesh("cpu", (world.size,)), PARALLEL_PLAN)
    tile_layers(model, tiles)
    recompute_blocks(model, kind)
    loss = model(batch_of(0, pad_to=64))
    loss.backward()
    return loss.item(), {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


def case_context(world, method, kind):
    """Summed loss and gradients of two ranks that divide the tokens of one pack."""
    model = model_of()
    share = divide_context(model, init_device_mesh("cpu", (world.size,)), method)
    recompute_blocks(model, kind)
    loss = model(share(batch_of(0, pad_to=64)))
    loss.backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
    return world.sum([loss.item()])[0], {name: p.grad.numpy() for name, p in model.named_parameters()}


def model_of():
    torch.manual_seed(3)
    return Decoder(SHAPE)


def case_shards(world, kind, tiles):
    """Loss of this rank, and gradients of the whole model."""
    model = model_of()
    tile_layers(model, tiles)
    recompute_blocks(model, kind)
    mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(batch_of(world.rank))
    (loss * world.size).backward()  # FSDP takes the mean over ranks
    return loss.item(), {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "tiles"), [("full", 1), ("selective", 1), ("none", 3), ("full", 3)])
def test_shards_equal_one_process(pools, kind, tiles):
    found = pools(2).run(case_shards, kind, tiles)
    model = model_of()
    losses = [model(batch_of(rank)) for rank in (0, 1)]
    sum(losses).backward()
    for found_here, expected in zip(found, losses, strict=True):
        compare(found_here, expected, model)


@pytest.mark.parametrize(("kind", "tiles"), [("full", 1), ("selective", 1), ("none", 3), ("full", 3)])
def test_divided_tensors_equal_one_process(pools, kind, tiles):
    found = pools(2).run(case_tensors, kind, tiles)
    model = model_of()
    expected = model(batch_of(0, pad_to=64))
    expected.backward()
    for found_here in found:
        compare(found_here, expected, model)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_divided_tokens_equal_one_process(pools, method, kind):
    found = pools(2).run(case_context, method, kind)
    model = model_of()
    expected = model(batch_of(0, pad_to=64))
    expected.backward()
    for found_here in found:
        compare(found_here, expected, model)


def compare(found, expected, model):
    loss, gradients = found
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert list(gradients) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        distance = np.linalg.norm(gradients[name] - parameter.grad.numpy())
        assert distance < 1e-5 * np.linalg.norm(parameter.grad.numpy()), name
