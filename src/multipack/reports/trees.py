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


def nodes_of(rows: list[Row]) -> list[tuple[int, int, int, int]]:
    """(first row, rows, start, length) of each part of these documents that is computed once, by rows and depth."""
    found, path = [], list[tuple[int, int, int]]()  # of nodes that may go on: first row, start, end
    for number, row in enumerate([*rows, Row(0, 0)]):
        while path and path[-1][2] > row.shared:
            first, start, end = path.pop()
            kept = max(start, row.shared)
            found.append((first, number - first, kept, end - kept))
            if start < kept:
                path.append((first, start, kept))
        if row.length > row.shared:
            path.append((number, row.shared, row.length))
    return sorted(found, key=lambda node: (node[0], node[2]))
