"""How layers become stages, which rank holds them, and which numbers of micro-batches a pipeline runs."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.stages import (
    bubble,
    fit_micro_batches,
    head_layers,
    parts_of_ranks,
    split_layers,
    stage_imbalance,
    stages_of_rank,
)
from multipack.shapes import ModelShape

SCHEDULES = ["gpipe", "1f1b", "interleaved"]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 10), st.floats(0, 6))
def test_no_other_split_has_a_cheaper_most_expensive_stage(data, layers, head):
    stages = data.draw(st.integers(1, min(layers, 5)))
    split = split_layers(layers, stages, head)
    assert [layer for each in split for layer in each] == list(range(layers))
    assert len(split) == stages
    assert min(map(len, split)) >= 1

    def most(sizes):
        return max(*sizes[:-1], sizes[-1] + head) if stages > 1 else sizes[0] + head

    every = [
        most([b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True)])
        for cuts in combinations(range(1, layers), stages - 1)
    ]
    assert most([len(each) for each in split]) == pytest.approx(min(every))


@pytest.mark.parametrize(
    ("layers", "stages", "head", "sizes"),
    [
        (10, 4, 0.0, [2, 2, 3, 3]),  # later stages hold fewer micro-batches
        (12, 4, 2.0, [3, 3, 4, 2]),
    ],
)
def test_the_last_stage_is_lighter_by_the_head(layers, stages, head, sizes):
    assert [len(each) for each in split_layers(layers, stages, head)] == sizes


def test_more_stages_than_layers_are_refused():
    for stages in (4, 0):
        with pytest.raises(ValueError, match=r"model\.layers=3"):
            split_layers(3, stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_of_ranks_are_the_stages_that_the_pipeline_builds(schedule):
    shape = ModelShape(layers=12, heads=4, d_model=64, d_ff=128, vocabulary_size=1000)
    config = ParallelConfig(pipeline=4, schedule=schedule)
    parts = parts_of_ranks(shape, config, 8)
    split = split_layers(shape.layers, config.stages, head_layers(shape))
    held = [stage for rank in range(4) for stage in stages_of_rank(rank, 4, schedule)]
    assert sorted(held) == list(range(config.stages))
    for rank, part in enumerate(parts):
        assert part.layers == sum(len(split[stage]) for stage in stages_of_rank(rank, 4, schedule))
        assert (part.is_first, part.is_last) == (rank == 0, rank == 3)
    assert [part.in_flight for part in parts] == {
        "gpipe": [8.0] * 4,
        "1f1b": [4.0, 3.0, 2.0, 1.0],
        "interleaved": [5.5, 4.5, 3.5, 2.5],
    }[schedule]
    assert stage_imbalance(shape, config) >= 0


def test_the_bubble_shrinks_with_micro_batches_and_with_stages():
    four = ParallelConfig(pipeline=4)
    assert bubble(four, 4) == pytest.approx(3 / 7)
    assert bubble(four, 12) == pytest.approx(3 / 15)
    assert bubble(ParallelConfig(pipeline=4, schedule="interleaved"), 12) == pytest.approx(3 / 27)
    assert bubble(ParallelConfig(), 3) == 0.0


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "schedule", "wanted"),
    [(4, 3, "gpipe", 4), (4, 1, "1f1b", 4), (4, 3, "interleaved", 4), (4, 6, "interleaved", 8)],
)
def test_micro_batches_are_raised_to_what_a_pipeline_can_run(ranks, micro_batches, schedule, wanted):
    config = ParallelConfig(pipeline=ranks, schedule=schedule)
    assert fit_micro_batches(config, micro_batches) == wanted
    assert fit_micro_batches(ParallelConfig(), 1) == 1
    assert fit_micro_batches(ParallelConfig(pipeline=4), 6) == 6
