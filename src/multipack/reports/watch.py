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
from multipack.reports.run_data import Columns, Lines, RunData, add_record, read_run, read_samples
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


class LiveRun:
    """A run directory that another process is writing; `update` reads new records."""

    def __init__(self, path: Path) -> None:
        self.found = read_run(path)
        run = self.found.run
        self._metrics, self._history = Lines(run.metrics), Lines(run.history)
        self.found.steps, self.found.evaluations, self.found.history = Columns(), Columns(), []
        self.update()

    def update(self) -> RunData:
        """Read new records; a run that was resumed begins again at its checkpoint."""
        found = self.found
        records = [record for _, record in self._metrics.new()]
        if self._metrics.restarted:
            found.steps, found.evaluations = Columns(), Columns()
        for record in records:
            add_record(found, record)
        found.history += [event for _, event in self._history.new()]
        found.problems = [*self._metrics.problems, *self._history.problems]
        # While the process runs, its last line may be half written.
        found.problems = [problem for problem in found.problems if "incomplete" not in problem]
        found.samples = read_samples(found)
        return found

    def frame(self, columns: int, rows: int, now: float) -> RenderableType:
        """The picture for a terminal of this size; `now` is the time in seconds since the epoch."""
        found = self.found
        step, total = int(found.steps.last("step")) if len(found.steps) else 0, found.total_steps
        parts: list[RenderableType] = [
            Text(one_line(f"{self.state(now)}   {found.run.path}"), style="bold", no_wrap=True)
        ]
        if total:
            bar = ProgressBar(total=total, completed=min(step, total), width=max(columns - 40, 10))
            line = Table.grid(padding=(0, 1))
            line.add_row(bar, self._left(step, total))
            parts.append(line)
        figures = [
            (Text(value, style="bold"), Text(name, style="dim")) for name, value in key_figures(found)[1:]
        ]
        table = Table.grid(padding=(0, 2))
        for pair in zip_longest(figures[::2], figures[1::2], fillvalue=(Text(), Text())):
            table.add_row(*pair[0], *pair[1])
        shares = ", ".join(f"{part} {share:.0%}" for part, share in time_shares(found.steps).items())
        parts += [Text(), table, Text(f"{shares}\n" if shares else "", style="dim", no_wrap=True)]
        notes = [text for text in warnings(found) if "recorded no end" not in text][:MOST_WARNINGS]
        room = rows - 8 - table.row_count - 2 * len(notes)
        height = max(min(room - SAMPLE_LINES - 2, 10), min(room, 5), 3)
        parts.append(
            Text("\n".join(["loss by step", *self._curve(columns, height)]), style="cyan", no_wrap=True)
        )
        if found.samples and (left := min(room - height - 2, SAMPLE_LINES)) > 0:
            at, sample = found.samples[-1]
            lines = [line[:columns] for line in printable(sample).splitlines()[:left]]
            parts.append(Text("\n".join([f"\nsample after step {at:,}", *lines]), style="dim", no_wrap=True))
        parts += [Text(one_line(f"! {text}")[: 2 * columns], style="yellow") for text in notes]
        return Group(*parts)

    def _curve(self, columns: int, rows: int) -> list[str]:
        steps = self.found.steps
        width = max(-(-len(steps) // MOST_POINTS), 1)
        x, y = means(steps.values["step"], width, True), means(steps.column("loss"), width, False)
        return text_curve(x, y, max(min(columns, 110), 24), rows)

    def state(self, now: float) -> str:
        """The state of the run's process, as far as the files show it."""
        found = self.found
        if (end := found.end) is not None:
            return f"ended after step {end.get('step')}" + (f": {end['reason']}" if end.get("reason") else "")
        if not len(found.steps):
            return "no step yet"
        age = max(now - found.run.metrics.stat().st_mtime, 0.0)
        return f"last record {duration(age)} ago" if age >= 1 else "running"

    def _left(self, step: int, total: int) -> Text:
        recent = found[-RECENT:] if (found := self.found.steps.known("dt")) else []
        left = f", {duration((total - step) * median(recent))} left" if recent and step < total else ""
        return Text(f"{step:,}/{total:,}{left}")


def watch(path: Path, seconds: float, once: bool, console: RichConsole) -> None:
    """Show a run until its process has recorded its end; `once`: show it as it is now.

    Args:
        path: the run directory.
        seconds: time between two updates.
        once: print one frame.
        console: the terminal.

    Raises:
        FileNotFoundError: `path` is not a run directory.
        ValueError: its config.yaml cannot be read.
    """
    shown = LiveRun(path)
    if once:
        console.print(shown.frame(*console.size, time.time()))
        return
    with Live(shown.frame(*console.size, time.time()), console=console, auto_refresh=False) as live:
        while shown.update().end is None:
            live.update(shown.frame(*console.size, time.time()), refresh=True)
            time.sleep(seconds)
        live.update(shown.frame(*console.size, time.time()), refresh=True)
