"""What both samplers share: full steps, bins in order, batches that are alike side by side."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.integrations.arrange import arrange, fitting, in_order, side_by_side
from multipack.planning.packing import pack

CASES = settings(deadline=None, max_examples=80)


@st.composite
def problems(draw):
    capacity = draw(st.integers(1, 120))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    return np.array(lengths), capacity


@CASES
@given(problems(), st.integers(1, 6), st.booleans(), st.one_of(st.none(), st.integers(1, 4)))
def test_steps_are_full_where_documents_suffice(problem, packs, drop_last, most):
    lengths, capacity = problem
    options = {"capacity": capacity, "packs": packs, "window": 2, "balance": "cost", "max_documents": most}
    steps = arrange(lengths, drop_last=drop_last, **options)
    made = list(steps)
    held = [documents for step in made for documents in step]
    assert len(made) == len(steps) >= 1
    assert all(len(step) for step in made)
    assert all(0 < len(documents) <= (most or 60) for documents in held)
    assert all(lengths[documents].sum() <= capacity for documents in held)
    assert sorted(np.concatenate([*held, steps.left]).tolist()) == list(range(len(lengths)))
    assert all(len(step) == packs for step in made[:-1])
    assert steps.full == (len(made[-1]) == packs)
    assert steps.tokens == lengths[np.concatenate(held)].sum()
    fewest = len(pack(lengths, capacity, max_documents=most))
    if drop_last:
        assert len(held) <= max(fewest, packs) or fewest % packs == 0
    else:
        assert steps.left.size == 0
        assert steps.full or len(lengths) < packs * -(-fewest // packs)
    halves = [steps.positions(0, len(steps) // 2), steps.positions(len(steps) // 2, len(steps))]
    assert sorted(halves[1].tolist()) == sorted(
        np.concatenate([documents for step in made[len(steps) // 2 :] for documents in step]).tolist()
    )
    again = arrange(lengths, drop_last=drop_last, steps=len(steps), **options)
    assert len(again) == len(steps)


def test_a_lack_at_the_end_stays_at_the_end():
    """Nine documents of a pack each, four at a time: 4, 4, 1."""
    made = list(arrange(np.full(9, 50), capacity=50, packs=4, window=3, balance="cost"))
    assert [len(step) for step in made] == [4, 4, 1]


def test_a_step_that_would_lack_documents_is_not_made():
    """401 documents fit into 400 packs, but only if the two short ones, far apart in order, share one."""
    lengths = np.full(401, 60)
    lengths[[0, 300]] = 45
    steps = arrange(lengths, capacity=100, packs=8, window=1, balance="cost")
    assert (len(steps), steps.full, steps.left.size) == (50, True, 0)
    assert {len(step) for step in steps} == {8}


def test_what_is_left_fills_empty_packs_first():
    """A document a pack: one long one takes a step's tokens, but two ranks need two documents."""
    steps = arrange(
        np.array([1, 4, 1, 1, 1]),
        capacity=4,
        packs=2,
        window=1,
        balance="cost",
        drop_last=True,
        max_documents=1,
    )
    assert [len(step) for step in steps] == [2, 2]
    assert steps.left.size == 1
    assert steps.tokens + np.array([1, 4, 1, 1, 1])[steps.left].sum() == 8


def test_fewer_steps_than_needed_leave_documents():
    steps = arrange(np.full(9, 50), capacity=50, packs=2, window=2, balance="tokens", steps=3)
    assert (len(steps), len(steps.left), steps.full) == (3, 3, True)


@CASES
@given(problems(), st.integers(1, 70), st.one_of(st.none(), st.integers(1, 5)))
def test_bins_in_order_can_be_any_number(problem, number, most):
    lengths, capacity = problem
    natural = in_order(lengths, capacity, most)
    assert natural.order.tolist() == list(range(len(lengths)))
    bins = in_order(lengths, capacity, most, min(number, len(lengths)))
    assert len(bins) == min(number, len(lengths))
    assert bins.sizes().min() >= 1
    assert bins.sizes().max() <= (most or 60)
    assert bins.totals(lengths).max() <= capacity
    assert bins.order.tolist() == list(range(len(bins.order)))
    assert len(bins.order) == (natural.offsets[len(bins)] if len(bins) < len(natural) else len(lengths))


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("full", [True, False])
def test_neighbors_are_alike_and_nothing_is_lost(ranks, full):
    costs = np.random.default_rng(0).integers(1, 10**6, 50)
    turns = side_by_side(costs, ranks, 1000, full)
    assert sorted(turns) == list(range(50))
    assert full or turns[-1] == 49
    sides = costs[turns][: 49 // ranks * ranks].reshape(-1, ranks)
    unsorted = costs[: 49 // ranks * ranks].reshape(-1, ranks)
    if ranks == 1:
        assert turns == list(range(50))
    else:
        assert np.ptp(sides, axis=1).mean() < 0.4 * np.ptp(unsorted, axis=1).mean()


def test_batches_change_places_only_with_those_planned_together():
    costs = np.random.default_rng(0).integers(1, 10**6, 64)
    turns = np.array(side_by_side(costs, 4, 8, True))
    assert (turns // 8 == np.arange(64) // 8).all()


def test_too_long_is_said_by_the_hosts_name():
    with pytest.raises(
        ValueError, match=r"document 1 has 9 tokens, but batch_max_len=8; raise batch_max_len to 9"
    ):
        fitting([3, 9], 8, "error", "batch_max_len")
    lengths, fits = fitting([3, 9], 8, "drop", "batch_max_len")
    assert (lengths.tolist(), fits.tolist()) == ([3, 9], [True, False])
