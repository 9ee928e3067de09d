"""Options that commands share, and the exit of a command with an error."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from multipack.untrusted import printable_json


def add_commands(app: typer.Typer, *commands: Callable[..., None]) -> None:
    """Add commands with their docstrings as help texts, in which lines of examples are not wrapped."""
    for command in commands:
        text = inspect.getdoc(command) or ""
        app.command(help=text.replace("Examples:", "\b\nExamples:"))(command)


def argument(name: str, text: str, **more: Any) -> Any:
    """Return a positional argument whose default is not shown in the help text."""
    return typer.Argument(metavar=name, help=text, show_default=False, **more)


def settings_argument(name: str, text: str) -> Any:
    """Return the argument `words`; it is eager, because the option --settings searches for its words."""
    return argument(name, text, is_eager=True)


Words = Annotated[
    list[str] | None, settings_argument("SETTING", "GROUP=PRESET, GROUP.KEY=VALUE, config=FILE or out=DIR.")
]


def fail(message: str | BaseException, code: int, one_line: bool = True) -> NoReturn:
    """Print an error on standard error, unless its rank has reported it, and exit with `code`."""
    from multipack.parallel.ranks import find_ranks, is_reported, print_error

    error = message if isinstance(message, BaseException) else ValueError(message)
    # torchrun's report of failed ranks ends with the content of this file.
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = {"message": str(error), "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": text}))
    had_joined = is_reported(error)
    with suppress(ValueError):  # contradictory variables of launchers, which may be the error itself
        ranks = find_ranks(os.environ)
        # Typer replaces KeyboardInterrupt by an exception of its own.
        had_joined = had_joined or (code == 130 and ranks.size > 1)
        if ranks.rank and not had_joined:
            time.sleep(2)  # all ranks have such an error: rank 0 prints first, and its exit ends the others
    if not (is_reported(error) and isinstance(error, Exception)):
        print_error(error, one_line)
    if had_joined:
        # Threads may wait for lost ranks, and so does the end of nccl's process group.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def nearest(word: str, choices: Collection[str]) -> str:
    """Return `; did you mean …?` with the choice nearest to `word`; empty if none is near."""
    close = difflib.get_close_matches(word, choices, 1)
    return f"; did you mean {close[0]}?" if close else ""


def option(text: str, *names: str, **more: Any) -> Any:
    """Return an option whose default is not shown in the help text."""
    return typer.Option(*names, help=text, show_default=False, **more)


def settings_option(schema: str, *names: str, module: str = "multipack.training.run_config") -> Any:
    """Return the option --settings, which prints the fields of a dataclass whose names begin with `names`.

    Words after it choose the settings with one of them in their names or meanings. `schema` and `module` are names:
    they are imported only when the option is used.
    """

    def show(context: typer.Context, value: bool) -> None:
        if not value:
            return
        words = [word.lower() for word in context.params.get("words") or () if "=" not in word]
        from multipack.reports.console import Console
        from multipack.reports.summary import settings_text
        from multipack.words import describe, preset_names

        wanted = getattr(import_module(module), schema)
        rows = [row for row in describe(wanted) if row[0].startswith(names or "")]
        if words:
            rows = [row for row in rows if any(word in f"{row[0]} {row[3]}".lower() for word in words)]
        if not rows:
            raise ValueError(f"no setting has {' or '.join(words)} in its name or meaning")
        typer.echo(settings_text(rows, preset_names(wanted), Console().columns))
        raise typer.Exit

    return typer.Option(
        "--settings", help="Print all settings, or those with the words after it.", callback=show
    )


Settings = Annotated[bool, settings_option("Config")]
Json = Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")]
Source = Annotated[str, argument("LENGTHS", "A .npy file of integers, or the folder of a token store.")]


def print_json(values: Any) -> None:
    """Print values as JSON on standard output."""
    typer.echo(printable_json(json.dumps(values, indent=1, ensure_ascii=False)))
