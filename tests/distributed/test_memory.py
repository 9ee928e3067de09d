"""Bytes that ranks hold, counted at named instants, against the formulas of docs/parallel/zero.md."""

import sys
from functools import partial
from pathlib import Path

import pytest
import sharding as tiny
import torch

from multipack.parallel.build import replicate
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ParallelConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from parallel_tables.held import bytes_held

INSTANTS = ("rest", "forward", "backward", "step")


def expected_bytes(data, parameters, outside, ranks, instant, gathered=4):
    """Formulas for float32 shards and AdamW, where shards are even; `outside`: parameters outside of blocks."""
    shards = {"ddp": 1, "zero1": 1, "hsdp": ranks // 2}.get(data, ranks)
    held = 4 * parameters / shards
    if instant == "forward":
        held += gathered * {"zero2": parameters, "zero3": outside, "hsdp": outside}.get(data, 0)
    bucketed = data in ("ddp", "zero1")
    gradients = 4 * parameters / shards if bucketed or instant in ("backward", "step") else 0
    owners = ranks if data == "zero1" else shards
    return {"parameters": held, "gradients": gradients, "optimizer": 8 * parameters / owners}


def measured(world, data, dtype=torch.float32, micro_batches=2):
    """Bytes at every instant of the second step; before the first there is no optimizer state."""
    engine = tiny.engine_of(world, ParallelConfig(data=data), tiny.LLAMA, dtype=dtype)
    count = partial(bytes_held, engine.modules, engine.optimizer)
    found = {}

    def after_forward(*_):
        found.setdefault("forward", count())

    engine.model.register_forward_hook(after_forward)
    for step in range(2):
        found = {"rest": count()}
        packs, targets = tiny.packs_of_step(step, world.size, micro_batches)
        engine.forward_backward(packs[world.rank], targets)
        found["backward"] = count()
        engine.optimizer.step()
        found["step"] = count()
        engine.discard()
    return found


@pytest.mark.parametrize(
    ("size", "data", "dtype"),
    [
        (2, "ddp", torch.float32),
        (2, "zero1", torch.float32),
        (2, "zero2", torch.bfloat16),
        (2, "zero3", torch.bfloat16),
        pytest.param(4, "zero3", torch.float32, marks=pytest.mark.slow),
        pytest.param(4, "hsdp", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_hold_what_the_formulas_say(pools, size, data, dtype):
    model = tiny.on_meta("llama")
    parameters = sum(each.numel() for each in model.parameters())
    outside = parameters - sum(each.numel() for each in model.blocks.parameters())
    for found in pools(size).run(measured, data, dtype):
        for instant in INSTANTS:
            expected = expected_bytes(data, parameters, outside, size, instant, dtype.itemsize)
            for kind, number in expected.items():
                assert found[instant][kind] == pytest.approx(number, rel=0.05), (instant, kind)


def where_gradients_are(world):
    """Addresses of an engine's gradients before and after each of three micro-batches, in two steps."""
    model = tiny.fresh("llama")
    mesh = build_mesh(ParallelConfig(), world)
    call = replicate(model, mesh.axis("dp_replicate"))
    engine = ModelEngine([model], tiny.adamw(model.parameters()), mesh, call=call)
    found = []

    def look(_=None):
        found.append([each.grad.data_ptr() for each in model.parameters()])

    for step in range(4):
        if step == 2:  # in the second step DDP rebuilds its buckets, in the order in which gradients came
            found.clear()
        if step:
            look()
            assert not any(each.grad.any() for each in model.parameters())
        packs, targets = tiny.packs_of_step(step, world.size, 3)
        engine.forward_backward(packs[world.rank], targets, look)
        look()
        engine.step(1e-3)
    return found


def test_gradients_of_replicas_stay_in_their_buckets(pools):
    for found in pools(2).run(where_gradients_are):
        assert all(each == found[0] for each in found)
