"""`watch`: a live view of a run in the terminal, from its files: in another process, or on a machine with its disk."""

from __future__ import annotations

import time
from itertools import zip_longest
from pathlib import Path
from statistics import median

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from multipack.reports.curve import text_curve
from multipack.reports.run_data import Columns, RunData
from multipack.reports.run_page import duration, key_figures, means, time_shares, warnings
from multipack.untrusted import one_line, printable

RECENT = 50
"""Last steps whose median time predicts the time left."""
MOST_POINTS = 1000
"""Most points of the curve."""
SAMPLE_LINES = 6
"""Most lines of the last sample."""
MOST_WARNINGS = 3
"""Most warnings in a view."""


def frame(found: RunData, columns: int, rows: int, now: float) -> RenderableType:
    """The picture of a run for a terminal of this size; `now` is the time in seconds since the epoch."""
    step, total = int(found.steps.last("step")) if len(found.steps) else 0, found.total_steps
    state = one_line(f"{_state(found, now)}   {found.run.path}")
    parts: list[RenderableType] = [Text(state, style="bold", no_wrap=True)]
    if total:
        recent = found.steps.known("dt")[-RECENT:]
        left = f", {duration((total - step) * median(recent))} left" if recent and step < total else ""
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=total, completed=min(step, total), width=max(columns - 40, 10))
        line.add_row(bar, Text(f"{step:,}/{total:,}{left}"))
        parts.append(line)
    figures = [(Text(value, style="bold"), Text(name, style="dim")) for name, value in key_figures(found)[1:]]
    table = Table.grid(padding=(0, 2))
    for pair in zip_longest(figures[::2], figures[1::2], fillvalue=(Text(), Text())):
        table.add_row(*pair[0], *pair[1])
    shares = ", ".join(f"{part} {share:.0%}" for part, share in time_shares(found.steps).items())
    parts += [Text(), table, Text(f"{shares}\n" if shares else "", style="dim", no_wrap=True)]
    # While the process runs, it has no end, and its last line may be half written.
    notes = [text for text in warnings(found) if "recorded no end" not in text and "incomplete" not in text]
    notes = notes[:MOST_WARNINGS]
    room = rows - 8 - table.row_count - 2 * len(notes)
    height = max(min(room - SAMPLE_LINES - 2, 10), min(room, 5), 3)
    curve = "\n".join(["loss by step", *_curve(found.steps, columns, height)])
    parts.append(Text(curve, style="cyan", no_wrap=True))
    if found.samples and (left_over := min(room - height - 2, SAMPLE_LINES)) > 0:
        at, sample = found.samples[-1]
        lines = [line[:columns] for line in printable(sample).splitlines()[:left_over]]
        parts.append(Text("\n".join([f"\nsample after step {at:,}", *lines]), style="dim", no_wrap=True))
    parts += [Text(one_line(f"! {text}")[: 2 * columns], style="yellow") for text in notes]
    return Group(*parts)


def _curve(steps: Columns, columns: int, rows: int) -> list[str]:
    width = max(-(-len(steps) // MOST_POINTS), 1)
    x, y = means(steps.values["step"], width, True), means(steps.column("loss"), width, False)
    return text_curve(x, y, max(min(columns, 110), 24), rows)


def _state(found: RunData, now: float) -> str:
    """The state of the run's process, as far as the files show it."""
    if (end := found.end) is not None:
        return f"ended after step {end.get('step')}" + (f": {end['reason']}" if end.get("reason") else "")
    if not len(found.steps):
        return "no step yet"
    age = max(now - found.run.metrics.stat().st_mtime, 0.0)
    return f"last record {duration(age)} ago" if age >= 1 else "running"


def watch(path: Path, seconds: float, once: bool, console: RichConsole) -> None:
    """Show a run, every so many seconds, until its process has recorded its end; `once`: print it as it is now.

    Raises:
        FileNotFoundError: `path` is not a run directory.
        ValueError: its config.yaml cannot be read.
    """
    found = RunData(path)
    if once:
        console.print(frame(found, *console.size, time.time()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(frame(found, *console.size, time.time()), refresh=True)
            if found.end is not None:
                return
            time.sleep(seconds)
            found.update()
