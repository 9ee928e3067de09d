"""Axolotl's documented packing functions: its signatures, checked against plain first fit."""

import logging
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.integrations.axolotl import allocate_sequentially, ffd_check, pack_group, pack_parallel

CASES = settings(deadline=None, max_examples=60)
LENGTHS = st.lists(st.integers(1, 60), max_size=50)


def first_fit_decreasing(lengths, capacity):
    rooms = []
    for length in sorted(lengths, reverse=True):
        place = next((number for number, room in enumerate(rooms) if room >= length), None)
        if place is None:
            rooms.append(capacity - length)
        else:
            rooms[place] -= length
    return len(rooms)


@CASES
@given(LENGTHS, st.integers(1, 80), st.integers(0, 50))
def test_the_check_is_first_fit_decreasing(lengths, capacity, num_bins):
    fits = max(lengths, default=0) <= capacity and first_fit_decreasing(lengths, capacity) <= num_bins
    assert ffd_check(np.array(lengths), capacity, num_bins) == (fits or not lengths)


@CASES
@given(LENGTHS, st.integers(60, 100), st.integers(1, 9), st.integers(1, 30))
def test_groups_hold_every_sequence_once(lengths, capacity, bin_size, group_size):
    bins = pack_parallel(np.array(lengths, dtype=np.int32), capacity, group_size, bin_size)
    assert sorted(number for held in bins for number in held) == list(range(len(lengths)))
    for held in bins:
        assert 1 <= len(held) <= bin_size
        assert sum(lengths[number] for number in held) <= capacity
        assert len({number // group_size for number in held}) == 1
    assert bins == pack_parallel(lengths, capacity, group_size, bin_size, 4, True, "spawn")


def test_safe_mode_counts_what_it_skips(caplog):
    with caplog.at_level(logging.WARNING):
        bins = pack_group([60, 50, 40, 30], 100, 60, 2, 9)
    assert len(bins) == 2
    assert "of 4 sequences do not fit into max_bins=2" in caplog.text
    assert len(pack_group([60, 50, 40, 30], 0, 60, 2, 9, safe_mode=False)) > 2
    with pytest.raises(ValueError, match="document 0 has 99 tokens"):
        pack_group([99], 0, 60, 2, 9)


@CASES
@given(LENGTHS, st.integers(60, 100), st.integers(1, 4))
def test_sequential_bins_keep_the_order(lengths, capacity, ranks):
    own = [allocate_sequentially(lengths, rank, capacity, ranks) for rank in range(ranks)]
    bins = sorted(held for each, _, _ in own for held in each)
    assert [number for held in bins for number in held] == list(range(len(lengths)))
    for first, second in pairwise(bins):
        assert sum(lengths[number] for number in [*first, second[0]]) > capacity
    assert {(used, slots) for _, used, slots in own} == {(sum(lengths), len(bins) * capacity)}
