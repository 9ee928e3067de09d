"""Measures: each checked by hand or by brute force, and bounds that hold."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import problems
from multipack.planning import report as measure
from multipack.planning.advice import advise
from multipack.planning.cost import CostModel
from multipack.planning.plan import plan
from multipack.planning.steps import permutation


@settings(deadline=None, max_examples=30)
@given(problems(), st.data())
def test_ceiling_holds_and_shares_are_shares(problem, data):
    lengths, options = problem
    made = plan(lengths, **options)
    world = data.draw(st.integers(1, made.packs_per_step))
    for sync in ("micro", "step"):
        report = measure.report(made, world, sync)
        assert 0 < report.cost_utilization <= report.cost_utilization_ceiling <= 1
        assert report.ceiling_reached == report.cost_utilization / report.cost_utilization_ceiling <= 1
        assert 1 <= report.imbalance_mean <= report.imbalance_max <= world
        assert 0 <= report.padding < 1
        assert 0 < report.efficiency_but_last <= 1
        assert report.displacement_median <= report.displacement_p99 <= report.displacement_max
        assert report.kappa > 0
        said = advise(made, report)
        limited = any(each.startswith("no arrangement of these steps exceeds") for each in said)
        assert limited == (report.cost_utilization_ceiling < 0.99)
        assert report.longest_wait >= 0
        assert report.minimum_packs <= report.packs
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
    assert measure.evenly_spaced(10, 99).tolist() == list(range(10))
    assert measure.evenly_spaced(10, 2).tolist() == [2, 7]
    assert measure.evenly_spaced(7, 1).tolist() == [3]


def test_a_report_by_hand():
    """Two ranks, packs of 40: 30 + 10 beside 20 + 10, or 30 beside 20 + 10 + 10."""
    made = plan([30, 20, 10, 10], capacity=40, packs_per_step=2)
    report = measure.report(made, 2)
    assert (report.steps, report.measured_steps, report.packs, report.tokens) == (1, 1, 2, 70)
    assert (report.minimum_steps, report.minimum_packs) == (1, 2)
    assert report.efficiency == report.efficiency_but_last == 70 / 80
    assert report.padding == pytest.approx(10 / 80)
    dealt = made.deal(0, 2)
    tokens, squares = (sorted(dealt.totals(values).tolist()) for values in (made.lengths, made.lengths**2))
    costs = sorted(dealt.totals(made.cost_model.cost(made.lengths)).tolist())
    assert report.utilization == 70 / (2 * tokens[1])
    assert report.cost_utilization == sum(costs) / (2 * costs[1])
    assert report.imbalance_mean == report.imbalance_max == pytest.approx(2 * costs[1] / sum(costs))
    assert report.l2_lag_mean == report.l2_lag_max == math.sqrt(squares[1] - squares[0])
    assert report.mean_length_spread is None
    assert report.kappa == pytest.approx((57_257 + 30) / (57_257 + 1500 / 70))


def test_ranks_that_do_not_divide_the_packs_pad_more():
    made = plan([10] * 12, capacity=10, packs_per_step=3)
    assert made.num_steps == 4
    assert measure.report(made, 3).padding == 0
    assert measure.report(made, 2).padding == pytest.approx(1 / 4)  # four packs run for three
    assert measure.report(made, 2).efficiency == 1


def test_the_last_step_is_left_out_of_one_efficiency():
    made = plan([10] * 11, capacity=10, packs_per_step=2, order="given", window=1)
    report = measure.report(made, 1)
    assert made.num_steps == 6
    assert report.efficiency == 11 / 12
    assert report.efficiency_but_last == (11 - made.tokens(5) / 10) / 10


def test_a_sample_of_steps_is_told_and_close():
    made = plan(np.random.default_rng(5).integers(1, 900, 6000), capacity=2048, packs_per_step=4)
    whole, sample = measure.report(made, 4, sample=None), measure.report(made, 4, sample=50)
    assert (whole.measured_steps, sample.measured_steps) == (made.num_steps, 50)
    assert made.num_steps > 300
    assert sample.cost_utilization == pytest.approx(whole.cost_utilization, abs=0.002)
    for name in ("steps", "tokens", "efficiency", "displacement_max", "mean_length_spread", "packs"):
        assert getattr(sample, name) == getattr(whole, name)
    with pytest.raises(ValueError, match="sample must be a whole number of at least 1"):
        measure.report(made, 4, sample=0)


def test_mean_length_spread():
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 1000, 4000)
    random = plan(lengths, capacity=100_000, packs_per_step=1, window=1)
    assert measure.mean_length_spread(random) == pytest.approx(1, abs=0.25)
    ordered = plan(np.sort(lengths), capacity=100_000, packs_per_step=1, window=1, order="given")
    assert measure.mean_length_spread(ordered) > 5
    mixed = plan(lengths, capacity=100_000, packs_per_step=1, window=16)
    assert measure.mean_length_spread(mixed) < 0.7
    # by hand: two steps of two, means 1.5 and 3.5; S² = 5 / 3, so random steps have variance 5/3 · (1/2 − 1/4)
    by_hand = plan([1, 2, 3, 4], capacity=7, packs_per_step=1, window=1, order="given")
    means = np.array([by_hand.lengths[by_hand.documents(step)].mean() for step in range(by_hand.num_steps)])
    sizes = np.array([len(by_hand.documents(step)) for step in range(by_hand.num_steps)])
    expected = 5 / 3 * (1 / sizes - 1 / 4).sum()
    assert measure.mean_length_spread(by_hand) == pytest.approx(
        math.sqrt(((means - 2.5) ** 2).sum() / expected)
    )
    assert measure.mean_length_spread(plan([5] * 9, capacity=10, packs_per_step=1)) is None


def test_displacement_of_an_exact_cut():
    made = plan([10] * 40, capacity=20, packs_per_step=2, window=1)
    assert made.num_steps == 10
    assert measure.displacement(made).max() <= 0.5
    carried = plan([10] * 40, capacity=20, packs_per_step=2, window=1, tail="carry", carried=[3, 3, 5])
    moved = measure.displacement(carried)
    assert moved.max() <= 0.5
    assert measure.report(carried, 2).displacement_p99 == np.quantile(moved, 0.99, method="inverted_cdf")


def test_seeded_order_is_the_order_of_the_epoch():
    made = plan([10] * 40, capacity=20, packs_per_step=2, window=1, epoch=4)
    for step in range(-1, made.num_steps):
        order = permutation(0, 4, 40)[4 * (step % 10) :][:4]
        assert measure.seeded_order(made, step).tolist() == order.tolist()


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
    report = measure.report(made, 2)
    assert (report.steps, report.dropped_documents, report.dropped_tokens) == (11, 1, 10)
    assert made.dropped.tolist() == sorted(set(range(45)) - set(made.order.tolist()))
    carried = measure.report(plan([10] * 45, capacity=20, packs_per_step=2, tail="carry"), 1)
    assert (carried.carried_documents, carried.dropped_documents) == (1, 0)


@pytest.mark.parametrize("documents", [1, 2, 50])
def test_kappa(documents):
    lengths = np.array([100] + [10] * documents)
    costs = CostModel(None, 1000, 1).cost(lengths)
    mean_square = (lengths**2).sum() / lengths.sum()
    assert measure.kappa(lengths, costs) == pytest.approx((1001 + 100) / (1001 + mean_square))
