"""Bounds: proven ones, so never above what branching finds, and as good as their formulas say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning.bounds import minimum_packs


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


def plain_l2(lengths, capacity):
    """Martello and Toth's L2, as its definition reads."""
    best = 0
    for a in [0, *(length for length in lengths if 2 * length <= capacity)]:
        alone = [length for length in lengths if length > capacity - a]
        large = [length for length in lengths if capacity - a >= length > capacity / 2]
        small = [length for length in lengths if capacity / 2 >= length >= a]
        missing = sum(small) - (len(large) * capacity - sum(large))
        best = max(best, len(alone) + len(large) + max(0, -(-missing // capacity)))
    return best


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_never_above_the_optimum(data):
    capacity = data.draw(st.integers(1, 30))
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=9))
    limit = data.draw(st.one_of(st.none(), st.integers(1, 3)))
    bound = minimum_packs(lengths, capacity, limit)
    assert bound <= fewest_packs(lengths, capacity, limit or 99)
    assert bound == max(plain_l2(lengths, capacity), -(-len(lengths) // (limit or len(lengths))))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_the_same_for_any_unit(data):
    """Long lengths are sorted, short ones counted: the bound is the same."""
    capacity = data.draw(st.integers(1, 50))
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=50)))
    assert minimum_packs(lengths, capacity) == minimum_packs(lengths * 1_000_000, capacity * 1_000_000)


def test_documents_that_exclude_each_other():
    assert minimum_packs([51] * 10, 100) == 10
    assert minimum_packs([50] * 10, 100) == 5
    assert minimum_packs([34] * 9, 100) == 4  # tokens alone
    assert minimum_packs([60, 60, 60, 45, 45, 45], 100) == 5  # 45 does not fit beside 60
    assert minimum_packs([1] * 10, 100, 3) == 4
    assert minimum_packs(np.full(20_000, 4097), 8192) == 20_000


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="document 0 has 101 tokens"):
        minimum_packs([101], 100)
    with pytest.raises(ValueError, match="max_documents"):
        minimum_packs([1], 100, 0)
