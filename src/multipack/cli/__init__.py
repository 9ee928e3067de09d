"""The command line: each command parses, calls one function and prints."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

import multipack
from multipack.cli.advise_command import advise
from multipack.cli.command_options import add_commands, fail, option
from multipack.cli.import_command import import_config
from multipack.cli.launch_commands import doctor, launch, submit
from multipack.cli.model_commands import evaluate, export, generate
from multipack.cli.plan_commands import pack, plan
from multipack.cli.probe_command import probe
from multipack.cli.recipe_command import recipe
from multipack.cli.run_commands import audit, report, watch
from multipack.cli.train_commands import config, prepare, train
from multipack.machine import MissingExtra, explain_missing
from multipack.parallel.ranks import is_reported

app = typer.Typer(
    name="multipack",
    help="Train language models without padding: documents packed exactly, on one core or many ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes 0.3 s to import
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(multipack.__version__)
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, option("Print the version.", "--version", "-V", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options without a command."""


add_commands(app, train, config, prepare, plan, pack, evaluate, generate, export)
add_commands(app, report, audit, watch, advise, probe, launch, submit, doctor)
app.add_typer(recipe, name="recipe")
add_commands(app, import_config)


def main() -> None:
    """Run the command line. Errors that a user can fix are one line on standard error, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character of a sample that the locale lacks must not end a run.
            stream.reconfigure(errors="replace")
    # OpenMP reads these when torch is loaded. Threads that wait by spinning for long slow down every step if another
    # process needs a core; short spinning costs nothing on an idle machine.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # By default oneDNN caches 1,024 compiled bfloat16 products; packs differ in shape, so that it would take gigabytes.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    # Required by train.deterministic; cuBLAS reads it when it is loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        code = app(standalone_mode=False)
    except (ValueError, OSError) as error:
        fail(error, 2)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        # Typer uses its own copy of click or the installed one, so click's exceptions are recognized by their names.
        if isinstance(error, ModuleNotFoundError):
            error = explain_missing(error, " ".join(["multipack", *sys.argv[1:2]]))
        if isinstance(error, MissingExtra):
            fail(str(error), 2)
        if hasattr(error, "format_message"):
            _exit_with_usage(error)
        if is_reported(error):
            fail(error, 1)
        text = str(error)
        if isinstance(error, MemoryError) or "can't allocate memory" in text:  # torch's is a RuntimeError
            fail(f"out of memory ({text.splitlines()[-1]})" if text else "out of memory", 2)
        if type(error).__name__ != "Abort":
            raise
        code = 130
    if code == 130:  # Typer's exit code for Ctrl-C
        fail("interrupted; files saved before are complete", code)
    sys.exit(code or 0)


def _exit_with_usage(error: Any) -> NoReturn:
    """Exit because the arguments of a command are wrong."""
    message, context = str(error.format_message()).strip(), getattr(error, "ctx", None)
    if "\n" in message:  # the help text, because no command is given
        print(message, file=sys.stderr)
        sys.exit(error.exit_code)
    command = context.command_path if context is not None else "multipack"
    fail(f"{message.rstrip('.')} (see `{command} --help`)", error.exit_code)
