"""Bytes that ranks hold: counted at named instants, and what ZeRO's formulas say."""

import doctest
import importlib
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from multipack.parallel.base import forget
from multipack.parallel.engine import plain_engine
from multipack.parallel.materialize import materialize
from multipack.parallel.memory import count_bytes, zero_bytes
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.replicate import clear, replicate
from multipack.parallel.shard import shard, synchronizing
from multipack.parallel.zero1 import ShardedOptimizer

sys.path.append(str(Path(__file__).parent))
tiny = importlib.import_module("sharding")

INSTANTS = ("rest", "forward", "backward", "step")


@cache  # a process serves many cases, and gloo's groups take their time
def _mesh(groups, shards):
    return init_device_mesh("cpu", (groups, shards), mesh_dim_names=("dp_replicate", "dp_shard"))


def _built(world, data, dtype=torch.float32):
    """(model, model as it is called, optimizer), as the stage has them."""
    if data in ("ddp", "zero1"):
        model = tiny.fresh("llama")
        call = replicate(model, _mesh(world.size, 1)["dp_replicate"])
        factory = lambda named: tiny.adamw(named.values())  # noqa: E731
        named = dict(model.named_parameters())
        mesh = _mesh(world.size, 1)["dp_replicate"]
        return model, call, ShardedOptimizer(factory, named, mesh) if data == "zero1" else factory(named)
    model = tiny.on_meta("llama")
    mesh = _mesh(2, world.size // 2) if data == "hsdp" else _mesh(1, world.size)["dp_shard"]
    shard(model, mesh, reshard=data != "zero2", dtype=dtype)
    materialize([model], lambda: tiny.drawn("llama"), tiny.whole_shapes("llama"), world)
    return model, model, tiny.adamw(model.parameters())


def _measured(world, data, dtype=torch.float32, micro_batches=2):
    """Bytes at every instant of the second step; before the first there is no optimizer state."""
    model, call, updates = _built(world, data, dtype)
    when = synchronizing(call, keep=data == "zero2")
    found = {}
    for step in range(2):
        found["rest"] = count_bytes([model], updates)
        packs, targets = tiny.packs_of_step(step, world.size, micro_batches)
        for number, each in enumerate(packs[world.rank]):
            with when(number == micro_batches - 1):
                loss = call(each) / targets
                if number == 0:
                    found["forward"] = count_bytes([model], updates)
                loss.backward()
        found["backward"] = count_bytes([model], updates)
        updates.step()
        found["step"] = count_bytes([model], updates)
        forget(model.parameters()) if call is model else clear(model.parameters())
    return found


def _numbers():
    model = tiny.on_meta("llama")
    parameters = sum(each.numel() for each in model.parameters())
    blocks = sum(each.numel() for each in model.blocks.parameters())
    return parameters, parameters - blocks


def _close(found, expected):
    return all(found[name] == pytest.approx(expected[name], rel=0.05) for name in expected)


@pytest.mark.parametrize(
    ("size", "data"),
    [(2, "ddp"), *((size, data) for size in (2, 4) for data in ("zero1", "zero2", "zero3")), (4, "hsdp")],
)
def test_ranks_hold_what_the_formulas_say(pools, size, data):
    parameters, outside = _numbers()
    for found in pools(size).run(_measured, data):
        for instant in INSTANTS:
            expected = zero_bytes(data, parameters, size, instant, outside=outside)
            assert _close(found[instant], expected), (instant, found[instant], expected)


def _where_gradients_are(world):
    """Addresses of an engine's gradients before and after each of three micro-batches, in two steps."""
    model = tiny.fresh("llama")
    engine = plain_engine(model, tiny.adamw(model.parameters()), build_mesh(ParallelConfig(), world))
    found = []

    def look(_=None):
        found.append([each.grad.data_ptr() for each in model.parameters()])

    for step in range(4):
        if step == 2:  # in the second step DDP makes its buckets anew, in the order in which gradients came
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
    for found in pools(2).run(_where_gradients_are):
        assert all(each == found[0] for each in found)


def _in_bfloat16(world, data):
    return _measured(world, data, torch.bfloat16, micro_batches=1)


@pytest.mark.parametrize("data", ["zero2", "zero3"])
def test_gathered_bfloat16_takes_half(pools, data):
    parameters, outside = _numbers()
    for found in pools(2).run(_in_bfloat16, data):
        for instant in INSTANTS:
            expected = zero_bytes(data, parameters, 2, instant, outside=outside, compute_bytes=2)
            assert _close(found[instant], expected), (instant, found[instant], expected)


PAPER = {
    "ddp": lambda n: 16,
    "zero1": lambda n: 4 + 12 / n,
    "zero2": lambda n: 2 + 14 / n,
    "zero3": lambda n: 16 / n,
}


@given(st.sampled_from(sorted(PAPER)), st.integers(1, 1024))
@settings(deadline=None, max_examples=100)
def test_the_paper_s_stages_are_the_formulas_with_its_bytes(data, ranks):
    mixed = {"parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12, "compute_bytes": 2}
    found = zero_bytes(data, 7_500_000_000, ranks, **mixed)
    total = sum(found.values()) / 7_500_000_000
    # The paper's stage 2 keeps parameters whole between steps, where FSDP2 has shards.
    kept = 2 - 2 / ranks if data == "zero2" else 0
    assert total + kept == pytest.approx(PAPER[data](ranks))


def test_hsdp_holds_what_zero3_holds_within_a_group():
    assert zero_bytes("hsdp", 1000, 8, replicate=4) == zero_bytes("zero3", 1000, 2)
    with pytest.raises(ValueError, match=r"parallel\.replicate=3 groups do not divide 8"):
        zero_bytes("hsdp", 1000, 8, replicate=3)
    with pytest.raises(ValueError, match=r"parallel\.data=zero4 is none of ddp, zero1"):
        zero_bytes("zero4", 1000, 8)


def test_views_of_one_storage_count_once():
    model = torch.nn.Linear(4, 4)
    model.bias = torch.nn.Parameter(model.weight.detach()[0])
    updates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert count_bytes([model], updates) == {"parameters": 64, "gradients": 0, "optimizer": 0}
    gradients = torch.zeros(100)
    model.weight.grad, model.bias.grad = gradients[:16].view(4, 4), gradients[16:20]
    assert count_bytes([model], updates)["gradients"] == 400
    updates.step()
    assert count_bytes([model], updates)["optimizer"] == 80


def test_the_page_s_examples_run():
    page = Path(__file__).parents[2] / "docs" / "parallel-memory.md"
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert tried
    assert not failed
