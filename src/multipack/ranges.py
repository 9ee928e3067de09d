"""Ranges of numbers, declared with the field of a dataclass: `steps: Annotated[int, Range(0)] = 0`.

`check_ranges` checks them for a group of settings, and `multipack.words` prints them with the settings.
`check_integer` checks one argument of a function.
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """The legal values of a number: from `least`, above `above`, up to `most`, below `below`."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        shown = {
            name: f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for name, bound in bounds.items()
        }
        known = [f"{name} {shown[name]}" for name, bound in bounds.items() if math.isfinite(bound)]
        return " and ".join(known) or "finite"


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Amount = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, below=1)]
Finite = Annotated[float, Range()]


@cache
def ranges_of(schema: type) -> dict[str, Range]:
    """Name of a field → its range, without fields that have none."""
    hints = typing.get_type_hints(schema, include_extras=True)
    found = {
        name: [each for each in typing.get_args(hint) if isinstance(each, Range)]
        for name, hint in hints.items()
    }
    return {name: ranges[0] for name, ranges in found.items() if ranges}


def check_ranges(group: Any, prefix: str = "") -> None:
    """Check the ranges of a dataclass; a message names a setting by `prefix` and the name of the field.

    Raises:
        ValueError: a number is outside its range.
    """
    for name, legal in ranges_of(typing.cast(Any, type(group))).items():
        if (value := getattr(group, name)) not in legal:
            raise ValueError(f"{prefix}{name}={value} must be {legal}")


def short(value: Any) -> str:
    """The repr of a value in one line, cut to 80 characters for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def check_integer(name: str, value: Any, least: int | None = 1, most: int | None = None) -> int:
    """`value` as an int; `ValueError` if it is not an integer, below `least`, or above `most`."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be a whole number{bound}, got {short(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value:,}")
    return int(value)
