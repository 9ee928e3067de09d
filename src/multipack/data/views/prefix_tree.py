"""`PrefixTree`: documents with common beginnings, as nodes of shared tokens.

    documents   0  p p p p a a a        nodes   document  start  length  parent
                1  p p p p b b          0          0        0      4       −1      p p p p ─┬─ a a a
                2  q q                  1          0        4      3        0               └─ b b
                                        2          1        4      2        0      q q
    last nodes  1 2 3                   3          2        0      2       −1

A document is the path from a root to its last node. A model computes the tokens of a node once for all documents on
whose path it is. Each node costs time, so a common beginning of few tokens is repeated instead (common_prefix.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.views.common_prefix import shared
from multipack.planning.lengths import Integers

Group = tuple[int, int]
"""[first, stop) of a list of documents in the order of their tokens."""


@dataclass(frozen=True)
class PrefixTree:
    """Trees over D documents: N nodes depth-first, parents before their children.

    Attributes:
        document: (N,) number of the first document that has the node on its path.
        start: (N,) depth: tokens of its documents before the node.
        length: (N,) tokens of the node.
        parent: (N,) number of the node before it on the path; −1 = none.
        last: (D,) number of the node with which each document ends; documents with equal tokens may have the same one.
    """

    document: Integers
    start: Integers
    length: Integers
    parent: Integers
    last: Integers

    @classmethod
    def of(cls, documents: Sequence[NDArray[np.integer[Any]]], min_prefix: int) -> PrefixTree:
        """The trees of documents, given their tokens.

        Any two documents share the beginning that `common_prefix.shared` says, so that documents never have more slots
        together than in parts. Roots, and the children of a node, are in the order of their first documents.

        Raises:
            ValueError: `min_prefix` is below 1.
        """
        if min_prefix < 1:
            raise ValueError(f"data.min_prefix={min_prefix} must be at least 1")
        # Big-endian bytes are in the order of the tokens.
        keys = [document.astype(">u4").tobytes() for document in documents]
        order = sorted(range(len(documents)), key=keys.__getitem__)
        sizes = [_common(documents[a], documents[b]) for a, b in pairwise(order)]
        common = [0, *shared(np.array(sizes, dtype=np.int64), min_prefix).tolist()]
        last = np.zeros(len(documents), dtype=np.int64)
        nodes: list[tuple[int, int, int, int]] = []
        waiting = [(group, 0, -1) for group in _groups(order, common, (0, len(order)), 1)]
        while waiting:
            (first, stop), start, parent = waiting.pop()
            end = min(common[first + 1 : stop], default=len(documents[order[first]]))
            number = len(nodes)
            nodes.append((min(order[first:stop]), start, end - start, parent))
            while first < stop and len(documents[order[first]]) == end:
                last[order[first]] = number
                first += 1
            children = _groups(order, common, (first, stop), end + 1)
            waiting += [(group, end, number) for group in children]
        document, start_of, length, parent_of = np.array(nodes, dtype=np.int64).reshape(-1, 4).T.copy()
        return cls(document, start_of, length, parent_of, last)

    @property
    def num_slots(self) -> int:
        """Tokens of all nodes."""
        return int(self.length.sum())

    @property
    def shares(self) -> bool:
        """Whether a node is on the paths of several documents."""
        return len(self.length) < len(self.last) or bool((self.parent >= 0).any())


def _groups(order: list[int], common: list[int], group: Group, least: int) -> list[Group]:
    """Parts of a group with at least `least` shared tokens each, in descending order of their first documents.

    `common[i]` is the number of shared tokens of the documents `order[i - 1]` and `order[i]`.
    """
    first, stop = group
    if first == stop:
        return []
    cuts = [first, *(place for place in range(first + 1, stop) if common[place] < least), stop]
    return sorted(pairwise(cuts), key=lambda part: -min(order[slice(*part)]))


def _common(left: NDArray[np.integer[Any]], right: NDArray[np.integer[Any]]) -> int:
    """Number of tokens with which both begin."""
    size = min(len(left), len(right))
    differ = left[:size] != right[:size]
    return int(differ.argmax()) if differ.any() else size
