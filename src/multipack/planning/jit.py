"""Compilation of the inner loops: cached on disk where that is possible, and never at import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """Compile `function` to machine code at its first call.

    The code is cached beside the source, or in the user's cache folder. Numba looks for such a folder while
    it decorates, and raises when none can be written to (a read-only image, a home that does not exist);
    then every process compiles for itself, which costs seconds and changes no result.
    """
    try:
        return cast(Kernel, numba.njit(cache=True)(function))
    except RuntimeError:
        return cast(Kernel, numba.njit(function))


def cached(*rooms: ModuleType) -> bool:
    """Whether each of these modules' kernels were compiled before and kept since its source changed.

    A module counts as compiled when one of its kernels is: the index that numba writes for it, named after
    module, function, line and version of Python, is younger than the source.
    """
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    for room in rooms:
        source = Path(str(room.__file__))
        changed = source.stat().st_mtime
        folders = {
            Path(value.stats.cache_path)
            for value in vars(room).values()
            if getattr(value, "stats", None) is not None and value.stats.cache_path
        }
        indices = (index for folder in folders for index in folder.glob(f"{source.stem}.*.{python}*.nbi"))
        if not any(index.stat().st_mtime >= changed for index in indices):
            return False
    return True
