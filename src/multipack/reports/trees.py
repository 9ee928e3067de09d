"""Packs whose documents share their beginnings: a document a row, from the depth where it goes on; and the nodes.

rows      A A A A A A      nodes    first row 0, 3 rows, start 0, length 2       (A A)
          · · · · B B               first row 0, 2 rows, start 2, length 2       (A A)
          · · C C                   0, 1, 4, 2   1, 1, 4, 2   2, 1, 2, 2
"""

from __future__ import annotations

from typing import NamedTuple

from multipack.planning.items import SharedItems
from multipack.planning.lengths import Integers


class Row(NamedTuple):
    """A document of a pack: the first `shared` of its `length` tokens are computed in rows above."""

    shared: int
    length: int


class Node(NamedTuple):
    """Tokens of a pack that are computed once and belong to `rows` documents, from place `start` on."""

    first: int
    rows: int
    start: int
    length: int


def rows_of(items: SharedItems, pack: Integers) -> list[Row]:
    """The documents of a pack. A pair's second document follows the documents that share more with its first."""
    rows, waiting = list[Row](), list[Row]()
    for entry in items.entries(pack).tolist():
        document, shared = int(items.members.order[entry]), int(items.shared[entry])
        waiting.sort()
        while waiting and waiting[-1].shared >= shared:
            rows.append(waiting.pop())
        length = int(items.lengths[document])
        if items.answers is not None:
            first, both = items.answers[document].tolist()
            waiting.append(Row(both, length - first))
            length = first
        rows.append(Row(shared, length))
    return rows + sorted(waiting, reverse=True)


def nodes_of(rows: list[Row]) -> list[Node]:
    """The nodes of these documents, by rows and depth."""
    found, path = list[Node](), list[tuple[int, int, int]]()  # of nodes that may go on: first row, start, end
    for number, row in enumerate([*rows, Row(0, 0)]):
        while path and path[-1][2] > row.shared:
            first, start, end = path.pop()
            kept = max(start, row.shared)
            found.append(Node(first, number - first, kept, end - kept))
            if start < kept:
                path.append((first, start, kept))
        if row.length > row.shared:
            path.append((number, row.shared, row.length))
    return sorted(found, key=lambda node: (node.first, node.start))
