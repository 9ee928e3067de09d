"""The command line: each command parses, calls one function and prints."""

from __future__ import annotations

import io
import os
import sys

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
for _command in (train, config, prepare, plan, pack, calibrate, generate, export):
    app.command()(_command)
for _command in (advise, launch, submit, doctor, version):
    app.command()(_command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; errors that the user can mend are one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a sample must not end a run where the locale lacks a letter
    # Threads that spin for long while they wait make a step many times as long when something else wants a core too;
    # a short spin costs a quiet machine nothing. Read by the OpenMP runtime when torch is loaded, so set before any
    # command imports it. Whoever sets one of these variables keeps what they chose.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # oneDNN keeps compiled bfloat16 products for 1,024 shapes, and packs differ in shape: gigabytes for nothing.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    # What train.deterministic asks of cuBLAS, which reads it when it is loaded; nothing else depends on it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        code = app(standalone_mode=False)
    except (ValueError, OSError) as error:
        fail(str(error), 2)
    except ImportError as error:
        if "multipack[" not in str(error):
            raise
        fail(str(error), 2)  # an extra is missing, and the message names it
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if type(error).__name__ != "Abort":
            _tell_usage(error)
            raise
        code = 130
    if code == 130:  # what Typer makes of Ctrl-C
        fail("interrupted; what was saved before is whole", code)
    sys.exit(code or 0)


def _tell_usage(error: Exception) -> None:
    """End with what is wrong with a command's words; return if the exception is about anything else.

    Typer brings its own click or uses the installed one, by its version: what an exception offers says what it is.
    """
    told, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if told is None or code is None:
        return
    message, context = str(told()).strip(), getattr(error, "ctx", None)
    if "\n" in message:  # no command at all: the help
        print(message, file=sys.stderr)
        sys.exit(code)
    command = context.command_path if context is not None else "multipack"
    fail(f"{message.rstrip('.')} (`{command} --help` tells more)", code)
