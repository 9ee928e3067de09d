"""Packs: every document once, the capacity held, best fit exact, bad lengths named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.planning.packing import Packs, check_lengths, pack

METHODS = ["next_fit", "first_fit_decreasing", "best_fit_decreasing", "best_fit"]


def plain_pack(lengths, capacity, method, max_documents):
    """The textbook versions, without any structure."""
    order = range(len(lengths))
    if method != "next_fit":
        order = sorted(order, key=lambda i: -lengths[i])
    packs = []
    for i in order:
        fits = [
            p for p in packs if sum(lengths[j] for j in p) + lengths[i] <= capacity and len(p) < max_documents
        ]
        if method == "next_fit":
            fits = [p for p in fits if p is packs[-1]]
        elif method != "first_fit_decreasing":
            fits.sort(key=lambda p: -sum(lengths[j] for j in p))
        if fits:
            fits[0].append(i)
        else:
            packs.append([i])
    return packs


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_packs_like_the_textbook(data):
    capacity = data.draw(st.integers(1, 5000), "capacity")
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60), "lengths")
    limit = data.draw(st.one_of(st.none(), st.integers(1, 5)), "max_documents")
    for method in METHODS:
        packs = pack(lengths, capacity, method, limit)
        assert sorted(packs.order.tolist()) == list(range(len(lengths)))
        assert packs.totals(lengths).max() <= capacity
        assert packs.sizes().min() >= 1
        assert packs.sizes().max() <= (limit or len(lengths))
        expected = plain_pack(lengths, capacity, method, limit or len(lengths))
        if (
            limit is None or method != "best_fit"
        ):  # which of two equal rooms is taken matters to a count limit
            assert len(packs) == len(expected)
        if method == "next_fit":
            assert packs.order.tolist() == list(range(len(lengths)))
        if limit is None:
            assert sorted(packs.totals(lengths).tolist()) == sorted(
                sum(lengths[i] for i in p) for p in expected
            )


@pytest.mark.parametrize(
    ("lengths", "capacity", "packs"),
    [([4097] * 2000, 8192, 2000), ([1] * 20000, 8192, 3), ([8192] * 500, 8192, 500), ([7], 8192, 1)],
)
def test_adversarial_sets(lengths, capacity, packs):
    assert len(pack(lengths, capacity)) == packs


def test_lightbinpack_benchmark():
    lengths = np.random.RandomState(0).randint(1000, 20000, 10_000)
    assert len(pack(lengths, 50_000)) <= 2114


def test_packs_are_a_sequence():
    packs = Packs(np.array([2, 0, 1]), np.array([0, 1, 1, 3]))
    assert [p.tolist() for p in packs] == [[2], [], [0, 1]]
    assert packs[-1].tolist() == [0, 1]
    assert packs.totals([10, 20, 30]).tolist() == [30, 0, 30]
    assert packs.sizes().tolist() == [1, 0, 2]
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
        ([1.0, float("nan")], "document 1 has nan"),
        ([2, 2.5], "document 1 has 2.5"),
        ([True, False], "integers, got bool"),
        (["a"], "integers"),
        ([[1, 2], [3, 4]], r"one-dimensional, got shape \(2, 2\)"),
        ([[1, 2], [3]], "flat list of integers"),
        ([None, 1], "integers"),
        (np.array([2**64 - 1], dtype=np.uint64), "below 2"),
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
