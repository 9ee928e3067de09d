"""This machine: packages of optional dependencies, free memory, and findings of checks."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Status = Literal["ok", "warn", "fail"]

EXTRAS = dict.fromkeys(("torch", "tokenizers", "safetensors", "jinja2"), "train")
"""Package that modules import when they are loaded → the extra of multipack that installs it."""


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
    """The error that a package of `EXTRAS`, which `user` needs, is missing; any other error is returned unchanged."""
    package = (error.name or "").partition(".")[0]
    return _missing(package, user, EXTRAS[package]) if package in EXTRAS else error


class MissingExtra(ImportError):
    """A package that an extra of multipack installs is missing; the message is one line that names the extra."""


def _missing(package: str, user: str, extra: str) -> MissingExtra:
    name = package.replace("_", "-")
    return MissingExtra(f"{user} needs the package {name}: {install_words(extra)}", name=package)


def install_words(extra: str) -> str:
    """The pip command that adds an extra to multipack from where it was installed: a folder, a repository, an index."""
    import importlib.metadata  # takes 0.03 s to import, which every command would wait for

    place: dict[str, Any] = {}
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        text = importlib.metadata.distribution("multipack").read_text("direct_url.json")
        place = json.loads(text) if text else {}
    url = str(place.get("url", ""))
    if url.startswith("file:") and "dir_info" in place:
        editable = "-e " if place["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    if source := place.get("vcs_info", {}):
        url = (
            f"{source.get('vcs', 'git')}+{url}@{source.get('requested_revision') or source.get('commit_id')}"
        )
    return f"pip install {shlex.quote(f'multipack[{extra}]' + (f' @ {url}' if url else ''))}"


def available_memory() -> int | None:
    """Bytes of memory that new allocations can have, as Linux estimates them; None if unknown."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", file.read_text()) if file.is_file() else None
    return 1024 * int(found[1]) if found else None


@dataclass(frozen=True)
class Finding:
    """One result of `multipack doctor`.

    Attributes:
        name: subject of the check.
        status: `fail` = training does not work, or a run is damaged; `warn` = it is slower, or fails in some setups.
        detail: the finding in words.
        remedy: advice; empty if the status is `ok`.
        area: group of checks that it belongs to.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    area: str = ""
