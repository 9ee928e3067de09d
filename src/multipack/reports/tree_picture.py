"""Packs whose documents share their beginnings: a document a row, from the depth where it goes on; the nodes; as text.

rows      A A A A A A      nodes    first row 0, 3 rows, start 0, length 2       (A A)
          · · · · B B               first row 0, 2 rows, start 2, length 2       (A A)
          · · C C                   0, 1, 4, 2   1, 1, 4, 2   2, 1, 2, 2
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from multipack.data.text.skipped import counted
from multipack.planning.items import SharedItems
from multipack.planning.lengths import check_integer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multipack.planning.plan import Plan

SHARED = "·"
"""A character of tokens that are computed in a document above."""


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


def rows_of(items: SharedItems, pack: NDArray[np.int64]) -> list[Row]:
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


def draw_trees(
    plan: Plan,
    step: int,
    *,
    letters: str,
    tokens_per_character: int | None = None,
    columns: int = 72,
    max_documents: int = 24,
    max_packs: int = 8,
) -> str:
    """Draw the packs of a step of a plan of items; arguments as of `draw_step`.

    Args:
        plan: a plan made of `SharedItems`.
        step: index of the step.
        letters: letters of the documents of a pack, used cyclically.
        tokens_per_character: None = the smallest power of two at which the longest document fits into one row.
        columns: maximum characters of a row.
        max_documents: maximum number of documents drawn of a pack.
        max_packs: maximum number of packs drawn.
    """
    items, packs = plan.items, plan.packs(step)
    assert isinstance(items, SharedItems)
    drawn = [rows_of(items, pack) for pack in islice(packs, max_packs)]
    tokens, longest = plan.tokens(step), max(row.length for rows in drawn for row in rows)
    scale = tokens_per_character or 1 << (-(-longest // columns) - 1).bit_length()
    check_integer("tokens_per_character", scale)
    slots = int(plan.slots[packs.order].sum())
    lines = [
        f"step {step % plan.num_steps} of {plan.num_steps:,}: {len(plan.documents(step)):,} documents of {tokens:,}"
        f" tokens in {slots:,} slots ({tokens / slots:.1%}); a character is {scale} token{'s' if scale > 1 else ''},"
        f" {SHARED} is computed above"
    ]
    for number, (pack, rows) in enumerate(zip(packs, drawn, strict=False)):
        used, held = int(plan.slots[pack].sum()), sum(row.length for row in rows)
        documents = counted(len(rows), "documents")
        lines.append(f"pack {number}: {documents} of {held:,} tokens in {used:,} of {plan.capacity:,} slots")
        for place, row in enumerate(rows[:max_documents]):
            shared, end = (size + scale // 2 for size in row)
            own = max(end // scale - shared // scale, 1)
            lines.append(f"  {SHARED * (shared // scale)}{letters[place % len(letters)] * own}")
        if len(rows) > max_documents:
            lines.append(f"  … and {len(rows) - max_documents:,} more documents")
    if len(packs) > max_packs:
        lines.append(f"  … and {len(packs) - max_packs:,} more packs")
    return "\n".join(lines)
