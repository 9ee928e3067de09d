"""Placing a block: limits held, scattered room gathered, gaps filled by what comes next."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning.kernels import placing
from multipack.planning.order import falling

CASES = settings(deadline=None, max_examples=80)


@st.composite
def blocks(draw):
    """Falling lengths, packs, capacity and a limit on documents."""
    capacity = draw(st.integers(4, 80))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    return (
        -np.sort(-np.array(lengths)),
        draw(st.integers(1, 7)),
        capacity,
        draw(st.sampled_from([2, 4, 99])),
    )


def check(placed, lengths, packs, capacity, limit):
    inside = placed >= 0
    assert placed.max() < packs
    assert np.bincount(placed[inside], weights=lengths[inside], minlength=packs).max() <= capacity
    assert np.bincount(placed[inside], minlength=packs).max() <= limit


@CASES
@given(blocks(), st.booleans(), st.booleans())
def test_no_pack_is_overfull(block, spread, fill):
    lengths, packs, capacity, limit = block
    wanted = np.arange(len(lengths)) % 3 > 0
    visit = np.flatnonzero(wanted)
    placed = placing.place(lengths, lengths * (lengths + 9), visit, packs, capacity, limit, spread)
    check(placed, lengths, packs, capacity, limit)
    assert (placed[~wanted] == -1).all()
    before = placed.copy()
    spare = 5 if fill else -1
    placing.gather(placed, lengths, wanted, packs, capacity, limit, spare)
    check(placed, lengths, packs, capacity, limit)
    assert (placed[before >= 0] >= 0).all()  # nothing that had a place loses it
    if not fill:
        assert (placed[~wanted] == -1).all()
    else:
        added = (placed >= 0) & ~wanted
        room = packs * capacity - lengths[placed >= 0].sum()
        assert room >= spare or not added.any()
    placing.fill_empty(placed, packs)
    check(placed, lengths, packs, capacity, limit)
    used = len(np.unique(placed[placed >= 0]))
    assert used == min(packs, (placed >= 0).sum())


@CASES
@given(blocks(), st.data())
def test_what_is_too_much_is_given_back(block, data):
    lengths, packs, capacity, _ = block
    placed = np.array(
        data.draw(st.lists(st.integers(0, packs - 1), min_size=len(lengths), max_size=len(lengths)))
    )
    before = placed.copy()
    placing.give_back(placed, lengths, packs, capacity)
    check(placed, lengths, packs, capacity, 99)
    for pack in range(packs):
        if lengths[before == pack].sum() <= capacity:
            assert (placed[before == pack] == pack).all()


def test_scattered_room_is_gathered():
    """Rooms of 2, 2 and 2 become one of 6: an 8 for a 6, twice."""
    lengths = np.array([8] * 6 + [6] * 4)
    placed = np.array([0, 0, 1, 1, 2, 2, 0, 1, 2, -1])  # 8 + 8 + 6 in each of three packs of 24
    placing.gather(placed, lengths, np.ones(10, dtype=bool), 3, 24, 9, -1)
    assert placed.min() >= 0
    assert np.bincount(placed, weights=lengths).tolist() == [24, 24, 24]


def test_gaps_are_filled_with_the_best_one_or_two():
    lengths = np.array([50, 40, 37, 20, 13, 9, 3])
    placed = np.array([0, 1, -1, -1, -1, -1, -1])
    wanted = placed >= 0
    placing.gather(placed, lengths, wanted, 2, 60, 9, 0)
    assert np.bincount(placed[placed >= 0], weights=lengths[placed >= 0]).tolist() == [
        59,
        60,
    ]  # 50 + 9, 40 + 20


@CASES
@given(st.lists(st.integers(1, 1 << 27), min_size=1, max_size=200))
def test_falling_order_is_stable(lengths):
    array = np.array(lengths)
    assert falling(array).tolist() == sorted(
        range(len(lengths)), key=lambda number: (-lengths[number], number)
    )
