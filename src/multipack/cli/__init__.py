"""The command line: each command parses, calls one function and prints."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

import typer

from multipack.cli.advise_command import advise
from multipack.cli.bench_command import app as bench
from multipack.cli.command_options import fail
from multipack.cli.launch_commands import doctor, launch, submit
from multipack.cli.model_commands import export, generate, version
from multipack.cli.plan_commands import pack, plan
from multipack.cli.train_commands import calibrate, config, prepare, train

app = typer.Typer(
    name="multipack",
    help="Train language models without padding: documents packed exactly, on one core or many ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(train, config, prepare, plan, pack, calibrate, generate, export),
    *(advise, launch, submit, doctor, version),
)
for _command in _COMMANDS:
    app.command()(_command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line. Errors of the user are one line on standard error, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character of a sample that the locale lacks must not end a run.
            stream.reconfigure(errors="replace")
    # OpenMP reads these when torch is loaded. Threads that spin for long slow down every step if another process needs
    # a core; short spinning costs nothing on an idle machine.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # By default oneDNN caches 1,024 compiled bfloat16 products; packs differ in shape, so they would fill gigabytes.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    # Required by train.deterministic; cuBLAS reads it when it is loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        code = app(standalone_mode=False)
    except (ValueError, OSError) as error:
        fail(str(error), 2)
    except ImportError as error:
        if "multipack[" not in str(error):
            raise
        fail(str(error), 2)  # an optional dependency is missing, and the message names it
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if type(error).__name__ != "Abort":
            _exit_if_usage_error(error)
            raise
        code = 130
    if code == 130:  # Typer's exit code for Ctrl-C
        fail("interrupted; files saved before are complete", code)
    sys.exit(code or 0)


def _exit_if_usage_error(error: Exception) -> None:
    """Exit with a message if the words of a command are wrong; return for any other exception.

    Typer uses its own copy of click or the installed one, so click's exceptions are recognized by their attributes.
    """
    format_message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if format_message is None or code is None:
        return
    message, context = str(format_message()).strip(), getattr(error, "ctx", None)
    if "\n" in message:  # without a command: the help text
        print(message, file=sys.stderr)
        sys.exit(code)
    command = context.command_path if context is not None else "multipack"
    fail(f"{message.rstrip('.')} (see `{command} --help`)", code)
