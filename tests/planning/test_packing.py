"""Packs: every document once, within the capacity, best fit exact, bounds proven, bad lengths named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning import LARGEST_CAPACITY
from multipack.planning.lengths import check_lengths
from multipack.planning.packing import Packs, pack

METHODS = ["next_fit", "first_fit_decreasing", "best_fit", "fewest"]


def plain_pack(lengths, capacity, method, max_documents):
    """Textbook versions. Of equal rooms, best fit takes the one unchanged for the longest time."""
    order = range(len(lengths))
    if method != "next_fit":
        order = sorted(order, key=lambda i: -lengths[i])
    packs, touched = [], []
    for now, i in enumerate(order):
        fits = [
            p
            for p, pack in enumerate(packs)
            if sum(lengths[j] for j in pack) + lengths[i] <= capacity and len(pack) < max_documents
        ]
        if method == "next_fit":
            fits = [p for p in fits if p == len(packs) - 1]
        elif method != "first_fit_decreasing":
            fits.sort(key=lambda p: (-sum(lengths[j] for j in packs[p]), touched[p]))
        if fits:
            packs[fits[0]].append(i)
            touched[fits[0]] = now
        else:
            packs.append([i])
            touched.append(now)
    return packs


def check(packs, lengths, capacity, limit=None):
    """Properties of every packing."""
    assert packs.order.dtype == packs.offsets.dtype == np.int64
    assert sorted(packs.order.tolist()) == list(range(len(lengths)))
    assert packs.totals(lengths).max() <= capacity
    assert packs.sizes().min() >= 1
    assert packs.sizes().max() <= (limit or len(lengths))
    assert 1 <= packs.lower_bound <= len(packs)
    assert packs.gap == len(packs) - packs.lower_bound


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_packs_like_the_textbook(data):
    capacity = data.draw(st.one_of(st.integers(1, 60), st.integers(1, 5000)), "capacity")
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60), "lengths")
    limit = data.draw(st.one_of(st.none(), st.integers(1, 5)), "max_documents")
    for method in METHODS[:-1]:
        packs = pack(lengths, capacity, method, limit)
        check(packs, lengths, capacity, limit)
        expected = plain_pack(lengths, capacity, method, limit or len(lengths))
        if limit and method.startswith("best_fit") and len(packs) < len(expected):
            continue  # first fit, in another order, needed fewer
        assert [sorted(lengths[i] for i in p) for p in packs] == [
            sorted(lengths[i] for i in p) for p in expected
        ]
        if method == "next_fit":
            assert packs.order.tolist() == list(range(len(lengths)))
        elif method == "best_fit" and not limit:  # lengths in few and in many values: both sorts
            assert all(p.tolist() == sorted(p, key=lambda i: (-lengths[i], i)) for p in packs)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_many_equal_lengths(data):
    """Groups of equal packs that are split: the same packs as one document at a time."""
    capacity = data.draw(st.integers(1, 40))
    drawn = data.draw(
        st.lists(st.tuples(st.integers(1, capacity), st.integers(1, 40)), min_size=1, max_size=6)
    )
    lengths = np.repeat([length for length, _ in drawn], [times for _, times in drawn])
    limit = data.draw(st.one_of(st.none(), st.integers(1, 6)))
    packs = pack(lengths, capacity, "best_fit", limit)
    check(packs, lengths, capacity, limit)
    expected = plain_pack(lengths.tolist(), capacity, "best_fit", limit or len(lengths))
    assert [lengths[p].tolist() for p in packs] == [lengths[p].tolist() for p in expected]


@pytest.mark.parametrize("capacity", [LARGEST_CAPACITY, LARGEST_CAPACITY - 12_345])
@pytest.mark.parametrize("method", METHODS)
def test_largest_capacity(capacity, method):
    """Tables over rooms have the length of the capacity; only the rooms that occur cost time."""
    rng = np.random.default_rng(1)
    for lengths in (rng.integers(1, capacity + 1, 300), rng.integers(1, 100, 300)):
        packs = pack(lengths, capacity, method, time_budget=1.0)
        check(packs, lengths, capacity)
        if method.startswith("best"):
            expected = plain_pack(lengths.tolist(), capacity, method, 300)
            assert [lengths[p].sum() for p in packs] == [sum(lengths[i] for i in p) for p in expected]


def test_a_million_documents():
    lengths = np.random.default_rng(0).lognormal(5.7, 1.0, 1_000_000).clip(1, 8192).astype(np.int32)
    packs = pack(lengths, 8192)
    assert packs.gap <= 2
    check(packs, lengths, 8192)


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


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_bounds_are_martello_and_toths(data):
    capacity = data.draw(st.integers(1, 30))
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=9))
    limit = data.draw(st.one_of(st.none(), st.integers(1, 3)))
    bound = pack(lengths, capacity, max_documents=limit).lower_bound
    assert bound == max(plain_l2(lengths, capacity), -(-len(lengths) // (limit or len(lengths))))


def test_bounds_of_documents_that_exclude_each_other():
    assert pack([51] * 10, 100).lower_bound == 10
    assert pack([50] * 10, 100).lower_bound == 5
    assert pack([34] * 9, 100).lower_bound == 4  # tokens alone
    assert pack([60, 60, 60, 45, 45, 45], 100).lower_bound == 5  # 45 does not fit beside 60
    assert pack([1] * 10, 100, max_documents=3).lower_bound == 4
    assert pack(np.full(20_000, 4097), 8192).lower_bound == 20_000


def test_packs_are_a_sequence():
    packs = Packs(np.array([2, 0, 1]), np.array([0, 1, 1, 3]))
    assert [p.tolist() for p in packs] == [[2], [], [0, 1]]
    assert packs[-1].tolist() == [0, 1]
    assert packs.totals([10, 20, 30]).tolist() == [30, 0, 30]
    assert packs.sizes().tolist() == [1, 0, 2]
    assert packs.gap is None
    assert Packs(packs.order, packs.offsets, 2).gap == 1
    for number in (3, -4):
        with pytest.raises(IndexError, match="of 3"):
            packs[number]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "empty"),
        ([3, 0, 5, 0], "document 1 has 0 tokens, document 3 has 0 tokens"),
        ([3, -2], "document 1 has -2 tokens"),
        ([0] * 9, "and 4 more"),
        ([1.0, 2.0], "integers, got float64"),
        ([True, False], "integers, got bool"),
        (["a"], "integers"),
        ([[1, 2], [3, 4]], r"of shape \(2, 2\)"),
        ([[1, 2], [3]], "flat list of integers"),
        ([None, 1], "integers"),
        (np.array([2**64 - 1], dtype=np.uint64), "document 0 has -1 tokens"),
        (
            [100, 101, 5, 300],
            "document 1 has 101 tokens, document 3 has 300 tokens, but a pack holds capacity=100",
        ),
    ],
)
def test_bad_lengths_are_named(lengths, message):
    with pytest.raises(ValueError, match=message):
        check_lengths(lengths, 100)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
def test_any_integers_are_good(dtype):
    assert check_lengths(np.array([1, 2, 3], dtype=dtype), 3).dtype == np.int64


def test_bad_options():
    with pytest.raises(ValueError, match="best_fit"):
        pack([1], 8, "worst_fit")
    for capacity in (0, 8.0, True, 1 << 40):
        with pytest.raises(ValueError, match="capacity"):
            pack([1], capacity)
    with pytest.raises(ValueError, match="max_documents"):
        pack([1], 8, max_documents=0)
    for seconds in (0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="time_budget"):
            pack([1], 8, "fewest", time_budget=seconds)
