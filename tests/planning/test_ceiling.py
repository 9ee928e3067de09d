"""Bounds on what an arrangement costs: by hand, and never above the best of all arrangements."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning.ceiling import kappa, least_step_cost
from multipack.planning.cost import weigh
from multipack.planning.deal import meetings
from multipack.planning.kernels import bounds

MODELS = {
    "llama": lambda lengths: weigh(lengths, 50, 1),
    "attention alone": lambda lengths: weigh(lengths, 0, 1),
    "tokens": np.copy,
    "a constant for each document": lambda lengths: weigh(lengths, 3, 1) + 700,
    "a sliding window": lambda lengths: 5 * lengths + np.minimum(lengths, 7) ** 2 + 11,
    "steps": lambda lengths: 1 + 900 * (lengths > 6) + 40 * (lengths > 13),
}


def falling(lengths):
    return -np.sort(-np.asarray(lengths))


def arrangements(lengths, costs, packs, capacity):
    """(arrangements, packs) costs of every way to put the documents into packs; each pack fits."""
    ways = np.array(list(itertools.product(range(packs), repeat=len(lengths))))
    inside = ways[:, :, None] == np.arange(packs)
    fits = (inside * lengths[None, :, None]).sum(axis=1).max(axis=1) <= capacity
    return (inside * costs[None, :, None]).sum(axis=1)[fits]


def test_the_dearest_pack_by_hand():
    def squares(*lengths):
        return weigh(np.array(lengths), 0, 1)

    # the longest document alone costs more than a half of all
    assert bounds.dearest_bound(np.array([8, 2, 2]), squares(8, 2, 2), 2, 8) == 8 * 9
    # full packs of 8: the pack with the 6 holds 8 tokens, and its other 2 cost least as a part of a short one
    assert bounds.dearest_bound(np.array([6, 5, 3, 2]), squares(6, 5, 3, 2), 2, 8) == 6 * 7 + 2 * 3
    # the mean of the packs, rounded up; and three of five documents share a pack
    assert bounds.dearest_bound(np.array([3, 3, 1, 1]), squares(3, 3, 1, 1), 2, 8) == 14
    assert bounds.dearest_bound(np.array([1, 1, 1, 1, 1]), squares(1, 1, 1, 1, 1), 2, 8) == 3 * 2
    # fewer documents than packs
    assert bounds.dearest_bound(np.array([4]), squares(4), 3, 8) == 4 * 5


def test_cost_per_token_need_not_rise():
    """With a constant for each document, filling with the shortest first would not be a lower bound."""
    lengths, costs = np.array([6, 4, 2, 2, 1, 1]), np.array([500, 104, 102, 102, 101, 101])
    reached = arrangements(lengths, costs, 2, 8).max(axis=1).min()
    assert reached == 500 + 102
    # full packs: the 6 needs 2 tokens more, which cost least as a half of the 4; as both of the 1s, 202
    assert bounds.dearest_bound(lengths, costs, 2, 8) == 500 + 2 * 26


def test_packs_behind_the_dearest_by_hand():
    lengths = np.array([9, 8, 7, 6])
    costs = weigh(lengths, 0, 1)
    assert [bounds.dearest_bound(lengths, costs, 4, 10, dearer) for dearer in range(4)] == [90, 72, 56, 42]
    assert bounds.dearest_bound(lengths, costs, 4, 10, 4) == 0
    assert [bounds.first_outside(lengths, packs, 10) for packs in range(5)] == [0, 1, 2, 3, 4]
    # of documents of a third of the capacity, a pack holds two
    assert bounds.first_outside(np.array([4, 4, 4, 4, 4]), 1, 10) == 2


def test_the_most_that_packs_can_cost_by_hand():
    lengths = np.array([9, 8, 4, 3])
    costs = weigh(lengths, 0, 1)
    assert bounds.most_cost(lengths, costs, 0, 10) == 0
    assert bounds.most_cost(lengths, costs, 1, 10) == 90 + 5  # the 9, and a token of the 4
    assert bounds.most_cost(lengths, costs, 2, 10) == 90 + 72 + 3 * 5
    assert bounds.most_cost(lengths, costs, 3, 10) == costs.sum()
    # a pack has no place for two documents above half, though their tokens would nearly fit
    assert bounds.most_cost(np.array([6, 6, 1]), weigh(np.array([6, 6, 1]), 0, 1), 1, 11) == 42 + 2


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_arrangement_is_below_the_bounds(data):
    world, micro_batches = data.draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (1, 3), (2, 3)]))
    packs, capacity = world * micro_batches, data.draw(st.integers(3, 30))
    shortest = data.draw(st.sampled_from([1, capacity // 3, capacity // 2]))
    most = {2: 8, 3: 7, 4: 6, 6: 5}[packs]
    drawn = st.lists(st.integers(max(shortest, 1), capacity), min_size=1, max_size=most)
    lengths = falling(data.draw(drawn))
    costs = MODELS[data.draw(st.sampled_from(sorted(MODELS)))](lengths)
    reached = arrangements(lengths, costs, packs, capacity)
    if not len(reached):
        return
    by_cost = -np.sort(-reached, axis=1)
    for dearer in range(packs):
        least = by_cost[:, dearer].min()
        assert bounds.dearest_bound(lengths, costs, packs, capacity, dearer) <= least
        outside = bounds.first_outside(lengths, dearer, capacity)
        assert outside >= len(lengths) or costs[outside] <= least
        assert bounds.most_cost(lengths, costs, dearer, capacity) >= by_cost[:, :dearer].sum(axis=1).max()
    for sync in ("micro", "step", "pipeline"):
        optimum = min(int(meetings(way, world, sync).max(axis=1).sum()) for way in reached)
        bound = least_step_cost(lengths, costs, world, micro_batches, capacity, sync)
        assert max(-(-int(costs.sum()) // world), 1) <= bound <= optimum


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_bounds_do_not_depend_on_the_order_of_documents(data):
    lengths = np.array(data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=30)))
    shuffled = np.random.default_rng(data.draw(st.integers(0, 9))).permutation(lengths)
    for sync in ("micro", "step"):
        bound = least_step_cost(lengths, weigh(lengths, 9, 1), 3, 2, 50, sync)
        assert bound == least_step_cost(shuffled, weigh(shuffled, 9, 1), 3, 2, 50, sync)


def test_meetings_of_exclusive_documents_are_each_paid_for():
    """Four documents of more than half a pack, two ranks: the second meeting costs the third longest."""
    lengths = np.array([10, 9, 8, 7])
    assert least_step_cost(lengths, weigh(lengths, 0, 1), 2, 2, 12, "micro") == 110 + 72
    assert least_step_cost(lengths, weigh(lengths, 0, 1), 2, 2, 12, "step") == 164  # (110+56+90+72) / 2


@pytest.mark.parametrize("documents", [1, 2, 50])
def test_kappa(documents):
    lengths = np.array([100] + [10] * documents)
    costs = weigh(lengths, 1000, 1)
    mean_square = (lengths**2).sum() / lengths.sum()
    assert kappa(lengths, costs) == pytest.approx((1001 + 100) / (1001 + mean_square))
    assert kappa(np.array([7, 7]), np.array([5, 5])) == 1
