"""A step of a plan drawn as text: its documents in order, padded, and packed.

Each document has a letter, and padding is X; the first line states the tokens per character. Modeled on the picture in
Axolotl's documentation of multipack.
"""

from __future__ import annotations

import string
import textwrap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multipack.planning.lengths import check_integer
from multipack.planning.report import seeded_order
from multipack.reports.tree_picture import draw_trees

if TYPE_CHECKING:
    from multipack.planning.lengths import Packs
    from multipack.planning.plan import Plan

LETTERS = (string.ascii_letters.swapcase() + string.digits).replace("X", "").replace("x", "")
"""A … Z a … z 0 … 9 without X, used cyclically for documents."""
BATCH_SIZE = 4
"""Documents of a padded batch."""

_MIN_ROWS = 4
"""Minimum number of rows of all packs together: a single pack has this number of rows."""


def draw_step(
    plan: Plan,
    step: int = 0,
    *,
    tokens_per_character: int | None = None,
    columns: int = 72,
    max_documents: int = 24,
    max_packs: int = 8,
) -> str:
    """Draw the documents of a step three times: in order, padded, packed; of items of several documents, the packs.

    Args:
        plan: the plan.
        step: index of the step; negative indices count from the last step.
        tokens_per_character: None = the smallest power of two at which the longest document fits into one row, and a
            full pack into one row (a single pack into four rows, two packs into two rows each).
        columns: maximum characters of a row.
        max_documents: maximum number of rows of the first two pictures; a line states how many documents are missing.
        max_packs: maximum number of packs drawn; a line states how many are missing.

    Returns:
        Lines of text. A document of less than half the tokens of a character may have no letter in its pack.

    Raises:
        ValueError: `tokens_per_character` is below 1, or so small that a pack exceeds 10,000 characters.
    """
    if plan.min_prefix is not None:
        return draw_trees(
            plan,
            step,
            letters=LETTERS,
            tokens_per_character=tokens_per_character,
            columns=columns,
            max_documents=max_documents,
            max_packs=max_packs,
        )
    packs = plan.packs(step)
    scale = _scale(plan, packs, columns, tokens_per_character)
    documents = seeded_order(plan, step)
    letters = {int(document): LETTERS[i % len(LETTERS)] for i, document in enumerate(documents)}
    lengths = plan.lengths[documents]
    tokens = int(lengths.sum())
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), BATCH_SIZE))
    widths = np.repeat(longest, BATCH_SIZE)[: len(lengths)]
    lines = [
        f"step {step % plan.num_steps} of {plan.num_steps:,}: {_count(len(documents), 'document')} of {tokens:,}"
        f" tokens; a character is {_count(scale, 'token')}, X is padding",
        "",
        f"in order, in batches of {BATCH_SIZE}",
        *_batches(lengths, lengths, scale, max_documents),
        "",
        f"padded to the longest of each batch: {_slots(int(widths.sum()), tokens)} padding",
        *_batches(lengths, widths, scale, max_documents),
        "",
        f"packed, {_count(len(packs), 'pack')} of at most {plan.capacity:,} tokens:"
        f" {_slots(len(packs) * plan.capacity, tokens)} free",
    ]
    for pack in range(min(len(packs), max_packs)):
        named = [letters[int(document)] for document in packs[pack]]
        lines += _packed(plan.lengths[packs[pack]], named, plan.capacity, scale, columns)
    if max_packs < len(packs):
        lines.append(f"  … and {_count(len(packs) - max_packs, 'more pack')}")
    return "\n".join(lines)


def _scale(plan: Plan, packs: Packs, columns: int, given: int | None) -> int:
    """The tokens per character; see `draw_step`."""
    rows_of_pack = max(1, _MIN_ROWS // len(packs))
    row_tokens = max(-(-plan.capacity // rows_of_pack), int(plan.lengths[packs.order].max()))
    fitting = 1 << (-(-row_tokens // columns) - 1).bit_length()
    scale = fitting if given is None else given
    check_integer("tokens_per_character", scale)
    if plan.capacity > 10_000 * scale:
        raise ValueError(
            f"tokens_per_character={scale} draws a pack of {plan.capacity:,} tokens"
            f" {plan.capacity // scale:,} characters wide; {fitting} fits the terminal"
        )
    return scale


def _batches(
    lengths: NDArray[np.int64], widths: NDArray[np.int64], scale: int, max_documents: int
) -> list[str]:
    """One row per document, padded to its width (both in tokens), with brackets around batches."""
    lines = []
    for row, (length, width) in enumerate(zip(lengths[:max_documents], widths, strict=False)):
        place, last = row % BATCH_SIZE, min(BATCH_SIZE, len(lengths) - row + row % BATCH_SIZE) - 1
        bracket = "[" if last == 0 else "┌" if place == 0 else "└" if place == last else "│"
        letters, characters = (max(1, (int(tokens) + scale // 2) // scale) for tokens in (length, width))
        lines.append(f"  {bracket} {LETTERS[row % len(LETTERS)] * letters}{'X' * (characters - letters)}")
    if max_documents < len(lengths):
        lines.append(f"  … and {_count(len(lengths) - max_documents, 'more document')}")
    return lines


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
    label = "cu_seqlens "
    starts = label + " ".join(str(start) for start in cu_seqlens)
    lines = textwrap.wrap(
        starts, max(width, 40), subsequent_indent=" " * len(label), max_lines=2, placeholder=" …"
    )
    if lines[-1].endswith("…"):
        lines[-1] += f" {cu_seqlens[-1]}"
    return [*rows, *(f"    {line}" for line in lines)]


def _slots(slots: int, tokens: int) -> str:
    return f"{slots:,} slots, {100 * (slots - tokens) / slots:.1f} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
