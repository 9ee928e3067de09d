"""What a rule for a key returns (`Honored`) or raises (`NotHonored`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = Mapping[str, Any]
"""A configuration of Axolotl."""


class NotHonored(ValueError):
    """A key that cannot be honored; the message is the reason."""


@dataclass(frozen=True)
class Honored:
    """The settings that a key is translated to.

    Attributes:
        settings: full name of a setting → value.
        note: what differs, without changing what is trained; empty = nothing.
        commands: commands to run first.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    commands: tuple[str, ...] = ()


Rule = Callable[[Any, Keys], Honored]
"""(value, all keys) → `Honored`; raises `NotHonored`."""

NOTHING = Honored()
"""The outcome of a key that does not change what is trained."""
