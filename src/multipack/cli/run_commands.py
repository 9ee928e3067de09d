"""The commands that read run directories: report, audit, watch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from multipack.cli.command_options import Json, argument, fail, option, print_json

Run = Annotated[Path, argument("RUN", "A run directory.")]
Runs = Annotated[list[Path], argument("RUN…", "Run directories.")]


def report(
    runs: Runs,
    output: Annotated[Path | None, option("FILE.html: a page; default: text.", "--output", "-o")] = None,
) -> None:
    """Report on runs: curves, speed, padding, samples, settings.

    The page is one file that loads nothing from a network.

    Examples:
      multipack report runs/a
      multipack report runs/a runs/b --output compared.html
    """
    from multipack.atomic import write_atomically
    from multipack.reports.console import Console
    from multipack.reports.run_data import RunData
    from multipack.reports.run_page import (
        check_records,
        differences,
        loss_curve,
        run_names,
        run_page,
        summary_rows,
    )

    if output is not None and output.suffix != ".html":
        raise ValueError(f"--output {output} must end with .html: it is a page")
    found = [RunData(path) for path in runs]
    check_records(found)
    if output is not None:
        write_atomically(output, run_page(found))
        print(f"written: {output}", file=sys.stderr)
        return
    console = Console()
    if differing := differences(found):
        console.table("settings that differ", ["setting", *run_names(found)], differing)
    for each in found:
        console.section(f"run {each.run.path}", summary_rows(each))
        console.line("\nloss by step")
        console.line("\n".join(loss_curve(each, min(console.columns, 100))))


def audit(run: Run, as_json: Json = False) -> None:
    """Account for every document of a run, over all resumes.

    Every document of every epoch is trained exactly once, or carried into the
    next epoch, or named as dropped. What is repeated, lost or skipped is named
    with its steps, and the exit code is 1.

    Examples:
      multipack audit runs/a
      multipack audit runs/a --json
    """
    from dataclasses import asdict

    from multipack.data.text.skipped import counted
    from multipack.reports.audit import audit as run_audit
    from multipack.reports.console import Console
    from multipack.reports.summary import audit_rows

    found = run_audit(run)
    if as_json:
        print_json(asdict(found))
    else:
        Console().section(f"documents of {run}", audit_rows(found))
    if found.problems:
        fail(f"{run}: {counted(len(found.problems), 'problems')}; the first: {found.problems[0]}", 1)


def watch(
    run: Run,
    every: Annotated[float, option("Seconds between two looks.", "--every", min=0.1)] = 1.0,
    once: Annotated[bool, option("Print the state as it is, and end.", "--once")] = False,
) -> None:
    """Show a run live, from another process.

    It ends with the run; Ctrl-C ends it earlier, and not the run.

    Examples:
      multipack watch runs/a
      multipack watch runs/a --once
    """
    from rich.console import Console as RichConsole

    from multipack.reports.watch import watch as show

    console = RichConsole(markup=False, highlight=False)
    show(run, every, once or not console.is_terminal, console)
