"""Predicted traffic against formulas; tests/distributed/test_traffic.py has counted bytes."""

import pytest

from multipack.launch.held import blocks_held, model_parameters, outside_held
from multipack.launch.memory_model import Workload
from multipack.launch.traffic import Traffic, communication
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.stages import RankPart
from multipack.shapes import SHAPES

SHAPE = SHAPES["llama-8b"]
ELEMENTS = model_parameters(SHAPE)
SLOTS, MICRO_BATCHES = 4096, 3


def rows(world_size=8, dtype="bf16", recompute="none", **words):
    config = ParallelConfig(**words)
    return communication(Workload(SHAPE, config, world_size, SLOTS, dtype, recompute, MICRO_BATCHES))


def sent(method, **words):
    """Bytes that a rank sends for one method, by kind of collective."""
    return {row.kind: row.sent for row in rows(**words) if row.method == method}


def test_shares_of_collectives():
    sizes = [Traffic("data", kind, 4, 4, 1000).sent for kind in ("all_reduce", "all_gather", "send")]
    assert sizes == [1500, 750, 1000]
    assert rows(world_size=1) == []


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_shards_are_gathered_and_reduced(dtype, size):
    zero2, zero3 = (sent("data", data=data, dtype=dtype) for data in ("zero2", "zero3"))
    assert zero2["all_gather"] == pytest.approx(7 / 8 * size * ELEMENTS)
    twice = (blocks_held(SHAPE) * 64 + outside_held(SHAPE, RankPart(SHAPE.layers))).trained
    assert zero3["all_gather"] == pytest.approx(7 / 8 * size * 3 * twice)
    for found in (zero2, zero3):
        assert found["reduce_scatter"] == pytest.approx(7 / 8 * 4 * 3 * ELEMENTS)
    groups = sent("data", data="hsdp", replicate=2)
    assert groups["all_reduce"] == pytest.approx(2 * 1 / 2 * 4 * ELEMENTS / 4, abs=8)
    assert groups["reduce_scatter"] == pytest.approx(3 / 4 * 4 * 3 * ELEMENTS)


@pytest.mark.parametrize(("data", "stream"), [("ddp", 4), ("zero3", 2)])
@pytest.mark.parametrize(("recompute", "gathers", "scatters"), [("none", 4, 4), ("selective", 6, 5)])
def test_tensor_parallelism_exchanges_hidden_states(recompute, gathers, scatters, data, stream):
    found = sent("tensor", recompute=recompute, tensor=4, data=data)
    for kind, times in (("all_gather", gathers), ("reduce_scatter", scatters)):
        products = 32 * times + 1  # of blocks and the loss; the embedding's has the residual stream's type
        assert found[kind] == 3 * (products * 2 + stream) * SLOTS * 4096 * 3 // 4
