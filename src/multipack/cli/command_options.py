"""What the commands share: words, options, and how a command ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from multipack.reports.console import Console

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SETTING", help="GROUP=PRESET, GROUP.KEY=VALUE, config=FILE or out=DIR.", show_default=False
    ),
]

COMMANDS = (
    *("train", "config", "prepare", "plan", "pack", "calibrate", "generate", "export"),
    *("advise", "launch", "submit", "doctor", "version", "bench"),
)
"""Names of the commands of `multipack`; a test compares them with the application."""

RANK_0_SPEAKS_SECONDS = 2.0
"""How long other ranks wait with an error of theirs."""


def fail(message: str, code: int) -> NoReturn:
    """End with one line on standard error."""
    from multipack.parallel.ranks import find_ranks

    try:
        rank = find_ranks(os.environ).rank
    except ValueError:  # launchers that contradict each other, which may be what failed
        rank = 0
    where = f"[rank {rank}] " if rank else ""
    if (
        rank
    ):  # most errors are those of all ranks: rank 0 tells, and its end ends the others before they repeat it
        time.sleep(RANK_0_SPEAKS_SECONDS)
    print(f"{where}error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def shows(schema: str, *groups: str, module: str = "multipack.training.run_config") -> Any:
    """The option --settings of a command: prints the fields of a module's dataclass, or some groups of them."""

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
        "--settings", help="Print every setting with its meaning and default.", callback=show, is_eager=True
    )


Settings = Annotated[bool, shows("Config")]
PlanSettings = Annotated[bool, shows("PlanCommand", module="multipack.cli.plan_settings")]
PackSettings = Annotated[bool, shows("PackCommand", module="multipack.cli.plan_settings")]
CalibrateSettings = Annotated[bool, shows("Config", "data", "tokenizer", "model", "plan")]
AdviseSettings = Annotated[bool, shows("AdviseRequest", module="multipack.launch.advise_request")]
PrepareSettings = Annotated[bool, shows("Config", "data", "tokenizer")]


Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")]


Source = Annotated[
    str,
    typer.Argument(
        metavar="LENGTHS", help="A .npy file of whole numbers, or a token store's folder.", show_default=False
    ),
]


def announce(console: Console) -> Callable[[], None]:
    """Says, where the planner's loops have to be compiled, why nothing happens for a while."""
    return lambda: console.line("compiling the planner's loops, once: this takes some seconds …")
