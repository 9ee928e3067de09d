"""Packs made alike: by trades of single documents, of two, and with documents that wait."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning.kernels import balancing
from multipack.planning.level import trade_two
from multipack.planning.plan import plan

LINEAR = 500
CAPACITY = 8192


def weigh(lengths):
    return LINEAR * lengths + lengths * lengths


def totals(placed, values, packs):
    return np.bincount(placed[placed >= 0], weights=values[placed >= 0], minlength=packs).astype(np.int64)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_two_for_two_keeps_every_promise(data):
    packs = data.draw(st.integers(1, 6))
    lengths = -np.sort(-np.array(data.draw(st.lists(st.integers(1, 30), min_size=packs, max_size=30))))
    numbers = st.integers(-1, packs - 1)
    placed = np.array(data.draw(st.lists(numbers, min_size=len(lengths), max_size=len(lengths))))
    placed[:packs] = np.arange(packs)
    costs = weigh(lengths)
    capacity = int(totals(placed, lengths, packs).max()) + data.draw(st.integers(0, 10))
    limit = int(np.bincount(placed[placed >= 0], minlength=packs).max()) + data.draw(st.integers(0, 2))
    old = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))), dtype=np.int64)
    mean = totals(placed, costs, packs).sum() // packs
    before, first = np.abs(totals(placed, costs, packs) - mean).max(), placed.copy()
    trade_two(placed, lengths, costs, old, packs, capacity, limit, 1024)
    sizes = np.bincount(placed[placed >= 0], minlength=packs)
    assert totals(placed, lengths, packs).max() <= capacity
    assert sizes.min() >= 1
    assert sizes.max() <= limit
    assert np.all(placed[old][first[old] >= 0] >= 0)
    assert -1 <= placed.min() <= placed.max() < packs
    assert np.abs(totals(placed, costs, packs) - mean).max() <= 2 * before + packs


def test_two_documents_change_places_where_single_ones_do_not_help():
    lengths = np.array([60, 60, 41, 39, 20])
    packs = (np.array([0, 1, 2, 3, 4]), np.array([0, 2, 5]), lengths, lengths.copy())
    assert balancing.exchange(*packs, 500, 9, 2, 0, 1, 0) == 120
    assert balancing.exchange_two(*packs, 500, 9, 0, 2, 0) == 119  # 60 for 39 and 20
    assert sorted(packs[0].tolist()) == list(range(5))


def test_documents_that_wait_come_in_for_those_that_are_not_old():
    lengths = np.array([60, 52, 48, 40, 30])
    cases = {
        (): [1, 0, 0, -1, 1],
        (0, 1): [1, 0, 0, 1, -1],
        (0, 1, 3, 4): [1, 0, -1, 0, 1],  # nobody makes place
        None: [1, 0, -1, 0, 1],
    }
    for old, expected in cases.items():
        placed = np.array([0, 0, -1, 1, 1])
        who = None if old is None else np.array(old, dtype=np.int64)
        trade_two(placed, lengths, lengths.copy(), who, 2, 200, 4, 1024)
        assert placed.tolist() == expected


def test_packs_of_few_documents_agree():
    """Half of the documents as long as a quarter of a pack, as in chats that were cut to 2,048 tokens."""
    random = np.random.default_rng(7)
    lengths = np.where(random.random(4000) < 0.5, 2048, random.integers(64, 2048, 4000))
    made = plan(lengths, capacity=CAPACITY, packs_per_step=8, window=1)
    costs = made.costs(np.arange(len(lengths)))
    dealt = [made.deal(step, 8).totals(costs) for step in range(made.num_steps)]
    utilization = sum(each.sum() for each in dealt) / sum(8 * each.max() for each in dealt)
    minimum = -(-int(lengths.sum()) // (8 * CAPACITY))
    assert made.num_steps <= minimum + 1
    assert utilization >= 0.996


def test_the_last_steps_are_like_the_others():
    """Choosing among documents that wait does not leave the long ones for the end."""
    random = np.random.default_rng(8)
    lengths = np.where(random.random(6000) < 0.5, 2048, random.integers(64, 2048, 6000))
    made = plan(lengths, capacity=CAPACITY, packs_per_step=64, window=1)
    longest = [np.mean(lengths[made.documents(step)] == 2048) for step in range(made.num_steps)]
    assert abs(np.mean(longest[-2:]) - np.mean(longest)) < 0.08
