"""`Tool`, another tool's configurations; the rule of a key returns `Honored` or raises `NotHonored`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from multipack.training.other_names import by_name
from multipack.training.run_config import Config
from multipack.words import flatten

Keys = Mapping[str, Any]
"""A configuration of another tool."""


class NotHonored(ValueError):
    """A key that cannot be honored; the message is the reason."""


@dataclass(frozen=True)
class Honored:
    """The settings that a key is translated to.

    Attributes:
        settings: full name of a setting → value.
        note: a difference that does not change what is trained; empty = none.
        commands: commands to run first.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    commands: tuple[str, ...] = ()


Rule = Callable[[Any, Keys], Honored]
"""(value, all keys) → `Honored`; raises `NotHonored`."""

NOTHING = Honored()
"""The outcome of a key that does not change what is trained."""


@dataclass(frozen=True)
class Tool:
    """Another tool, whose configurations are translated; defined as `TOOL` in a file of `imports/`.

    Attributes:
        name: name of the tool.
        recognizes: whether a configuration is this tool's.
        needs: the keys that every such configuration has, in words.
        rules: name or pattern of keys → their rule; other keys are not honored.
        defaults: setting → the tool's default, where it differs.
        false: keys for which `false` is a value; for other keys it means that they are missing.
        trackers: key that turns on a tracker → the tracker's name in `track.to`.
        read_with: key that the rule of another key reads → the settings that it changes, if they are set.
    """

    name: str
    recognizes: Callable[[Keys], Any]
    needs: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    false: frozenset[str] = frozenset()
    trackers: Mapping[str, str] = field(default_factory=dict)
    read_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def rule_of(self, key: str) -> Rule:
        """The rule under a key's name, else under the first pattern that matches it.

        Raises:
            NotHonored: the key is unknown.
        """
        patterns = (name for name in self.rules if "*" in name and fnmatchcase(key, name))
        if rule := self.rules.get(key) or self.rules.get(next(patterns, "")):
            return rule
        raise NotHonored("not a key that is known here")


def rules_of(
    renamed: Mapping[str, str],
    functions: Mapping[str, Rule],
    noted: Mapping[str, str],
    cannot: Mapping[str, str],
    no_effect: Iterable[str],
) -> dict[str, Rule]:
    """Name or pattern of keys → their rule.

    Args:
        renamed: names of keys → setting of the same meaning.
        functions: names of keys → function, which may read other keys too.
        noted: names of keys → a difference that does not change what is trained.
        cannot: names of keys → the feature without an equivalent.
        no_effect: names of keys that do not change what is trained.
    """
    found: dict[str, Rule] = dict.fromkeys(no_effect, lambda value, keys: NOTHING)
    for rule, rows in ((_renamed, renamed), (_noted, noted), (_cannot, cannot)):
        found |= {name: partial(rule, text) for name, text in by_name(rows).items()}
    return found | by_name(functions)


def sets(settings: Mapping[str, Any]) -> Rule:
    """The rule of a key that sets the same, whatever its value is."""
    return lambda value, keys: Honored(settings)


@cache
def _defaults() -> dict[str, Any]:
    return flatten(asdict(Config()))


def _renamed(setting: str, value: Any, keys: Keys) -> Honored:
    """A setting of the same meaning; its value gets the type of the default."""
    kind = type(_defaults()[setting])
    try:
        return Honored({setting: [value] if kind is list and isinstance(value, str) else kind(value)})
    except (TypeError, ValueError) as error:
        raise NotHonored(f"{value!r} is not a value of {setting}") from error


def _noted(text: str, value: Any, keys: Keys) -> Honored:
    """A key that differs without changing what is trained."""
    return Honored(note=text)


def _cannot(text: str, value: Any, keys: Keys) -> Honored:
    """A key without an equivalent; the value 0 turns it off."""
    if value == 0:
        return NOTHING
    raise NotHonored(f"no equivalent: {text}")
