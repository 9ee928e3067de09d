"""Draw a step of a plan as text: its documents in order, padded, and packed.

Each document has a letter and padding is X; the first line states the tokens per character. Modeled on the picture on
Axolotl's multipack page.
"""

from __future__ import annotations

import string
import textwrap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multipack.planning.lengths import check_integer
from multipack.planning.report import seeded_order

if TYPE_CHECKING:
    from multipack.planning.plan import Plan

LETTERS = (string.ascii_letters.swapcase() + string.digits).replace("X", "").replace("x", "")
"""A … Z a … z 0 … 9 without X, used cyclically for documents."""

_LINES = 4
"""Minimum number of lines for the packs of a step."""


def draw_step(
    plan: Plan,
    step: int = 0,
    *,
    tokens_per_character: int | None = None,
    columns: int = 72,
    batch_size: int = 4,
    max_documents: int = 24,
    max_packs: int = 8,
) -> str:
    """Draw the documents of a step three times: in order, padded, packed.

    Args:
        plan: the plan.
        step: index of the step; negative indices count from the last step.
        tokens_per_character: None = the smallest round number at which the longest document fits into `columns`, and
            a full pack into one row (four rows for one pack, two for two).
        columns: maximum characters of a row.
        batch_size: documents of a padded batch.
        max_documents: maximum number of rows of the first two pictures; a line counts the other documents.
        max_packs: maximum number of packs drawn; a line counts the others.

    Returns:
        Lines of text. A document shorter than half a character may have no letter in its pack.

    Raises:
        ValueError: a size is below 1, or `tokens_per_character` so small that a pack exceeds 10,000 characters.
    """
    sizes = {
        "columns": columns,
        "batch_size": batch_size,
        "max_documents": max_documents,
        "max_packs": max_packs,
    }
    for name, value in sizes.items():
        check_integer(name, value)
    packs = plan.packs(step)
    row = max(-(-plan.capacity // max(1, _LINES // len(packs))), int(plan.lengths[packs.order].max()))
    fitting = round_scale(row, columns)
    scale = fitting if tokens_per_character is None else tokens_per_character
    check_integer("tokens_per_character", scale)
    if plan.capacity > 10_000 * scale:
        raise ValueError(
            f"tokens_per_character={scale} draws a pack of {plan.capacity:,} tokens"
            f" {plan.capacity // scale:,} characters wide; {fitting} fits the terminal"
        )
    documents = seeded_order(plan, packs.order)
    letters = {int(document): LETTERS[i % len(LETTERS)] for i, document in enumerate(documents)}
    tokens = int(plan.lengths[documents].sum())
    number = step % plan.num_steps
    lines = [
        f"step {number} of {plan.num_steps:,}: {_count(len(documents), 'document')} of {tokens:,} tokens;"
        f" a character is {_count(scale, 'token')}, X is padding",
        "",
        f"in order, in batches of {batch_size}",
        *_batches(plan.lengths[documents], scale, batch_size, max_documents, padded=False),
        "",
        "padded to the longest of each batch: "
        + _padding(tokens, _padded(plan.lengths[documents], batch_size)),
        *_batches(plan.lengths[documents], scale, batch_size, max_documents, padded=True),
        "",
        f"packed, {_count(len(packs), 'pack')} of at most {plan.capacity:,} tokens: "
        + _padding(tokens, len(packs) * plan.capacity, "free"),
    ]
    shown = min(len(packs), max_packs)
    for pack in range(shown):
        named = [letters[int(document)] for document in packs[pack]]
        lines += _packed(plan.lengths[packs[pack]], named, plan.capacity, scale, columns)
    if shown < len(packs):
        lines.append(f"  … and {_count(len(packs) - shown, 'more pack')}")
    return "\n".join(lines)


def round_scale(tokens: int, columns: int) -> int:
    """Return the tokens per character: the smallest round number that fits a row of `tokens` into `columns`.

    Round numbers are powers of two that divide the row, otherwise 1, 2 or 5 times a power of ten.
    """
    least = -(-tokens // columns)
    power = 1
    while power < least:
        power *= 2
    if tokens % power == 0:
        return power
    decimal = 1
    while 10 * decimal < least:
        decimal *= 10
    return next(factor * decimal for factor in (1, 2, 5, 10) if factor * decimal >= least)


def _batches(
    lengths: NDArray[np.int64], scale: int, batch_size: int, max_documents: int, *, padded: bool
) -> list[str]:
    """Return one row per document with brackets around batches, and a line that counts the documents not drawn."""
    lines = []
    shown = min(len(lengths), max_documents)
    for row in range(shown):
        first = row - row % batch_size
        last = min(first + batch_size, len(lengths)) - 1
        width = _characters(int(lengths[row]), scale)
        text = LETTERS[row % len(LETTERS)] * width
        if padded:
            text += "X" * (_characters(int(lengths[first : last + 1].max()), scale) - width)
        lines.append(f"  {_bracket(row - first, last - first)} {text}")
    if shown < len(lengths):
        lines.append(f"  … and {_count(len(lengths) - shown, 'more document')}")
    return lines


def _bracket(row: int, last: int) -> str:
    if last == 0:
        return "["
    return "┌" if row == 0 else "└" if row == last else "│"


def _packed(
    lengths: NDArray[np.int64], letters: list[str], capacity: int, scale: int, columns: int
) -> list[str]:
    """Return the rows of a pack: its documents, free slots as padding, and cu_seqlens below."""
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    edges = (cu_seqlens + scale // 2) // scale
    text = "".join(letter * int(count) for letter, count in zip(letters, np.diff(edges), strict=True))
    width = max(-(-capacity // scale), len(text))
    text += "X" * (width - len(text))
    row = -(-width // -(-width // columns))  # as few rows as possible, of equal width
    rows = [f"    {text[start : start + row]}" for start in range(0, width, row)]
    rows[0] = "  [" + rows[0][3:]
    rows[-1] += " ]"
    starts = " ".join(str(start) for start in cu_seqlens)
    label, limit = "cu_seqlens ", max(row, 40)
    lines = textwrap.wrap(
        label + starts, limit, subsequent_indent=" " * len(label), max_lines=2, placeholder=" …"
    )
    if lines[-1].endswith("…"):
        lines[-1] += f" {cu_seqlens[-1]}"
    return [*rows, *(f"    {line}" for line in lines)]


def _characters(tokens: int, scale: int) -> int:
    """Return the number of characters of a document, at least 1."""
    return max(1, (tokens + scale // 2) // scale)


def _padded(lengths: NDArray[np.int64], batch_size: int) -> int:
    """Return the number of slots of the padded batches."""
    starts = np.arange(0, len(lengths), batch_size)
    rows = np.diff(np.append(starts, len(lengths)))
    return int((np.maximum.reduceat(lengths, starts) * rows).sum())


def _padding(tokens: int, slots: int, what: str = "padding") -> str:
    return f"{slots:,} slots, {100 * (slots - tokens) / slots:.1f} % {what}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
