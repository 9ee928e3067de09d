"""Axolotl's packing functions: its signatures and meanings, checked against plain first fit."""

import logging
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.integrations import axolotl, axolotl_packing
from multipack.integrations.axolotl import (
    allocate,
    allocate_sequentially,
    ffd_check,
    ffd_with_result,
    pack_group,
    pack_parallel,
)
from multipack.planning.packing import pack

CASES = settings(deadline=None, max_examples=80)
LENGTHS = st.lists(st.integers(1, 60), max_size=50)


def first_fit_decreasing(lengths, capacity):
    rooms, bins = [], []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        for place, room in enumerate(rooms):
            if room >= lengths[number]:
                rooms[place] -= lengths[number]
                bins[place].append(number)
                break
        else:
            rooms.append(capacity - lengths[number])
            bins.append([number])
    return bins


@CASES
@given(LENGTHS, st.integers(1, 80), st.integers(0, 50))
def test_first_fit_decreasing(lengths, capacity, num_bins):
    if max(lengths, default=0) > capacity:
        assert not ffd_check(np.array(lengths), capacity, num_bins)
        with pytest.raises(ValueError, match=f"holds capacity={capacity}"):
            ffd_with_result(lengths, capacity, 0)
        return
    expected = first_fit_decreasing(lengths, capacity)
    assert ffd_with_result(np.array(lengths), capacity, 0) == expected
    assert ffd_with_result(lengths, capacity, 7) == [[7 + number for number in held] for held in expected]
    assert ffd_check(np.array(lengths), capacity, num_bins) == (len(expected) <= num_bins)


@CASES
@given(LENGTHS, st.integers(60, 100), st.integers(1, 9), st.integers(1, 30))
def test_groups(lengths, capacity, bin_size, group_size):
    bins = pack_parallel(np.array(lengths, dtype=np.int32), capacity, group_size, bin_size)
    assert sorted(number for held in bins for number in held) == list(range(len(lengths)))
    for held in bins:
        assert 1 <= len(held) <= bin_size
        assert sum(lengths[number] for number in held) <= capacity
        assert len({number // group_size for number in held}) == 1
    group = np.array(lengths[:group_size])
    if len(group):
        assert bins[: len(pack(group, capacity, max_documents=bin_size))] == pack_group(
            group, 0, capacity, len(group), bin_size
        )


def test_settings_of_processes_change_nothing():
    lengths = np.random.default_rng(0).integers(1, 2000, 5000)
    plain = pack_parallel(lengths, 4096, 1000, 200)
    assert plain == pack_parallel(lengths, 4096, 1000, 200, num_processes=16, mp_start_method="spawn")
    assert plain == pack_parallel(lengths, 4096, 1000, 200, safe_mode=False, mp_start_method=None)


def test_safe_mode_keeps_to_max_bins_and_counts_what_it_skips(caplog):
    lengths = np.array([90, 10, 60, 50, 20])
    assert len(pack_group(lengths, 0, 100, 2, 200, safe_mode=False)) == 3
    with caplog.at_level(logging.WARNING):
        bins = pack_group(lengths, 100, 100, 2, 200)
    assert bins == [[100, 101], [102, 104]]
    assert "1 of 5 sequences found no room in max_bins=2" in caplog.text


def test_many_bins_are_no_more_work_a_sequence(monkeypatch):
    """Every sequence more than half a bin: first fit would look at all bins for each. The packer sees each once."""
    handed = []

    def counting(lengths, *arguments):
        handed.append(len(lengths))
        return pack(lengths, *arguments)

    monkeypatch.setattr(axolotl_packing, "pack", counting)
    for count in (20_000, 40_000):
        handed.clear()
        bins = pack_parallel(np.full(count, 4097), 8192, 100_000, 200)
        assert bins == [[number] for number in range(count)]
        assert sum(handed) == count


@CASES
@given(LENGTHS, st.integers(60, 100), st.integers(1, 5))
def test_sequential_bins_keep_the_order(lengths, capacity, ranks):
    dealt = [allocate_sequentially(np.array(lengths), rank, capacity, ranks) for rank in range(ranks)]
    bins = [[] for _ in range(sum(len(mine) for mine, _, _ in dealt))]
    for rank, (mine, used, slots) in enumerate(dealt):
        bins[rank::ranks] = mine
        assert (used, slots) == (sum(lengths), len(bins) * capacity)
    assert [number for held in bins for number in held] == list(range(len(lengths)))
    for held, after in pairwise(bins):
        total = sum(lengths[number] for number in held)
        assert total <= capacity < total + lengths[after[0]]


def test_allocate_gives_every_rank_a_bin_a_step():
    lengths = np.random.default_rng(0).integers(1, 1000, 500)
    dealt = [allocate(lengths, np.cumsum(lengths), rank, 4096, 4) for rank in range(4)]
    held = [number for mine, _, _ in dealt for each in mine for number in each]
    assert sorted(held) == list(range(500))
    assert len({len(mine) for mine, _, _ in dealt}) == 1
    for mine, used, slots in dealt:
        assert (used, slots) == (lengths.sum(), len(mine) * 4 * 4096)
        assert all(lengths[each].sum() <= 4096 for each in mine)
    assert len(dealt[0][0]) <= -(-lengths.sum() // (4 * 4096)) + 1
    with pytest.raises(ValueError, match="3 sequences cannot give each of n=4 ranks"):
        allocate([1, 2, 3], None, 0, 10, 4)


def test_the_names_are_where_axolotl_has_them():
    for name in axolotl.__all__:
        assert getattr(axolotl, name) is not None
