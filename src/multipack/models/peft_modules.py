"""Which modules of transformers the settings of an adapter in peft's format name, by peft's rules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from multipack.untrusted import matching


def check_targets(
    file: Path, given: Mapping[str, Any], adapted: Sequence[str], outside: Collection[str]
) -> None:
    """Check that peft reads the adapter of every module: where a setting does not name it, peft leaves it out.

    Args:
        file: adapter_config.json.
        given: its settings.
        adapted: modules that have an adapter.
        outside: modules that are not meant by all-linear.

    Raises:
        ValueError: peft leaves one out, or a setting is of another type.
    """
    targets, excluded = given.get("target_modules"), given.get("exclude_modules") or []
    if isinstance(targets, str) and targets.lower() == "all-linear":
        targets = [name for name in adapted if name not in outside]
    left_out = {
        "target_modules": [not each for each in _named(file, "target_modules", targets, adapted)],
        "layers_to_transform": [not each for each in _in_layers(file, given, adapted)],
        "exclude_modules": _named(file, "exclude_modules", excluded, adapted),
        "modules_to_save": [
            any(f".{part}." in f".{module}." for part in _texts(file, "modules_to_save", given))
            for module in adapted
        ],
    }
    for setting, found in left_out.items():
        if True in found:
            raise ValueError(
                f"{file}: {setting}={given.get(setting)!r:.80} leaves out {adapted[found.index(True)]}, which has"
                " an adapter; name the modules that the adapter was trained with"
            )


def _texts(file: Path, setting: str, given: Mapping[str, Any]) -> list[str]:
    """A setting of names.

    Raises:
        ValueError: it is not a list of strings.
    """
    value = given.get(setting) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{file}: {setting} must be a list of names, got {value!r:.60}")
    return value


def _named(file: Path, setting: str, value: Any, modules: Sequence[str]) -> list[bool]:
    """For each module: whether a list of name endings, or a regular expression of the whole name, matches it."""
    if not isinstance(value, str):
        names = _texts(file, setting, {setting: value})
        return [any(f".{module}".endswith(f".{name}") for name in names) for module in modules]
    try:
        return matching([value], modules, whole=True)[0]
    except ValueError as error:
        raise ValueError(f"{file}: {setting}: {error}; merge the adapter with peft") from None


def _in_layers(file: Path, given: Mapping[str, Any], modules: Sequence[str]) -> list[bool]:
    """For each module: whether it is in one of `layers_to_transform`, by the first number after a `layers_pattern`."""
    layers, pattern = given.get("layers_to_transform"), given.get("layers_pattern") or []
    if layers is None or layers == []:
        return [True] * len(modules)
    layers = layers if isinstance(layers, list) else [layers]
    if not all(type(each) is int for each in layers):
        raise ValueError(f"{file}: layers_to_transform must be whole numbers, got {layers!r:.60}")
    names = _texts(
        file, "layers_pattern", {"layers_pattern": [pattern] if isinstance(pattern, str) else pattern}
    )
    lists = "|".join(map(re.escape, names)) or r"[^.]+"
    found = [re.search(rf"(?:^|\.)(?:{lists})\.(\d+)\.", module) for module in modules]
    return [each is not None and int(each[1]) in layers for each in found]


def by_pattern(
    file: Path, setting: str, given: Any, default: float, modules: Sequence[str]
) -> Callable[[str], float]:
    """Module of transformers → its value in rank_pattern or alpha_pattern, where the first match counts, as in peft.

    Raises:
        ValueError: it is not an object of positive numbers, or a key is a bad regular expression or a very slow one.
    """
    try:
        patterns = {
            key: float(value) for key, value in dict(given or {}).items() if type(value) in (int, float)
        }
        whole = setting != "rank_pattern" or all(each.is_integer() for each in patterns.values())
        if (
            len(patterns) < len(given or {})
            or not all(0 < each < math.inf for each in patterns.values())
            or not whole
        ):
            raise ValueError("a value is another")
        found = matching([rf"(.*\.)?({key})$" for key in patterns], modules) if patterns else []
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: {setting} must have a positive number for each name or regular expression of modules, got"
            f" {given!r:.60} ({error}); merge the adapter with peft"
        ) from None
    of_module = {
        module: value
        for value, row in reversed([*zip(patterns.values(), found, strict=True)])
        for module, is_matched in zip(modules, row, strict=True)
        if is_matched
    }
    return lambda module: of_module.get(module, default)
