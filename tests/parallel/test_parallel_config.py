"""`ParallelConfig`: axes, what strategies divide, and refusals that name the setting and its nearest legal value."""

from dataclasses import replace

import pytest

from multipack.parallel.parallel_config import AXES, ParallelConfig
from multipack.shapes import SHAPES, ModelShape

SHAPE = ModelShape(layers=4, heads=4, kv_heads=2, d_model=64, d_ff=128, vocabulary_size=96)


@pytest.mark.parametrize(
    ("words", "world", "sizes"),
    [
        ({}, 4, (1, 4, 1, 1, 1)),
        ({"data": "zero1"}, 4, (1, 4, 1, 1, 1)),
        ({"data": "zero3"}, 4, (1, 1, 4, 1, 1)),
        ({"data": "hsdp"}, 8, (1, 2, 4, 1, 1)),
        ({"data": "hsdp", "replicate": 4}, 8, (1, 4, 2, 1, 1)),
        ({"data": "zero2", "tensor": 2, "pipeline": 2}, 8, (2, 1, 2, 1, 2)),
        ({"tensor": 2, "context": 2, "pipeline": 2}, 8, (2, 1, 1, 2, 2)),
    ],
)
def test_axes_multiply_to_the_world(words, world, sizes):
    assert ParallelConfig(**words).axes(world) == dict(zip(AXES, sizes, strict=True))


@pytest.mark.parametrize(
    ("words", "parameters", "optimizer", "replicas"),
    [
        ({}, 1, 1, 8),
        ({"data": "zero1"}, 1, 8, 8),
        ({"data": "zero1", "tensor": 2}, 1, 4, 4),
        ({"data": "zero3"}, 8, 8, 1),
        ({"data": "hsdp"}, 4, 4, 2),
        ({"data": "zero2", "context": 2, "tensor": 2}, 4, 4, 1),  # ranks that divide tokens share shards
    ],
)
def test_strategies_divide_what_they_say(words, parameters, optimizer, replicas):
    divided = ParallelConfig(**words).divisions(8)
    assert divided == {"parameters": parameters, "optimizer": optimizer, "replicas": replicas}


def test_data_parallel_ranks_synchronize_when_they_must():
    assert ParallelConfig(pipeline=2).sync == "micro"
    assert ParallelConfig(data="zero2").sync == "micro"
    assert ParallelConfig(data="zero1", tensor=2).sync == "step"


REFUSED_ALONE = [
    ({"tensor": 0}, "tensor", "at least 1"),
    ({"offload": "cpu"}, "offload=cpu", "data=zero3"),
    ({"replicate": 2}, "replicate=2", "data=hsdp"),
    ({"timeout_seconds": 0}, "timeout_seconds=0", "above 0"),
]
REFUSED_WITH_A_WORLD = [
    ({"tensor": 3}, 8, "tensor=3", "use parallel.tensor=2"),
    ({"tensor": 2}, 1, "-n 2", "use parallel.tensor=1"),
    ({"tensor": 2, "pipeline": 2}, 6, "tensor=2", "use parallel.pipeline=1"),
    ({"tensor": 2, "pipeline": 2}, 5, "pipeline=2", "-n 4"),
    ({"data": "hsdp"}, 3, "replicate=2", "use parallel.replicate=1"),
    ({"data": "hsdp", "replicate": 3}, 8, "replicate=3", "use parallel.replicate=2"),
    ({"tensor": 3}, 3, "model.kv_heads=2", "use parallel.tensor=1"),
    ({"tensor": 8}, 8, "model.heads=4", "use parallel.tensor=4"),
    ({"context": 4, "context_method": "ulysses", "tensor": 2}, 8, "model.heads=4", "use parallel.context=2"),
    ({"context": 8, "context_method": "ulysses"}, 8, "model.heads=4", "parallel.context_method=planned"),
    ({"pipeline": 8}, 8, "model.layers=4", "use parallel.pipeline=4"),
    ({"pipeline": 6}, 6, "6 stages", "use parallel.pipeline=3"),
    ({"pipeline": 4, "schedule": "interleaved"}, 4, "8 stages", "parallel.schedule=1f1b"),
]
PLANNED = {"context": 2, "context_method": "planned"}
REFUSED_WITH_A_MODEL = [
    ({"tensor": 2}, SHAPE.with_vocabulary(97), 2048, "model.vocabulary_size=97", "model.vocabulary_size=98"),
    ({"tensor": 2}, SHAPE, 2047, "plan.capacity=2047", "plan.capacity=2046"),
    (PLANNED, SHAPE, 2047, "plan.capacity=2047", "multiple of 2"),
    (PLANNED, replace(SHAPE, window=16), 2048, "model.window=16", "parallel.context_method=ulysses"),
    (
        PLANNED,
        replace(SHAPE, attention_cap=50.0),
        2048,
        "model.attention_cap=50",
        "parallel.context_method=ulysses",
    ),
]


def test_refusals_name_the_setting_and_the_nearest_choice():
    cases = [(words, None, SHAPE, 2048, *named) for words, *named in REFUSED_ALONE]
    cases += [(words, world, SHAPE, 2048, *named) for words, world, *named in REFUSED_WITH_A_WORLD]
    cases += [(words, 2, shape, capacity, *named) for words, shape, capacity, *named in REFUSED_WITH_A_MODEL]
    for words, world, shape, capacity, setting, choice in cases:
        with pytest.raises(ValueError, match=r"parallel\.") as refusal:
            ParallelConfig(**words).check(shape, world or 1, capacity)
        assert setting in str(refusal.value), (words, str(refusal.value))
        assert choice in str(refusal.value), (words, str(refusal.value))


def test_legal_combinations_pass():
    for shape in SHAPES.values():
        ParallelConfig().check(shape, 1, 2048)
    ParallelConfig(tensor=2).check(SHAPE.with_vocabulary(0), 2, 2048)  # the vocabulary is not known yet
    ParallelConfig(**PLANNED).check(SHAPE, 2, 2048)
    ParallelConfig(context=8).check(SHAPE, 8, 2048)  # no head need be whole
    ParallelConfig(context=2).check(replace(SHAPE, window=16), 2, 2048)
    with pytest.raises(ValueError, match=r"train\.dtype=fp16"):
        ParallelConfig(data="zero3").check(SHAPE, 2, 2048, "fp16")
    ParallelConfig(data="zero1").check(SHAPE, 2, 2048, "fp16")
    alone = ParallelConfig(data="zero3", offload="cpu")
    alone.check(SHAPE, 1, 2048, "bf16")
    with pytest.raises(ValueError, match=r"train\.dtype=fp16"):
        alone.check(SHAPE, 1, 2048, "fp16")
