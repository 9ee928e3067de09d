"""A table of measured figures, and the figures that are asked of it."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")

PUBLISHED, MEASURED = "published", "measured"


@dataclass(frozen=True)
class Asked:
    """A figure that is asked for, and what was reached."""

    figure: str
    """What is measured."""
    reached: float | None
    """The measured value; None: it could not be measured."""
    asked: float
    """The bound."""
    at_most: bool
    """Whether the bound is an upper one."""
    format: str = ","
    """How values are shown, see `shown`."""
    note: str = ""
    """Where the worst value was found."""

    @property
    def met(self) -> bool | None:
        """Whether the figure was reached; None where it was not measured."""
        if self.reached is None:
            return None
        # Values may be numpy's, whose comparisons are not `True`.
        return bool(self.reached <= self.asked if self.at_most else self.reached >= self.asked)


@dataclass
class Table:
    """Rows under columns, each with a format, and what was asked of them."""

    name: str
    title: str
    columns: dict[str, str]
    """Heading → format, see `shown`."""
    rows: list[list[Any]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    how: str = ""
    """Time that it took, and the machine's load."""

    def row(self, *values: Any) -> None:
        """Add a row: a value a column."""
        if len(values) != len(self.columns):
            raise ValueError(f"{len(values)} values for the {len(self.columns)} columns of {self.name}")
        self.rows.append(list(values))

    def at_most(self, figure: str, reached: float | None, asked: float, *how: str) -> None:
        """Ask that a figure does not exceed a bound; `how`: its format and a note, see `Asked`."""
        self.asked.append(Asked(figure, reached, asked, True, *how))

    def at_least(self, figure: str, reached: float | None, asked: float, *how: str) -> None:
        """Ask that a figure does not fall below a bound; `how` as in `at_most`."""
        self.asked.append(Asked(figure, reached, asked, False, *how))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Table:
        """Of the values of `asdict`."""
        return cls(**{**values, "asked": [Asked(**each) for each in values["asked"]]})


def shown(value: Any, format: str) -> str:
    """A value as text. `%` is a percentage with three digits; others are Python's own formats."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{100 * value:.3f} %" if format == "%" else f"{value:{format}}"


def grid(table: Table) -> list[list[str]]:
    """Headings and rows as text."""
    formats = list(table.columns.values())
    rows = [[shown(value, form) for value, form in zip(row, formats, strict=True)] for row in table.rows]
    return [list(table.columns), *rows]


def verdicts(asked: Sequence[Asked]) -> list[list[str]]:
    """The asked figures as rows of text, headings first."""
    rows = [["figure", "asked", "reached", "met", "note"]]
    for each in asked:
        bound = f"{'≤' if each.at_most else '≥'} {shown(each.asked, each.format)}"
        verdict = {True: "yes", False: "NO", None: "not measured"}[each.met]
        rows.append([each.figure, bound, shown(each.reached, each.format), verdict, each.note])
    return rows


def aligned(rows: list[list[str]]) -> str:
    """Rows as lines of equal columns: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def markdown(rows: list[list[str]]) -> str:
    """Rows as a table of Markdown."""
    safe = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    marks = ["---" if i == 0 or name == "note" else "---:" for i, name in enumerate(rows[0])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [safe[0], marks, *safe[1:]])


def cpu_seconds(function: Callable[[], Result], repeats: int = 3) -> tuple[float, Result]:
    """Least CPU seconds of this process over some calls, and the last call's result."""
    best = float("inf")
    for _ in range(repeats):
        gc.disable()  # a collection would be charged to the function that happens to run
        try:
            start = time.process_time()
            result = function()
            best = min(best, time.process_time() - start)
        finally:
            gc.enable()
    return best, result


def missing(*modules: str) -> str | None:
    """How to install peers that are missing; None where they are installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return (
        f"{', '.join(absent)} not installed: pip install 'multipack[bench]' adds the rows" if absent else None
    )
