"""Measures: each checked by hand or by brute force, and bounds that hold."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning import measure
from multipack.planning.permutation import permutation
from multipack.planning.plan import plan

OPENCHAT = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "lengths" / "openchat_v1.npy"


def fewest_packs(lengths, capacity, limit):
    """The true optimum, by branching over packs for each document."""
    best = len(lengths)

    def branch(rest, packs):
        nonlocal best
        if len(packs) >= best:
            return
        if not rest:
            best = len(packs)
            return
        seen = set()
        for p, (room, count) in enumerate(packs):
            if room >= rest[0] and count < limit and (room, count) not in seen:
                seen.add((room, count))
                branch(rest[1:], [*packs[:p], (room - rest[0], count + 1), *packs[p + 1 :]])
        branch(rest[1:], [*packs, (capacity - rest[0], 1)])

    branch(sorted(lengths, reverse=True), [])
    return best


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_minimum_packs_is_a_lower_bound(data):
    capacity = data.draw(st.integers(1, 30))
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=9))
    limit = data.draw(st.one_of(st.none(), st.integers(1, 3)))
    bound = measure.minimum_packs(lengths, capacity, limit)
    assert -(-sum(lengths) // capacity) <= bound <= fewest_packs(lengths, capacity, limit or 99)


def test_minimum_packs_sees_documents_that_exclude_each_other():
    assert measure.minimum_packs([51] * 10, 100) == 10
    assert measure.minimum_packs([34] * 9, 100) == 4  # tokens alone
    assert measure.minimum_packs([60, 60, 60, 45, 45, 45], 100) == 5  # 45 does not fit beside 60
    assert measure.minimum_steps([51] * 10, 100, 4) == 3


def test_dearest_pack_bound_by_hand():
    # the longest document alone: 8 tokens at least, and 12 tokens in all mean at least 6 a pack
    bound = measure.least_step_cost(np.array([8, 2, 2]), 2, 1, 8, 0, "micro")
    assert bound == 8 * 9
    # full packs of 8: the pack with the 6 holds 8 tokens, and its other 2 cost least as a part of a short one
    assert measure.least_step_cost(np.array([6, 5, 3, 2]), 2, 1, 8, 0, "micro") == 6 * 7 + 2 * 3


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_ceiling_holds_and_shares_are_shares(data):
    capacity = data.draw(st.integers(2, 200))
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    packs = data.draw(st.integers(1, 6))
    world = data.draw(st.integers(1, packs))
    made = plan(lengths, capacity=capacity, packs_per_step=packs, window=data.draw(st.integers(1, 3)))
    for sync in ("micro", "step"):
        report = made.report(world, sync)
        assert 0 < report.cost_utilization <= report.cost_utilization_ceiling <= 1
        assert 0 < report.efficiency <= 1
        assert 0 < report.utilization <= 1
        assert 0 <= report.l2_lag_mean <= report.l2_lag_max
        assert report.minimum_steps <= report.steps
        assert report.documents == len(lengths)
        assert report.tokens == sum(lengths)
        assert json.loads(json.dumps(report.to_dict()))["steps"] == made.num_steps


def test_measures_by_hand():
    loads = np.array([[3, 1], [2, 2]])
    assert measure.utilization(loads) == 8 / (2 * 5)
    assert measure.spread(loads).tolist() == [2, 0]
    assert measure.efficiency(90, 3, 2, 20) == 0.75
    made = plan([30, 20, 10, 10], capacity=40, packs_per_step=2)
    report = made.report(2)
    assert (report.steps, report.packs, report.tokens) == (1, 2, 70)
    assert report.efficiency == 70 / 80
    assert report.utilization == 70 / 80  # 40 and 30
    squares = sorted(int((made.lengths[p] ** 2).sum()) for p in made.deal(0, 2))
    assert report.l2_lag_mean == report.l2_lag_max == math.sqrt(squares[1] - squares[0])


def test_step_meetings_are_sums_over_micro_batches():
    made = plan([10] * 12, capacity=30, packs_per_step=4)
    report = made.report(2, "step")
    assert report.utilization == report.cost_utilization == report.cost_utilization_ceiling == 1
    assert report.l2_lag_max == 0


def test_displacement_of_an_exact_cut():
    made = plan([10] * 40, capacity=20, packs_per_step=2, window=1)
    assert made.num_steps == 10
    assert measure.displacement(made).max() <= 0.5
    carried = plan([10] * 40, capacity=20, packs_per_step=2, window=1, tail="carry", carried=[3, 3, 5])
    assert measure.displacement(carried).max() <= 0.5


def test_seeded_order_is_the_order_of_the_epoch():
    made = plan([10] * 40, capacity=20, packs_per_step=2, window=1, epoch=4)
    assert measure.seeded_order(made, np.arange(40)).tolist() == permutation(0, 4, 40).tolist()
    for step in range(made.num_steps):
        assert set(made.documents(step)) == set(permutation(0, 4, 40)[4 * step : 4 * step + 4])


def test_padded_share():
    assert measure.padded_share([5, 5, 5], 2) == 1.0
    assert measure.padded_share([1, 9], 2) == 10 / 18
    assert measure.padded_share([1, 2, 3, 4], 1) == 1.0
    shares = [measure.padded_share(np.arange(1, 1000), size) for size in (2, 8, 64)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] == pytest.approx(500 / (1000 * 8 / 9), abs=0.03)  # mean over expected maximum of 8
    with pytest.raises(ValueError, match="batch_size"):
        measure.padded_share([1], 0)


def test_dropped_is_counted():
    made = plan([10] * 45, capacity=20, packs_per_step=2, tail="drop")
    report = made.report(2)
    assert (report.steps, report.dropped_documents, report.dropped_tokens) == (11, 1, 10)
    assert made.dropped.tolist() == sorted(set(range(45)) - set(made.order.tolist()))
    carried = plan([10] * 45, capacity=20, packs_per_step=2, tail="carry").report(1)
    assert (carried.carried_documents, carried.dropped_documents) == (1, 0)


@pytest.mark.skipif(not OPENCHAT.exists(), reason="../shared/data is not there")
def test_multipack_benchmark():
    """The table of multipack's README: 37 steps; it reached 99.70 % utilization, 99.71 % by cost, lag 438."""
    for epoch, balance in itertools.product(range(3), ("cost", "joint")):
        made = plan(
            np.load(OPENCHAT), capacity=32768, packs_per_step=8, window=1, epoch=epoch, balance=balance
        )
        report = made.report(8)
        assert report.steps == report.minimum_steps == 37
        assert report.documents == 6144
        assert report.utilization >= (0.995 if balance == "cost" else 0.99)
        assert report.cost_utilization >= (0.997 if balance == "cost" else 0.99)
