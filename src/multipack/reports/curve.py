"""Curves as text: braille characters of two by four dots."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character by column and row of its dots (Unicode block U+2800)."""


def text_curve(x: Sequence[float], y: Sequence[float], columns: int = 72, rows: int = 10) -> list[str]:
    """Lines of text with a curve through points, its highest and lowest value on the left, its first and last x below.

    `x` ascends, and NaN of `y` is left out. The lines are at least 24 columns wide.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not points:
        return ["(no values)"]
    low, high = min(b for _, b in points), max(b for _, b in points)
    labels = [f"{value:.4g}" for value in (high, low)]
    margin = max(map(len, labels)) + 1
    width = max(columns - margin - 1, 8)
    first, last = points[0][0], max(a for a, _ in points)
    across, up = 2 * width - 1, 4 * rows - 1
    cells = [[0] * width for _ in range(rows)]
    before: tuple[int, int] | None = None
    for a, b in points:
        column = min(max(round((a - first) / (last - first or 1) * across), 0), across)
        row = round((high - b) / (high - low or 1) * up)
        steps = max(abs(column - before[0]), abs(row - before[1]), 1) if before else 1
        for step in range(1, steps + 1):  # a line from the point before
            share = step / steps
            i = round(before[0] + (column - before[0]) * share) if before else column
            j = round(before[1] + (row - before[1]) * share) if before else row
            cells[j // 4][i // 2] |= _DOTS[i % 2][j % 4]
        before = column, row
    lines = []
    for number, line in enumerate(cells):
        label = labels[0] if number == 0 else labels[1] if number == rows - 1 else ""
        lines.append(
            f"{label:>{margin - 1}} │" + "".join(chr(0x2800 + bits) for bits in line).rstrip("\u2800")
        )
    ends = f"{first:,.0f}", f"{last:,.0f}"
    gap = max(width - len(ends[0]) - len(ends[1]), 1)
    return [*lines, " " * (margin + 1) + ends[0] + " " * gap + ends[1]]
