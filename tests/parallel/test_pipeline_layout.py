"""How layers become stages, which ranks hold them, and what pipelines there are: plain numbers, no processes."""

import re
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.parallel.config import ParallelConfig, fit_micro_batches
from multipack.parallel.pipeline import bubble, check_micro_batches, split_layers, stages_of_rank


def costs_of(sizes, first, last):
    costs = [float(size) for size in sizes]
    costs[0] += first
    costs[-1] += last
    return costs


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 10), st.floats(0, 6), st.floats(0, 6))
def test_no_other_cut_has_a_cheaper_costliest_stage(data, layers, first, last):
    stages = data.draw(st.integers(1, min(layers, 5)))
    cut = split_layers(layers, stages, first, last)
    assert [layer for each in cut for layer in each] == list(range(layers))
    sizes = [len(each) for each in cut]
    assert len(sizes) == stages
    assert min(sizes) >= 1
    every = [
        max(costs_of([b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True)], first, last))
        for cuts in combinations(range(1, layers), stages - 1)
    ]
    assert max(costs_of(sizes, first, last)) == pytest.approx(min(every))


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "sizes"),
    [
        (12, 4, 0.0, 0.0, [3, 3, 3, 3]),
        (10, 4, 0.0, 0.0, [2, 2, 3, 3]),  # later stages hold fewer micro-batches
        (12, 4, 0.0, 2.0, [3, 3, 4, 2]),
        (12, 4, 1.0, 2.0, [2, 4, 4, 2]),
        (4, 4, 0.0, 9.0, [1, 1, 1, 1]),
        (5, 1, 1.0, 1.0, [5]),
    ],
)
def test_first_and_last_stages_are_lighter_by_what_they_do_besides(layers, stages, first, last, sizes):
    assert [len(each) for each in split_layers(layers, stages, first, last)] == sizes


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (3, 0)])
def test_more_stages_than_layers_are_refused(layers, stages):
    with pytest.raises(ValueError, match=re.escape(f"{stages} stages cannot be cut from model.layers=3")):
        split_layers(layers, stages)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_stage_is_on_one_rank(ranks, schedule):
    held = [stages_of_rank(rank, ranks, schedule) for rank in range(ranks)]
    per_rank = 2 if schedule == "interleaved" else 1
    assert sorted(stage for stages in held for stage in stages) == list(range(per_rank * ranks))
    assert all(stage % ranks == rank for rank, stages in enumerate(held) for stage in stages)
    if ranks > 1:
        config = ParallelConfig(pipeline=ranks, schedule=schedule)
        assert config.stages == per_rank * ranks


def test_the_bubble_shrinks_with_micro_batches_and_with_stages():
    assert bubble(4, 4, "gpipe") == bubble(4, 4, "1f1b") == pytest.approx(3 / 7)
    assert bubble(4, 12, "1f1b") == pytest.approx(3 / 15)
    assert bubble(4, 12, "interleaved") == pytest.approx(3 / 27)
    assert bubble(1, 3, "1f1b") == 0.0


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "schedule", "rule", "wanted"),
    [
        (4, 3, "gpipe", "at least 4 micro-batches a step", 4),
        (4, 1, "1f1b", "at least 4 micro-batches a step", 4),
        (4, 3, "interleaved", "at least 4 micro-batches a step", 4),
        (4, 6, "interleaved", "a multiple of 4 micro-batches a step", 8),
    ],
)
def test_micro_batches_that_a_pipeline_cannot_run_are_refused(ranks, micro_batches, schedule, rule, wanted):
    with pytest.raises(ValueError, match=rule) as refusal:
        check_micro_batches(ranks, micro_batches, schedule)
    told = str(refusal.value)
    assert f"parallel.pipeline={ranks} with parallel.schedule={schedule}" in told
    assert f"so that there are {wanted}" in told
    assert "plan.packs_per_step" in told
    fitted = fit_micro_batches(ParallelConfig(pipeline=ranks, schedule=schedule), micro_batches)
    assert fitted == wanted
    check_micro_batches(ranks, fitted, schedule)


def test_an_unknown_schedule_is_refused():
    told = re.escape("parallel.schedule=zigzag is unknown: use one of gpipe, 1f1b, interleaved")
    with pytest.raises(ValueError, match=told):
        check_micro_batches(2, 4, "zigzag")
