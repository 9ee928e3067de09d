from dataclasses import replace

import pytest

from multipack.parallel.parallel_config import ParallelConfig
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
    found = ParallelConfig(**words).axes(world)
    assert tuple(found.values()) == sizes
    assert list(found) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"tensor": 0}, r"parallel\.tensor must be at least 1"),
        (
            {"offload": "cpu"},
            r"parallel\.offload=cpu .* parallel\.data=ddp has none: use parallel\.data=zero3.*parallel\.offload=none",
        ),
        ({"replicate": 2}, r"parallel\.replicate=2 .* use parallel\.data=hsdp, or parallel\.replicate=0"),
        ({"timeout_seconds": 0}, r"timeout_seconds"),
    ],
)
def test_settings_that_mean_nothing_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**words)


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (
            {"tensor": 3},
            8,
            r"parallel\.tensor=3: 3 ranks hold one model.*the 8 processes.*start 9 \(.*, or use parallel\.tensor=2$",
        ),
        (
            {"tensor": 2},
            1,
            r"the 1 process of this run: start 2 \(multipack launch -n 2\), or use parallel\.tensor=1$",
        ),
        ({"tensor": 2, "pipeline": 2}, 6, r"tensor=2: 4 ranks .* start 8 .*, or use parallel\.pipeline=1$"),
        ({"tensor": 2, "pipeline": 2}, 5, r"use parallel\.pipeline=1 parallel\.tensor=1$"),
        (
            {"data": "hsdp"},
            3,
            r"replicate=2 \(the default\): .* 3 data-parallel ranks .* use parallel\.replicate=1$",
        ),
        ({"data": "zero3", "offload": "cpu"}, 1, r"one process has none: .* or use parallel\.offload=none"),
        ({"data": "hsdp", "replicate": 3}, 8, r"parallel\.replicate=3: .* use parallel\.replicate=2"),
        ({"tensor": 4}, 4, r"parallel\.tensor=4 does not divide model\.kv_heads=2: use parallel\.tensor=2$"),
        ({"tensor": 3}, 3, r"parallel\.tensor=3 does not divide model\.kv_heads=2: use parallel\.tensor=1$"),
        (
            {"context": 4, "tensor": 2},
            8,
            r"x parallel\.tensor=2 .* 8 ranks.*use parallel\.context=2, or .*=ring$",
        ),
        (
            {"context": 8},
            8,
            r"parallel\.context=8 \(ulysses\).*model\.heads=4.*or parallel\.context_method=ring",
        ),
        ({"pipeline": 8}, 8, r"parallel\.pipeline=8 .* 8 stages.*model\.layers=4.*use parallel\.pipeline=4"),
        ({"pipeline": 6}, 6, r"6 stages.*use parallel\.pipeline=3$"),
        (
            {"pipeline": 4, "schedule": "interleaved"},
            4,
            r"8 stages.*use parallel\.pipeline=2, or parallel\.schedule=1f1b$",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_the_nearest_choice(words, world, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**words).check(SHAPE, world, 2048)


def test_vocabulary_width_capacity_and_window_are_looked_at():
    two = ParallelConfig(tensor=2)
    with pytest.raises(ValueError, match=r"model\.vocabulary_size=97: use model\.vocabulary_size=98"):
        two.check(SHAPE.with_vocabulary(97), 2, 2048)
    two.check(SHAPE.with_vocabulary(0), 2, 2048)  # not known yet
    with pytest.raises(
        ValueError, match=r"plan\.capacity=2047 must be a multiple of 2.*use plan\.capacity=2046"
    ):
        two.check(SHAPE, 2, 2047)
    ring = ParallelConfig(context=2, context_method="ring")
    ring.check(SHAPE, 2, 2048)
    with pytest.raises(ValueError, match=r"model\.window=16.*use parallel\.context_method=ulysses"):
        ring.check(ModelShape(window=16, vocabulary_size=96), 2, 2048)
    with pytest.raises(ValueError, match=r"model\.window=16.*use .*=ulysses parallel\.context=4$"):
        replace(ring, context=8).check(replace(SHAPE, window=16), 8, 2048)
    with pytest.raises(
        ValueError, match=r"model\.heads=4 .* use parallel\.context=4$"
    ):  # no ring, with a window
        ParallelConfig(context=8).check(replace(SHAPE, window=16), 8, 2048)
    assert ring.token_multiple == 4
    with pytest.raises(ValueError, match="multiple of 4"):
        ring.check(SHAPE, 2, 2046)


def test_every_preset_can_stand_alone():
    for shape in SHAPES.values():
        ParallelConfig().check(shape, 1, 2048)


def test_data_parallel_ranks_synchronize_when_they_must():
    assert ParallelConfig(pipeline=2).sync == "pipeline"
    assert ParallelConfig(data="zero2").sync == "micro"
    assert ParallelConfig(data="zero1", tensor=2).sync == "step"
