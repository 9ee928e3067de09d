"""`PrefixTree`: the paths of its nodes are the documents, and the nodes are as long as `min_prefix` says."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.views.common_prefix import GRAIN
from multipack.data.views.common_prefix import shared as shared_tokens
from multipack.data.views.prefix_tree import PrefixTree

DOCUMENTS = st.lists(st.lists(st.integers(0, 1), max_size=7), max_size=7)


def path_of(tree: PrefixTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parent[node])
    return path


def common(left: list[int], right: list[int]) -> int:
    size = 0
    while size < min(len(left), len(right)) and left[size] == right[size]:
        size += 1
    return size


@settings(max_examples=150, deadline=None)
@given(documents=DOCUMENTS, min_prefix=st.integers(1, 4))
def test_paths_are_the_documents_and_nodes_are_worth_their_tokens(
    documents: list[list[int]], min_prefix: int
) -> None:
    tokens = [np.array(document, dtype=np.uint16) for document in documents]
    tree = PrefixTree.of(tokens, min_prefix)
    paths = [path_of(tree, int(node)) for node in tree.last]
    on_path: dict[int, list[int]] = {}
    for number, path in enumerate(paths):
        parts = [tokens[tree.document[node]][tree.start[node] :][: tree.length[node]] for node in path]
        assert np.concatenate(parts).tolist() == documents[number]
        for node in path:
            on_path.setdefault(node, []).append(number)
    assert sorted(on_path) == list(range(len(tree.length)))  # no node without a document
    for node, numbers in on_path.items():
        assert tree.document[node] == min(numbers)
        assert tree.parent[node] < node
        assert len(numbers) == 1 or tree.length[node] >= min(GRAIN, min_prefix)
    roots = [node for node in on_path if tree.parent[node] < 0]
    assert roots == sorted(roots, key=lambda node: int(tree.document[node]))
    # What two documents share depends on these two only.
    for left, right in combinations(range(len(documents)), 2):
        shared = [node for node in paths[left] if node in paths[right]]
        depth = int(sum(tree.length[node] for node in shared))
        assert depth == int(shared_tokens(np.array(common(documents[left], documents[right])), min_prefix))
    # Depth-first: the descendants of a node come right after it.
    for node in on_path:
        inside = [each for each in on_path if node in path_of(tree, each)]
        assert sorted(inside) == list(range(node, node + len(inside)))


def test_equal_documents_share_all_their_tokens() -> None:
    assert not PrefixTree.of([np.array([1]), np.array([2])], 1).shares
    assert PrefixTree.of([np.array([1]), np.array([1])], 1).shares


def test_min_prefix_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"data\.min_prefix=0"):
        PrefixTree.of([np.array([1])], 0)
