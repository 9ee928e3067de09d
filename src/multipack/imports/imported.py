"""Translates a configuration of another tool, and names every key that it cannot honor.

axolotl.yml ─ keys ─▶ Tool.rules ─▶ settings, and four lists of keys ─▶ YAML for `multipack train config=FILE`
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import yaml

import multipack.imports
from multipack.imports.outcome import Honored, NotHonored, Tool
from multipack.words import LARGEST, as_text


@dataclass(frozen=True)
class Imported:
    """The translation of a configuration. Every key that has a value is in exactly one of four lists.

    Attributes:
        settings: full name of a setting → value.
        translated: key → the words that it sets, and the difference.
        left: key → a difference for the user to handle, which does not change what is trained.
        unneeded: keys without an effect on what is trained.
        lacking: key → why it cannot be honored; what is trained would be something else.
        commands: commands to run first.
    """

    settings: dict[str, Any]
    translated: dict[str, str]
    left: dict[str, str]
    unneeded: list[str]
    lacking: dict[str, str]
    commands: list[str]

    def to_yaml(self) -> str:
        """The settings as YAML, below comments that name the keys."""
        lines: list[str] = []
        for title, found in (
            ("Cannot be honored, and this changes what is trained", self.lacking),
            ("Left to you, without changing what is trained", self.left),
            ("Set by another word", self.translated),
        ):
            lines += [f"{title}:", *(f"  {key}: {text}" for key, text in found.items())] * bool(found)
        if self.unneeded:
            lines += ["No effect here on what is trained:", f"  {', '.join(self.unneeded)}"]
        if self.commands:
            lines += ["Run these first:", *(f"  {command}" for command in self.commands)]
        tree: dict[str, Any] = {}
        for name, value in self.settings.items():
            group, _, setting = name.rpartition(".")
            (tree.setdefault(group, {}) if group else tree)[setting] = value
        body: str = yaml.safe_dump(
            tree, sort_keys=False
        )  # escapes all but ASCII: a line end reads back as itself
        return "".join(f"# {_in_one_line(line)}\n" for line in lines) + body


def _in_one_line(text: str) -> str:
    """The text of a comment in one line: line ends in keys and values of a file would write settings below it."""
    return "".join(char if char.isprintable() else " " for char in text)


def tools() -> list[Tool]:
    """The tools that the files of this folder define."""
    places = pkgutil.iter_modules(multipack.imports.__path__, "multipack.imports.")
    modules = [import_module(place.name) for place in places]
    return [module.TOOL for module in modules if hasattr(module, "TOOL")]


def translate_keys(given: Mapping[str, Any]) -> Imported:
    """Translate a configuration of another tool, by the rules of the tool that knows it as its own.

    Keys that are null, empty lists or false are ignored, as by the tool; keys of `Tool.false` may be false.

    Raises:
        ValueError: no tool knows the configuration.
    """
    known = tools()
    tool = next((each for each in known if each.recognizes(given)), None)
    if tool is None:
        needed = "; ".join(f"those of {each.name} have {each.needs}" for each in known)
        raise ValueError(f"no configuration of a tool that is known here: {needed}")
    settings, commands = dict(tool.defaults), list[str]()
    honored, lacking = dict[str, Honored](), dict[str, str]()
    for name, value in given.items():
        if value is None or value == [] or (value is False and name not in tool.false):
            continue
        key = str(name)
        try:
            found = tool.rule_of(key)(value, given)
            numbers = [each for each in found.settings.values() if isinstance(each, int | float)]
            if not all(abs(each) < LARGEST for each in numbers):
                raise NotHonored(f"{value!r:.80} is no number that a setting can have")
        except NotHonored as reason:
            lacking[key] = str(reason)
            continue
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            lacking[key] = f"{value!r:.80} is not a value that is read here"
            continue
        honored[key] = found
        settings |= found.settings
        commands += found.commands
    if trackers := [name for key, name in tool.trackers.items() if given.get(key)]:
        settings["track.to"] = trackers
    translated, left, unneeded = dict[str, str](), dict[str, str](), list[str]()
    for key, found in honored.items():
        names = [*found.settings, *(name for name in tool.read_with.get(key, ()) if name in settings)]
        if names:
            words = " ".join(f"{name}={as_text(settings[name])}" for name in names)
            translated[key] = f"{words} ({found.note})" if found.note else words
        elif found.note:
            left[key] = found.note
        else:
            unneeded.append(key)
    return Imported(settings, translated, left, unneeded, lacking, commands)
