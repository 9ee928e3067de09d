"""This machine: packages of optional dependencies, free memory, and findings of checks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
MOST_REASON = 400
"""Characters of the reason that another library states for an error."""
_REASONS = {"MemoryError": "it needs too much memory", "RecursionError": "it is nested too deeply"}

EXTRAS = dict.fromkeys(("torch", "tokenizers", "safetensors", "jinja2"), "train")
"""Package → the extra of multipack that installs it, for those that modules import when they are loaded."""


def import_extra(package: str, setting: str, extra: str) -> Any:
    """Import a package that is installed with an extra of multipack.

    Raises:
        ImportError: it is not installed; the message names the setting that needs it, and the extra.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _missing(package, setting, extra) from error


def explain_missing(error: ModuleNotFoundError, user: str) -> ImportError:
    """The error that a package of `EXTRAS` is missing, with the extra; any other error is returned unchanged.

    Args:
        error: raised by an import.
        user: name or command that needs the package.
    """
    package = (error.name or "").partition(".")[0]
    return _missing(package, user, EXTRAS[package]) if package in EXTRAS else error


def _missing(package: str, user: str, extra: str) -> ImportError:
    name = package.replace("_", "-")
    return ImportError(f'{user} needs the package {name}: pip install "multipack[{extra}]"', name=package)


@contextmanager
def foreign_errors(where: str) -> Iterator[None]:
    """Context in which another library reads a file that may be damaged or hostile, and so may fail in any way.

    Raises:
        ValueError: the library raised anything but an interrupt; one line that begins with `where`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no `Exception`
        raise ValueError(f"{where}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The message of an error on one line, with its kind unless the message is one that people read."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    text = text if len(text) <= MOST_REASON else f"{text[:MOST_REASON]}…"
    is_plain = text and isinstance(error, ValueError | OSError | RuntimeError)
    return _REASONS.get(kind) or (text if is_plain else f"{kind} {text}".rstrip())


def available_memory() -> int | None:
    """Bytes of memory that new allocations can have, as Linux estimates them; None if unknown."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", file.read_text()) if file.is_file() else None
    return 1024 * int(found[1]) if found else None


@dataclass(frozen=True)
class Finding:
    """One result of `multipack doctor`.

    Attributes:
        name: what was checked.
        status: `fail` = training does not work, or a run is damaged; `warn` = it is slower, or fails in some setups.
        detail: what was found.
        remedy: what to do; empty if the status is `ok`.
        area: subject of the check.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    area: str = ""
