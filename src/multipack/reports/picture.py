"""A step of a plan drawn as text: its documents in order, padded, and packed.

Each document has a letter, and padding is X; the first line states the tokens per character. Modeled on the picture in
Axolotl's documentation of multipack.
"""

from __future__ import annotations

import string
import textwrap
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from multipack.data.text.skipped import counted
from multipack.planning.items import SharedItems
from multipack.planning.plan import Plan
from multipack.planning.report import seeded_order
from multipack.reports.trees import rows_of

LETTERS = (string.ascii_letters.swapcase() + string.digits).replace("X", "").replace("x", "")
"""A … Z a … z 0 … 9 without X, used cyclically for documents."""
BATCH_SIZE = 4
"""Documents of a padded batch."""
SHARED = "·"
"""A character of tokens that are computed in a document above."""
MOST_DOCUMENTS, MOST_PACKS = BATCH_SIZE, 4
"""Documents and packs that are drawn; a line states how many others there are."""

_MIN_ROWS = 4
"""Minimum number of rows of all packs together: a single pack has this number of rows."""


def draw_step(plan: Plan, step: int = 0, columns: int = 72) -> str:
    """Draw the documents of a step three times: in order, padded, packed; of items of several documents, the packs.

    A character is the smallest power of two of tokens at which the longest document fits into one row, and a full pack
    into one row (a single pack into four rows, two packs into two rows each). A document of less than half the tokens
    of a character may have no letter in its pack. Negative steps count from the last step.
    """
    if isinstance(plan.items, SharedItems):
        return draw_trees(plan, plan.items, step, columns)
    packs = plan.packs(step)
    row_tokens = max(
        -(-plan.capacity // max(1, _MIN_ROWS // len(packs))), int(plan.lengths[packs.order].max())
    )
    scale = fitting(row_tokens, columns)
    documents = seeded_order(plan, step)
    letters = {int(document): LETTERS[i % len(LETTERS)] for i, document in enumerate(documents)}
    lengths = plan.lengths[documents]
    tokens = int(lengths.sum())
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), BATCH_SIZE))
    widths = np.repeat(longest, BATCH_SIZE)[: len(lengths)]
    lines = [
        f"step {step % plan.num_steps} of {plan.num_steps:,}: {counted(len(documents), 'documents')} of {tokens:,}"
        f" tokens; a character is {counted(scale, 'tokens')}, X is padding",
        "",
        f"in order, in batches of {BATCH_SIZE}",
        *_batches(lengths, lengths, scale),
        "",
        f"padded to the longest of each batch: {_slots(int(widths.sum()), tokens)} padding",
        *_batches(lengths, widths, scale),
        "",
        f"packed, {counted(len(packs), 'packs')} of at most {plan.capacity:,} tokens:"
        f" {_slots(len(packs) * plan.capacity, tokens)} free",
    ]
    for pack in islice(packs, MOST_PACKS):
        named = [letters[int(document)] for document in pack]
        lines += _packed(plan.lengths[pack], named, plan.capacity, scale, columns)
    return "\n".join([*lines, *_more(len(packs) - MOST_PACKS, "packs")])


def fitting(tokens: int, columns: int) -> int:
    """The smallest power of two of tokens a character at which this many tokens fit into the columns."""
    return 1 << (-(-tokens // columns) - 1).bit_length()


def _more(count: int, nouns: str) -> list[str]:
    """The line on documents or packs that are not drawn, if there are any."""
    return [f"  … and {counted(count, f'more {nouns}')}"] if count > 0 else []


def _batches(lengths: NDArray[np.int64], widths: NDArray[np.int64], scale: int) -> list[str]:
    """The documents of the first batch in a bracket, a row each, padded to their widths (both in tokens)."""
    lines, last = [], min(len(lengths), MOST_DOCUMENTS) - 1
    for row, (length, width) in enumerate(zip(lengths[:MOST_DOCUMENTS], widths, strict=False)):
        bracket = "[" if last == 0 else "┌" if row == 0 else "└" if row == last else "│"
        letters, characters = (max(1, (int(tokens) + scale // 2) // scale) for tokens in (length, width))
        lines.append(f"  {bracket} {LETTERS[row] * letters}{'X' * (characters - letters)}")
    return [*lines, *_more(len(lengths) - MOST_DOCUMENTS, "documents")]


def _packed(
    lengths: NDArray[np.int64], letters: list[str], capacity: int, scale: int, columns: int
) -> list[str]:
    """The rows of a pack: its documents, free slots as padding, and `cu_seqlens` below."""
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    edges = (cu_seqlens + scale // 2) // scale
    text = "".join(letter * int(count) for letter, count in zip(letters, np.diff(edges), strict=True))
    text = text.ljust(-(-capacity // scale), "X")
    width = -(-len(text) // -(-len(text) // columns))  # as few rows as possible, of equal width
    rows = [f"    {text[start : start + width]}" for start in range(0, len(text), width)]
    rows[0] = "  [" + rows[0][3:]
    rows[-1] += " ]"
    starts = " ".join(map(str, ["cu_seqlens", *cu_seqlens]))
    return [*rows, "    " + textwrap.shorten(starts, max(width, 40), placeholder=f" … {cu_seqlens[-1]}")]


def _slots(slots: int, tokens: int) -> str:
    return f"{slots:,} slots, {100 * (slots - tokens) / slots:.1f} %"


def draw_trees(plan: Plan, items: SharedItems, step: int, columns: int) -> str:
    """Draw the packs of a step whose documents share their beginnings: a document a row, from where it goes on."""
    packs = plan.packs(step)
    drawn = [rows_of(items, pack) for pack in islice(packs, MOST_PACKS)]
    tokens, slots = plan.tokens(step), int(plan.slots[packs.order].sum())
    scale = fitting(max(row.length for rows in drawn for row in rows), columns)
    lines = [
        f"step {step % plan.num_steps} of {plan.num_steps:,}: {len(plan.documents(step)):,} documents of {tokens:,}"
        f" tokens in {slots:,} slots ({tokens / slots:.1%}); a character is {counted(scale, 'tokens')},"
        f" {SHARED} is computed above"
    ]
    for number, (pack, rows) in enumerate(zip(packs, drawn, strict=False)):
        used, held = int(plan.slots[pack].sum()), sum(row.length for row in rows)
        documents = counted(len(rows), "documents")
        lines.append(f"pack {number}: {documents} of {held:,} tokens in {used:,} of {plan.capacity:,} slots")
        for place, row in enumerate(rows[:MOST_DOCUMENTS]):
            shared, end = (size + scale // 2 for size in row)
            own = max(end // scale - shared // scale, 1)
            lines.append(f"  {SHARED * (shared // scale)}{LETTERS[place % len(LETTERS)] * own}")
        lines += _more(len(rows) - MOST_DOCUMENTS, "documents")
    return "\n".join([*lines, *_more(len(packs) - MOST_PACKS, "packs")])
