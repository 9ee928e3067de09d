"""`watch`: a run live in the terminal, from its files, in another process or on another machine with the same disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from multipack.reports.console import CONTROL_CHARACTERS
from multipack.reports.curve import text_curve
from multipack.reports.run_data import Columns, Lines, RunData, add_record, read_run, read_samples
from multipack.reports.run_page import duration, key_figures, means, time_shares, warnings

RECENT = 50
"""Steps whose median time predicts the rest."""
MOST_POINTS = 1000
"""Points of the curve."""
SAMPLE_LINES = 6
"""Lines of the last sample."""


class LiveRun:
    """A run directory that another process is writing; `update` reads what is new."""

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

    def frame(self, columns: int, now: float) -> RenderableType:
        """What the terminal shows; `now` is the time in seconds since the epoch."""
        found = self.found
        step, total = int(found.steps.last("step")) if len(found.steps) else 0, found.total_steps
        head = Text(f"{found.run.path}", style="bold")
        head.append(f"   {self.state(now)}", style="")
        parts: list[RenderableType] = [head]
        if total:
            line = Table.grid(padding=(0, 1))
            line.add_row(
                ProgressBar(total=total, completed=min(step, total), width=max(columns - 40, 10)),
                self._left(step, total),
            )
            parts.append(line)
        table = Table.grid(padding=(0, 3))
        figures = [(name, value) for name, value in key_figures(found) if name != "steps"]
        shares = time_shares(found.steps)
        figures += (
            [("of a step's time", ", ".join(f"{part} {share:.0%}" for part, share in shares.items()))]
            if shares
            else []
        )
        for name, value in figures:
            table.add_row(Text(value, style="bold"), Text(name, style="dim"))
        parts += [Text(), table, Text()]
        width = max(-(-len(found.steps) // MOST_POINTS), 1)
        x, y = found.steps.values["step"], found.steps.column("loss")
        curve = text_curve(means(x, width, True), means(y, width, False), max(min(columns, 110), 24), 8)
        parts.append(Text("\n".join(["loss by step", *curve]), style="cyan", no_wrap=True))
        if found.samples:
            at, sample = found.samples[-1]
            shown = "\n".join(sample.translate(CONTROL_CHARACTERS).splitlines()[:SAMPLE_LINES])
            parts.append(Text(f"\nsample after step {at:,}\n{shown}", style="dim", overflow="ellipsis"))
        running = "recorded no end"
        parts += [
            Text(f"! {text}".translate(CONTROL_CHARACTERS), style="yellow")
            for text in warnings(found)
            if running not in text
        ]
        return Group(*parts)

    def state(self, now: float) -> str:
        """Whether the run runs, as far as its files tell."""
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


def watch(
    path: Path, seconds: float, once: bool, console: RichConsole, wait: Callable[[float], None] = time.sleep
) -> None:
    """Show a run until its process has recorded its end; `once`: show it as it is now.

    Args:
        path: the run directory.
        seconds: between two looks.
        once: print one frame.
        console: the terminal.
        wait: sleeps; replaced in tests.

    Raises:
        FileNotFoundError: it is no run directory.
        ValueError: its config.yaml cannot be read.
    """
    shown = LiveRun(path)
    if once:
        console.print(shown.frame(console.width, time.time()))
        return
    with Live(shown.frame(console.width, time.time()), console=console, auto_refresh=False) as live:
        while shown.update().end is None:
            live.update(shown.frame(console.width, time.time()), refresh=True)
            wait(seconds)
        live.update(shown.frame(console.width, time.time()), refresh=True)
