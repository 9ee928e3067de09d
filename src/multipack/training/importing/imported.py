"""From a configuration of Axolotl to one of this package, with every key that cannot be honored by name.

axolotl.yml ─ keys ─▶ keys.RULES ─▶ settings, notes, lacking ─▶ YAML for `multipack train config=FILE`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from multipack.training.importing.keys import DEFAULTS, NO_EFFECT, RULES, TRACKERS
from multipack.training.importing.outcome import NotHonored


@dataclass(frozen=True)
class Imported:
    """The translation of a configuration of Axolotl.

    Attributes:
        settings: full name of a setting → value.
        notes: key → what differs, without changing what is trained.
        lacking: key → why it cannot be honored; what is trained would be something else.
        unneeded: keys without an effect on what is trained.
        commands: commands to run first.
    """

    settings: dict[str, Any]
    notes: dict[str, str]
    lacking: dict[str, str]
    unneeded: list[str]
    commands: list[str]

    def to_yaml(self) -> str:
        """The settings as YAML, below comments that name the keys."""
        lines: list[str] = []
        for title, found in (
            ("Not honored, and this changes what is trained", self.lacking),
            ("Honored in another way, without changing what is trained", self.notes),
        ):
            lines += [
                f"{title}:",
                *(f"  {key}: {' '.join(text.split())}" for key, text in found.items()),
            ] * bool(found)
        if self.unneeded:
            lines += ["No effect here on what is trained:", f"  {', '.join(self.unneeded)}"]
        if self.commands:
            lines += ["Run these first:", *(f"  {command}" for command in self.commands)]
        tree: dict[str, Any] = {}
        for name, value in self.settings.items():
            group, _, setting = name.rpartition(".")
            (tree.setdefault(group, {}) if group else tree)[setting] = value
        body: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        return "".join(f"# {line}\n" for line in lines) + body


def import_axolotl(given: Mapping[str, Any]) -> Imported:
    """Translate a configuration of Axolotl.

    Keys that are null or false are those that Axolotl ignores, but where false is not its default.

    Raises:
        ValueError: it has neither `base_model` nor data sets.
    """
    if not given.get("base_model") or not (given.get("datasets") or given.get("pretraining_dataset")):
        raise ValueError("no configuration of Axolotl: it has no base_model, or no datasets")
    settings, notes, lacking, commands = dict(DEFAULTS), dict[str, str](), dict[str, str](), list[str]()
    unneeded = []
    for key, value in given.items():
        if value is None or value == [] or (value is False and key != "shuffle_merged_datasets"):
            continue
        try:
            if key not in RULES:
                raise NotHonored("not a key that is known here")
            honored = RULES[key](value, given)
        except NotHonored as reason:
            lacking[key] = str(reason)
            continue
        except (TypeError, ValueError, AttributeError):
            lacking[key] = f"{value!r} is not a value that is read here"
            continue
        settings |= honored.settings
        commands += honored.commands
        if honored.note:
            notes[key] = honored.note
        elif key in NO_EFFECT:
            unneeded.append(key)
    if trackers := [name for key, name in TRACKERS.items() if given.get(key)]:
        settings["track.to"] = trackers
    return Imported(settings, notes, lacking, unneeded, commands)
