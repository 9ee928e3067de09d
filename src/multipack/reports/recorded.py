"""Checked values of a run's files, which may be torn, edited or of another version: others are None, NaN or empty."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_TEXT = 4000
"""Most characters of a text."""


def whole(value: Any) -> int | None:
    """A whole number from 0; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def integers(value: Any) -> NDArray[np.int64] | None:
    """A list of whole numbers as an array; None for anything else."""
    if not isinstance(value, list) or any(whole(each) is None for each in value):
        return None
    return np.array(value, dtype=np.int64)


def is_number(value: Any) -> bool:
    """Whether it is a number, finite or not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> float:
    """A finite number; NaN for anything else."""
    try:
        return float(value) if is_number(value) and math.isfinite(value) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def texts(value: Any) -> list[str]:
    """A list of texts; empty for anything else."""
    return [str(each)[:MOST_TEXT] for each in value] if isinstance(value, list) else []


def pairs(value: Any) -> list[tuple[str, str]]:
    """The (name, text) rows of a list; other entries are left out."""
    rows = value if isinstance(value, list) else []
    found = [row for row in rows if isinstance(row, list) and len(row) == 2]
    return [(str(name)[:80], str(text)[:MOST_TEXT]) for name, text in found]
