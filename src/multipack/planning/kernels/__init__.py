"""The inner loops of planning: plain loops over flat int64 arrays, compiled by numba.

numba's disk cache notices a change of the file that it caches, but not of a function in another file. So a kernel calls
only kernels of its own file; a test checks this. Every loop is deterministic: ties go to the lower number.
Kernels avoid numpy functions inside, each of which costs up to a second of compilation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_interpreted_until = ContextVar("_interpreted_until", default=0.0)


@contextmanager
def interpreted(seconds: float) -> Iterator[None]:
    """Context in which Python runs the kernels, with the same results, until they have taken this much CPU time.

    numba and machine code from the disk take 0.9 s to load, in which Python plans some thousand documents.
    """
    token = _interpreted_until.set(time.process_time() + seconds)
    try:
        yield
    finally:
        _interpreted_until.reset(token)


class Compiled(Generic[P, R]):
    """A function that is compiled to machine code at its first call, with a cache on disk where one can be written."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        """Run the function."""
        until = _interpreted_until.get()
        is_interpreted = until and time.process_time() < until
        return (self.function if is_interpreted else self.machine_code)(*args, **named)

    @cached_property
    def machine_code(self) -> Callable[P, R]:
        """The function for numba.

        numba looks for a cache folder here (beside the source, or the user's) and raises RuntimeError if none can be
        written to: a read-only image, a missing home. Then every process compiles again.
        """
        import numba  # takes 0.3 s

        has_home = os.path.expanduser("~") != "~"  # numba would make a folder of this name in the current one
        try:
            return cast(Callable[P, R], numba.njit(cache=has_home)(self.function))
        except RuntimeError:
            return cast(Callable[P, R], numba.njit(self.function))

    @property
    def _numba_type_(self) -> object:
        """The type by which numba finds the machine code of a kernel that another kernel calls."""
        return self.machine_code._numba_type_  # type: ignore[attr-defined]
