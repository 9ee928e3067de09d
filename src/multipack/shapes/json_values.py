"""Values of JSON files that others wrote: read with a limit, and checked before they are used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multipack.atomic import read_file


def mapping_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in a field; an empty one if there is none."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def flag_of(config: Mapping[str, Any], name: str) -> bool:
    """The boolean in a field; false if there is none."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"the configuration's {name} must be true or false, got {value!r:.60}")
    return bool(value)


def real_of(config: Mapping[str, Any], names: tuple[str, ...], default: float) -> float:
    """The value of the first of these fields that is present; `default` if none is."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ValueError(f"the configuration's {names[0]} must be a number, got {value!r:.60}")
    return float(value)


def number_of(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The value of the first of these fields that is present, an integer of at least 0; 0 if none is."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(
                f"the configuration's {name} must be an integer of at least 0, got {value!r:.60}"
            )
        return value
    return 0


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; for a folder, in its config.json.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is larger than 64 MiB, or does not hold a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; give a model's config.json, or its folder")
    text = read_file(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {type(content).__name__}, not the object that describes a model")
    return content
