"""One block: what waits is sure of its place, and old entries come early where a block is wider than a window."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning.block import Rules, arrange, first_fit, fits, place

CASES = settings(deadline=None, max_examples=100)


def rules(**changes):
    base = {
        "capacity": 10, "packs_per_step": 1, "step_tokens": 10, "max_documents": 9, "price": lambda x: x,
        "group": True, "full": False, "shuffled": True, "seed": 0, "epoch": 0,
    }  # fmt: skip
    return Rules(**(base | changes))


@CASES
@given(st.lists(st.integers(1, 10), min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 9))
def test_what_the_first_packs_leave_keeps_its_packs(lengths, old, taken):
    lengths, old = np.array(lengths), min(old, len(lengths))
    packs = first_fit(lengths, old, rules())
    for number in range(packs.max() + 1):
        assert 1 <= lengths[packs == number].sum() <= 10
    rest = packs >= taken
    if rest.any():
        again = first_fit(lengths[rest], int(rest[:old].sum()), rules())
        assert again.tolist() == (packs[rest] - taken).tolist()


@pytest.mark.parametrize(
    ("lengths", "old", "ahead", "expected"),
    [
        ([], 0, (1, 0), True),
        ([6, 6], 1, (1, 1), True),
        ([6, 6], 2, (1, 1), False),  # both now: they exclude each other
        ([6, 6, 6], 1, (1, 1), False),
        ([6, 4, 6, 4], 2, (1, 1), True),
        ([6, 6, 4, 4], 2, (2, 0), True),
        ([1] * 9, 9, (1, 0), True),
        ([1] * 10, 10, (1, 0), False),  # nine documents of a pack at most
    ],
)
def test_what_waits_fits_or_not(lengths, old, ahead, expected):
    assert fits(np.array(lengths, dtype=np.int64), old, rules(), ahead) is expected


def test_a_place_that_is_certain_is_kept():
    """Spread by cost, 5 and 5 go to two packs and 6 and 4 to no common one; first fit found room for all."""
    lengths = np.array([6, 5, 5, 4])
    begin = np.array([0, 1, 1, 0])
    everything, old = np.ones(4, dtype=np.bool_), np.arange(4)
    placed = place(lengths, lengths.copy(), old, everything, rules(), 2, 0, begin)
    assert placed.min() >= 0
    assert np.bincount(placed, weights=lengths).tolist() == [10, 10]


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_old_entries_stand_in_the_first_steps(shuffled, group, seed):
    """Eight steps of two packs; four packs of as many steps hold an old entry, which need two steps."""
    positions, costs = np.arange(16)[::-1].copy(), np.arange(16, 0, -1) * 1000
    placed = np.random.default_rng(seed).permutation(16)
    made = rules(packs_per_step=2, shuffled=shuffled, group=group, seed=seed)
    first = np.isin(positions, [15, 9, 4, 0])
    order, pack_sizes, step_sizes = arrange(positions, costs, placed, made, 8, 0, first, 2)
    assert (pack_sizes.tolist(), step_sizes.tolist()) == ([1] * 16, [2] * 8)
    assert set(order[:4].tolist()) == {15, 9, 4, 0}
    assert sorted(order.tolist()) == list(range(16))
    roomy = arrange(positions, costs, placed, made, 8, 0, first, 6)[0]
    assert set(roomy[:8].tolist()) >= {15, 9, 4, 0}  # four steps as they are
