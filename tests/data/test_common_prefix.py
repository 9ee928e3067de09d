"""Sorted documents, what neighbors share, where trees are cut, and how few slots there can be."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.views.common_prefix import (
    common_prefixes,
    cut,
    least_slots,
    shared,
    sort_by_tokens,
)
from multipack.data.views.prefix_tree import PrefixTree

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def flat(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([len(each) for each in documents])
    return np.concatenate(documents).astype(np.uint16), np.cumsum(lengths) - lengths, lengths


def measured(documents: list[list[int]], min_prefix: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    tokens, starts, lengths = flat(documents)
    order = sort_by_tokens(tokens, starts, lengths)
    return (
        order.tolist(),
        lengths[order],
        shared(common_prefixes(tokens, starts, lengths, order), min_prefix),
    )


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, min_prefix=st.integers(1, 5))
def test_sorted_documents_give_the_slots_of_their_trees(documents: list[list[int]], min_prefix: int) -> None:
    order, lengths, again = measured(documents, min_prefix)
    assert order == sorted(range(len(documents)), key=lambda number: (documents[number], number))
    tree = PrefixTree.of([np.array(each) for each in documents], min_prefix)
    assert tree.num_slots == int(lengths.sum() - again.sum())


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, limit=st.integers(9, 25))
def test_cuts_repeat_the_fewest_tokens(documents: list[list[int]], limit: int) -> None:
    _, lengths, again = measured(documents, 1)

    def slots(start: int, stop: int) -> int:
        return int(lengths[start:stop].sum() - again[start + 1 : stop].sum())

    begins = cut(lengths, again, limit)
    places = [*np.flatnonzero(begins).tolist(), len(lengths)]
    assert places[0] == 0
    assert all(slots(*each) <= limit for each in pairwise(places))
    assert all(begins[number] for number in range(len(lengths)) if number and not again[number])
    inner, every = range(1, len(lengths)), []
    for count in range(len(lengths)):
        for chosen in combinations(inner, count):
            parts = list(pairwise([0, *chosen, len(lengths)]))
            if all(slots(*part) <= limit for part in parts):
                every.append(sum(slots(*part) for part in parts))
    assert sum(slots(*part) for part in pairwise(places)) == min(every)


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5),
    capacity=st.integers(6, 9),
)
def test_no_packs_have_fewer_slots_than_the_bound(documents: list[list[int]], capacity: int) -> None:
    _, lengths, again = measured(documents, 1)
    bound = least_slots(lengths, again, capacity)
    assert bound >= int(lengths.sum() - again.sum())

    def least(rest: list[list[int]]) -> int:
        """The fewest slots over all divisions of documents into packs."""
        if not rest:
            return 0
        found = []
        for count in range(len(rest)):
            for others in combinations(range(1, len(rest)), count):
                inside = [rest[0], *(rest[number] for number in others)]
                slots = PrefixTree.of([np.array(each) for each in inside], 1).num_slots
                if slots <= capacity:
                    left = [rest[number] for number in range(1, len(rest)) if number not in others]
                    found.append(slots + least(left))
        return min(found)

    assert bound <= least(documents)


def test_many_equal_and_nested_documents_are_sorted() -> None:
    random = np.random.default_rng(0)
    whole = random.integers(0, 2, 400).tolist()
    documents = [whole[: int(size)] for size in random.integers(1, 400, 300)] + [whole] * 50
    order, lengths, again = measured(documents, 16)
    assert order == sorted(range(len(documents)), key=lambda number: (documents[number], number))
    assert lengths.sum() - again.sum() <= 400 + 3 * len(documents)
