"""Names of models on the Hugging Face hub → their `model_type`, for use where no config.json is at hand."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path


def model_type_of(name: str) -> str:
    """The `model_type` of a model by its name on the hub, such as `meta-llama/Llama-3.1-8B`; empty = unknown.

    The first pattern of hub_names.json that matches the name without its owner, in lower case, counts.
    """
    patterns = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    short = name.rstrip("/").rpartition("/")[2].lower()
    return next((kind for pattern, kind in patterns.items() if fnmatchcase(short, pattern)), "")
