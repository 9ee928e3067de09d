"""multipack: padding-free training of language models.

The names in `__init__.pyi` are loaded when they are first used: importing multipack imports neither torch nor numba.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_IMPORTS = re.findall(
    r"^from (\S+) import (\w+)", Path(__file__).with_suffix(".pyi").read_text("utf-8"), re.MULTILINE
)
_PUBLIC = {name: module for module, name in _IMPORTS}

__all__ = ["__version__", *_PUBLIC]

_LEFT = {"PackedStreamDataset": "iterate PackStream, and give each rank its packs with step.deal(world_size)"}
"""Names that were public once → what to use."""


def __getattr__(name: str) -> Any:
    if name in _LEFT:
        raise AttributeError(f"multipack.{name} is no longer there: {_LEFT[name]}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'multipack' has no attribute {name!r}")
    try:
        return getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        from multipack.machine import explain_missing

        raise explain_missing(error, f"multipack.{name}") from error


def __dir__() -> list[str]:
    return sorted(__all__)
