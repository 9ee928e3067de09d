"""What ranks exchange, against the formulas of each method."""

import pytest

from multipack.launch.memory_model import parameters_around, parameters_of, parameters_of_block
from multipack.launch.traffic import Traffic, communication
from multipack.parallel.parallel_config import ParallelConfig
from multipack.shapes import SHAPES

SHAPE = SHAPES["llama-8b"]
ELEMENTS = parameters_of(SHAPE)
SLOTS, MICRO_BATCHES = 4096, 3


def sent(method, recompute="none", world_size=8, dtype="bf16", **words):
    """Kind of collective → (calls, bytes that a rank sends) of one method."""
    found = communication(SHAPE, ParallelConfig(**words), world_size, SLOTS, dtype, recompute, MICRO_BATCHES)
    told = {}
    for each in found:
        if each.method == method:
            calls, size = told.get(each.kind, (0, 0))
            told[each.kind] = calls + each.count, size + each.sent
    return told


def test_one_rank_sends_nothing():
    assert communication(SHAPE, ParallelConfig(), 1, SLOTS) == []


def test_shares_of_collectives():
    sizes = {kind: Traffic("data", kind, 4, 4, 1, 1000).sent for kind in ("all_reduce", "all_gather", "send")}
    assert sizes == {"all_reduce": 1500, "all_gather": 750, "send": 1000}


def test_data_parallel_all_reduces_once_a_step():
    assert sent("data")["all_reduce"][1] == pytest.approx(2 * 7 / 8 * 4 * ELEMENTS)
    first = sent("data", data="zero1")
    assert first["all_reduce"] == sent("data")["all_reduce"]
    assert first["broadcast"][1] == pytest.approx(7 / 8 * 4 * ELEMENTS)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_shards_are_gathered_and_scattered(dtype, size):
    second, third = (sent("data", data=data, dtype=dtype) for data in ("zero2", "zero3"))
    assert second["all_gather"][1] == pytest.approx(7 / 8 * size * ELEMENTS)
    twice = 2 * 32 * parameters_of_block(SHAPE) + parameters_around(SHAPE)
    assert second["all_gather"][0] == 33  # once a step
    assert third["all_gather"] == (3 * 65, pytest.approx(7 / 8 * size * 3 * twice))
    for stage in (second, third):
        assert stage["reduce_scatter"] == (3 * 33, pytest.approx(7 / 8 * 4 * 3 * ELEMENTS))


def test_groups_of_shards_reduce_once_a_step():
    groups = sent("data", data="hsdp", replicate=2)
    assert groups["all_reduce"][1] == pytest.approx(2 * 1 / 2 * 4 * ELEMENTS / 4, abs=8)
    assert groups["reduce_scatter"][1] == pytest.approx(3 / 4 * 4 * 3 * ELEMENTS)


@pytest.mark.parametrize(("data", "stream"), [("ddp", 4), ("zero3", 2)])
@pytest.mark.parametrize(("recompute", "gathers", "scatters"), [("none", 4, 4), ("selective", 6, 5)])
def test_tensor_parallel_exchanges_hidden_states(recompute, gathers, scatters, data, stream):
    found = sent("tensor", recompute, tensor=4, data=data)
    for kind, times in (("all_gather", gathers), ("reduce_scatter", scatters)):
        products = 32 * times + 1  # of blocks, and the loss's; the embedding's are of the residual stream
        size = 3 * (products * 2 + stream) * SLOTS * 4096 * 3 // 4
        assert found[kind] == (3 * (products + 1), size)


def test_context_parallel_exchanges_heads_or_keys():
    token = SLOTS // 4 * 128 * 2
    ulysses = sent("context", context=4)["all_to_all"]
    assert ulysses == (3 * 32 * 4, 3 * 32 * 2 * (2 * 32 + 2 * 8) * token * 3 // 4)
    ring = sent("context", context=4, context_method="ring")["send"]
    assert ring == (3 * 32 * 9, 3 * 32 * 3 * 5 * 8 * token)  # keys and values twice, half of their gradients
    assert sent("context", "full", context=4)["all_to_all"][1] == 1.5 * ulysses[1]


def test_pipelines_send_hidden_states_and_their_gradients():
    once = sent("pipeline", world_size=4, pipeline=4)["send"]  # a rank in the middle
    assert once == (2 * 3, 2 * 3 * SLOTS * 4096 * 4)  # the residual stream, which autocast leaves in float32
    assert sent("pipeline", world_size=4, pipeline=4, data="zero3")["send"][1] == once[1] // 2
    twice = sent("pipeline", world_size=4, pipeline=4, schedule="interleaved")["send"]
    assert twice == (2 * once[0], 2 * once[1])
    ends = sent("pipeline", world_size=2, pipeline=2)["send"]  # one sends hidden states, the other gradients
    assert ends == (3, 3 * SLOTS * 4096 * 4)
    assert sent("pipeline", world_size=2, pipeline=2, schedule="interleaved")["send"] == (9, 3 * ends[1])
    halved = sent("pipeline", world_size=4, pipeline=2, tensor=2)["send"]
    assert 2 * halved[1] == ends[1]


def test_stages_keep_what_backward_passes_gathered():
    third = sent("data", data="zero3", pipeline=2, dtype="fp32")
    layers = 17  # of the first stage: the last one has the head
    assert third["all_gather"][0] == (3 + 1) * layers + 1
    assert third["reduce_scatter"][0] == layers + 1


def test_inner_axes_reach_fewer_ranks():
    found = communication(SHAPE, ParallelConfig(data="zero3", tensor=2, pipeline=2), 16, SLOTS)
    reach = {each.method: each.reach for each in found}
    assert reach == {"tensor": 2, "data": 8, "pipeline": 16}
