"""The inner loops of planning: plain loops over flat int64 arrays, compiled by numba at their first call.

numba's disk cache notices a change of the file that it caches, but not of a function in another file. So a kernel calls
only kernels of its own file; a test checks this. Every loop is deterministic: ties go to the lower number.
Kernels avoid numpy functions inside, each of which costs up to a second of compilation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """Compile a function to machine code at its first call, with a cache on disk where one can be written.

    numba looks for a cache folder while it decorates (beside the source, or the user's) and raises RuntimeError if none
    can be written to: a read-only image, a missing home. Then every process compiles again.
    """
    has_home = os.path.expanduser("~") != "~"  # numba would make a folder of this name in the current one
    try:
        return cast(Kernel, numba.njit(cache=has_home)(function))
    except RuntimeError:
        return cast(Kernel, numba.njit(function))
