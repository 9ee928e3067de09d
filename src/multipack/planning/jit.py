"""Compilation of the inner loops: cached on disk where that is possible, and never at import."""

from __future__ import annotations

from collections.abc import Callable
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
