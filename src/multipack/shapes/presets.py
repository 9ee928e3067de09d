"""Presets of `ModelShape`: two small shapes for tests and first runs, then the dimensions of published models.

presets.json has their fields; its sources are the models' config.json files. Models with experts are for planning only:
`mixtral-8x7b`, `gpt-oss-20b`, and `deepseek-v3` without its head for multi-token prediction.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, TypeVar

Shape = TypeVar("Shape")
PRESETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""Name → field of `ModelShape` → value."""


class Presets(dict[str, Shape]):
    """Values by the name of a preset; an unknown name is answered with the nearest ones."""

    def __missing__(self, name: str) -> Shape:
        near = difflib.get_close_matches(str(name), self, 3, 0.0)
        raise KeyError(f"{name} is no preset; the nearest are {', '.join(near)}")
