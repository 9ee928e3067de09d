"""Options that commands share, and the exit of a command with an error."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Collection
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from multipack.reports.console import Console


def setting(text: str) -> Any:
    """Return the argument for key=value words."""
    return typer.Argument(metavar="SETTING", help=text, show_default=False)


Words = Annotated[list[str] | None, setting("GROUP=PRESET, GROUP.KEY=VALUE, config=FILE or out=DIR.")]

COMMANDS = (
    *("train", "config", "prepare", "plan", "pack", "calibrate", "generate", "export"),
    *("advise", "launch", "submit", "doctor", "version", "bench"),
)
"""Names of the commands of `multipack`; a test compares them with the application."""

OTHER_RANKS_WAIT_SECONDS = 2.0
"""Delay before ranks other than 0 print an error."""


def fail(message: str, code: int) -> NoReturn:
    """Exit with one line on standard error."""
    from multipack.parallel.ranks import find_ranks

    try:
        rank = find_ranks(os.environ).rank
    except ValueError:  # contradictory variables of launchers, which may be the error itself
        rank = 0
    where = f"[rank {rank}] " if rank else ""
    if rank:
        # Most errors occur on all ranks: rank 0 prints first, and its exit ends the others.
        time.sleep(OTHER_RANKS_WAIT_SECONDS)
    print(f"{where}error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def nearest(word: str, choices: Collection[str]) -> str:
    """Return `; did you mean …?` with the nearest choice, or nothing."""
    close = difflib.get_close_matches(word, choices, 1)
    return f"; did you mean {close[0]}?" if close else ""


def option(text: str, *names: str, **more: Any) -> Any:
    """Return an option whose default is not shown in the help text."""
    return typer.Option(*names, help=text, show_default=False, **more)


def shows(schema: str, *groups: str, module: str = "multipack.training.run_config") -> Any:
    """Return the option --settings, which prints the fields of a dataclass, or only some of its groups."""

    def show(value: bool) -> None:
        if not value:
            return
        from multipack.reports.console import Console
        from multipack.reports.summary import settings_text
        from multipack.words import describe, preset_names

        wanted = getattr(import_module(module), schema)
        rows = [
            row
            for row in describe(wanted)
            if not groups or row[0].startswith(tuple(f"{group}." for group in groups))
        ]
        typer.echo(settings_text(rows, preset_names(wanted), Console().columns))
        raise typer.Exit

    return typer.Option(
        "--settings", help="Print all settings with meaning and default.", callback=show, is_eager=True
    )


Settings = Annotated[bool, shows("Config")]
PlanSettings = Annotated[bool, shows("PlanCommand", module="multipack.cli.plan_settings")]
PackSettings = Annotated[bool, shows("PackCommand", module="multipack.cli.plan_settings")]
CalibrateSettings = Annotated[bool, shows("Config", "data", "tokenizer", "model", "plan")]
AdviseSettings = Annotated[bool, shows("AdviseRequest", module="multipack.launch.advise_request")]
PrepareSettings = Annotated[bool, shows("Config", "data", "tokenizer")]


Json = Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")]


Source = Annotated[
    str,
    typer.Argument(
        metavar="LENGTHS", help="A .npy file of integers, or the folder of a token store.", show_default=False
    ),
]


def announce(console: Console) -> Callable[[], None]:
    """Return a function that prints that the planner is being compiled."""
    return lambda: console.line("compiling the planner, once: this takes some seconds …")
