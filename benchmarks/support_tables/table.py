"""A table whose cells are what the code answers: accepted, or the text of the error that it raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

ABSENT = "–"
"""The answer where a host has no such setting."""
ACCEPTED = "○"
"""The answer of a setting that the code accepts and no test runs."""
SHORT = 20
"""Characters of the longest answer that is shown in its cell instead of below the table."""


def answer(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The error of a call on one line; empty if there is none. Errors that no refusal raises are not caught."""
    try:
        function(*arguments, **named)
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


def unless_run(found: str, is_run: bool) -> str:
    """An answer, where being accepted says less than a test that ran: `ACCEPTED` without one."""
    return found if found or is_run else ACCEPTED


@dataclass
class Table:
    """Rows of answers under columns.

    Attributes:
        title: heading on the page.
        text: what the rows, the columns and a ✓ are.
        columns: headings, beginning with that of the rows.
        rows: name of a row → its answers: empty = run, `ACCEPTED`, `ABSENT`, else the text of an error.
    """

    title: str
    text: str
    columns: Sequence[str]
    rows: dict[str, list[str]] = field(default_factory=dict)

    def markdown(self) -> str:
        """The table with ✓ and numbers, and the numbered errors below it; with one column, errors are in the cells."""
        errors: dict[str, int] = {}
        lines = [f"## {self.title}", "", self.text, ""]
        lines += [f"| {' | '.join(self.columns)} |", "|---" * len(self.columns) + "|"]
        for name, answers in self.rows.items():
            cells = [text or "✓" for text in answers]
            if len(self.columns) > 2:
                cells = [
                    text if len(text) < SHORT else f"[{errors.setdefault(text, len(errors) + 1)}]"
                    for text in cells
                ]
            shown = f"`{name}`" if "=" in name and "`" not in name else name or "defaults"
            lines.append(f"| {' | '.join([shown, *cells])} |")
        lines += ["", *(f"{number}. {text}" for text, number in errors.items())]
        return "\n".join(lines).rstrip() + "\n"
