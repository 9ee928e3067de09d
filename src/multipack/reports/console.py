"""`Console`: aligned lines, and progress bars on a terminal, on rank 0 only."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from threading import Timer
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from multipack.data.text.texts import TextPart
from multipack.untrusted import printable

PLANNING = "planning: a machine's first plan also compiles the planner, for up to a minute …"
"""Text for `Console.notice` while a plan is made."""

LINE = 100
"""Columns of the lines that a run prints, at most."""
_MIN_WIDTH = 24
"""Minimum width of wrapped text."""


def wrapped(text: str, columns: int, indent: int = 0) -> str:
    """Wrap text without breaking words; its lines stay. The first line is returned without the indent."""
    width = max(columns - indent, _MIN_WIDTH)
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = [line for part in text.split("\n") for line in wrapper.wrap(part) or [""]]
    return f"\n{' ' * indent}".join(lines)


class Detail(str):
    """A note on a choice that rows of a header already show; only `log.verbose` prints it."""


def folded(notes: Sequence[str], most: int) -> tuple[list[str], int]:
    """Lines of the first notes, at most `most` unless the first note alone has more; and the number of other notes."""
    lines: list[str] = []
    for number, note in enumerate(notes):
        more = wrapped(note, LINE).split("\n")
        if lines and len(lines) + len(more) > most:
            return lines, len(notes) - number
        lines += more
    return lines, 0


Advance = Callable[..., None]
"""(done, total=None, note="") → set a progress bar to `done` of `total`, if known, and show `note` after it."""


class Console:
    """Prints on rank 0, by default to standard output."""

    def __init__(self, rank: int = 0, stream: TextIO | None = None) -> None:
        self.enabled = rank == 0
        out = stream or sys.stdout
        self._is_terminal = bool(getattr(out, "isatty", lambda: False)())
        self.columns = shutil.get_terminal_size((80, 24)).columns
        self.printed = 0
        """Lines printed so far."""
        self._rich = RichConsole(file=out, highlight=False, markup=False, soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        """Print text, `printable`."""
        if not self.enabled:
            return
        text = printable(text)
        self._rich.print(Text(text, style=style))
        self.printed += text.count("\n") + 1

    def marked(self, parts: Sequence[TextPart]) -> None:
        """Print a text whose targets are in inverse video, and special tokens in bold; in ⟦…⟧ without a terminal."""
        if not self.enabled:
            return
        text, styled = Text(), self._is_terminal and not self._rich.is_dumb_terminal
        for is_target, run in groupby(parts, lambda part: part.is_target):
            text.append("⟦" if is_target and not styled else "")
            for part in run:
                style = f"{'reverse' if is_target else ''} {'bold' if part.is_special else ''}"
                text.append(printable(part.text), style if styled else "")
            text.append("⟧" if is_target and not styled else "")
        self._rich.print(text, end="" if text.plain.endswith("\n") else "\n")

    def paragraph(self, text: str) -> None:
        """Print text wrapped to the terminal, or to 80 columns without one."""
        self.line(wrapped(text, self.columns))

    def section(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Print a heading, if there is one, and rows of aligned cells; the last cell is wrapped in its column."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        indent = 2 + sum(width + 2 for width in widths)
        if title:
            self.line()
            self.line(wrapped(title, self.columns), style="bold")
        for *cells, last in rows:
            aligned = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
            self.line(f"  {'  '.join([*aligned, wrapped(last, self.columns, indent)])}".rstrip())

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a section whose first row has the names of the columns."""
        self.section(title, [columns, *rows])

    @contextmanager
    def notice(self, text: str, seconds: float = 2.0) -> Iterator[None]:
        """Print a line if the block takes longer than this number of seconds."""
        timer = Timer(seconds, self.line, [text])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def progress(self, title: str) -> Iterator[Advance]:
        """Show a progress bar with the remaining time on a terminal, nothing elsewhere; lines appear above it."""
        if not (self.enabled and self._is_terminal):
            yield lambda done, total=None, note="": None
            return
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._rich,
            transient=True,
        )
        task = bar.add_task(printable(title), total=None, note="")

        def advance(done: float, total: float | None = None, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=printable(note))

        with bar:
            yield advance
