"""Dealing: every world trains on the same documents, in packs that fit, as balanced as one can prove."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning import deal as dealing
from multipack.planning.cost import weigh
from multipack.planning.deal import objective
from multipack.planning.kernels import balancing
from multipack.planning.measure import least_step_cost
from multipack.planning.plan import plan

SYNCS = ["micro", "step", "pipeline"]


@st.composite
def plans(draw):
    capacity = draw(st.integers(4, 300))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=80))
    return plan(
        lengths,
        capacity=capacity,
        packs_per_step=draw(st.integers(1, 7)),
        window=draw(st.integers(1, 3)),
        balance=draw(st.sampled_from(["cost", "joint", "tokens"])),
        max_documents=draw(st.one_of(st.none(), st.integers(1, 6))),
    )


@settings(deadline=None, max_examples=60)
@given(plans(), st.sampled_from(SYNCS))
def test_every_world_has_the_same_documents(made, sync):
    for step in range(made.num_steps):
        own = made.packs(step)
        for world in range(1, made.packs_per_step + 1):
            micro_batches = made.micro_batches(world)
            assert micro_batches == -(-made.packs_per_step // world)
            dealt = made.deal(step, world, sync)
            assert len(dealt) == world * micro_batches
            assert sorted(dealt.order.tolist()) == sorted(own.order.tolist())
            assert dealt.totals(made.lengths).max() <= made.capacity
            assert dealt.sizes().max() <= made.most_documents
            assert dealt.sizes().max() <= (made.max_documents or len(made.lengths))
            assert (dealt.sizes() > 0).sum() == min(len(dealt), len(dealt.order))
            again = made.deal(step, world, sync)
            assert dealt.order.tolist() == again.order.tolist()
            assert dealt.offsets.tolist() == again.offsets.tolist()


@settings(deadline=None, max_examples=60)
@given(plans(), st.sampled_from(SYNCS))
def test_never_worse_than_own_packs_nor_better_than_the_bound(made, sync):
    linear, quadratic = made.weights
    costs = weigh(made.lengths, linear, quadratic)
    for step in range(made.num_steps):
        own = made.packs(step)
        for world in range(1, made.packs_per_step + 1):
            dealt = made.deal(step, world, sync)
            reached = objective(dealt.totals(costs), world, sync)
            if len(own) == len(dealt):
                falling = -np.sort(-own.totals(costs))
                if sync == "step":
                    number = balancing.assign_ranks(falling, world, made.micro_batches(world))
                    falling = falling[np.argsort(number)]
                assert reached <= objective(falling, world, sync)
            if quadratic:
                lengths = made.lengths[own.order]
                micro_batches = made.micro_batches(world)
                bound = least_step_cost(lengths, world, micro_batches, made.capacity, linear, sync)
                assert bound <= reached


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=7), st.sampled_from([(2, 1), (3, 1), (2, 2)]))
def test_close_to_the_best_of_all(lengths, shape):
    """Brute force over every assignment: the bound is below the optimum, the deal not far above it."""
    world, micro_batches = shape
    packs, capacity = world * micro_batches, 25
    lengths = np.array(lengths)
    costs = weigh(lengths, 50, 1)
    optimum = {"micro": None, "step": None}
    for assignment in itertools.product(range(packs), repeat=len(lengths)):
        tokens, totals = np.zeros(packs, dtype=int), np.zeros(packs, dtype=int)
        np.add.at(tokens, list(assignment), lengths)
        if tokens.max() <= capacity:
            np.add.at(totals, list(assignment), costs)
            for sync, least in optimum.items():
                value = objective(totals, world, sync)
                optimum[sync] = value if least is None else min(value, least)
            own = np.array(assignment)
    if optimum["micro"] is None:
        return
    for sync, least in optimum.items():
        assert least_step_cost(lengths, world, micro_batches, capacity, 50, sync) <= least
        dealt = dealing.deal(
            lengths, costs, own, world=world, micro_batches=micro_batches,
            capacity=capacity, max_documents=9, sync=sync,
        )  # fmt: skip
        assert dealt.totals(lengths).max() <= capacity
        if sync == "step":
            assert objective(dealt.totals(costs), world, sync) <= 2 * least


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("world", [8, 6, 4, 3, 1])
def test_ordinary_documents_are_balanced(world, sync):
    lengths = np.random.default_rng(0).lognormal(5.0, 0.8, 4000).clip(1, 2000).astype(int)
    made = plan(lengths, capacity=8192, packs_per_step=8, balance="cost")
    costs = made.cost_model.cost(lengths)
    for step in range(made.num_steps):
        dealt = made.deal(step, world, sync)
        totals = dealt.totals(costs)
        assert objective(totals, world, sync) * world <= totals.sum() * 1.001


def test_more_ranks_than_packs():
    made = plan([5, 6, 7], capacity=10, packs_per_step=2)
    with pytest.raises(ValueError, match="3 ranks cannot share steps of packs_per_step=2"):
        made.deal(0, 3)
    with pytest.raises(ValueError, match="data_parallel_size must be a whole number"):
        made.micro_batches(0)
    with pytest.raises(ValueError, match="choose one of micro, step, pipeline"):
        made.deal(0, 1, "epoch")


def test_fewer_documents_than_ranks():
    made = plan([5, 6], capacity=10, packs_per_step=4)
    assert made.deal(0, 4).sizes().tolist() == [1, 1, 0, 0]
    assert made.deal(0, 3).sizes().tolist() == [1, 1, 0, 0, 0, 0]


def test_exchange_levels_two_packs():
    lengths = np.array([9, 7, 3, 2, 2, 1])
    order, offsets = np.arange(6), np.array([0, 3, 6])  # 19 against 5
    balancing.exchange(order, offsets, lengths, lengths.copy(), 20, 6, 2, 0, 1)
    totals = [lengths[order[offsets[p] : offsets[p + 1]]].sum() for p in range(2)]
    assert sorted(totals) == [12, 12]
    assert sorted(order.tolist()) == list(range(6))
    for p in range(2):
        inside = lengths[order[offsets[p] : offsets[p + 1]]]
        assert inside.tolist() == sorted(inside, reverse=True)
