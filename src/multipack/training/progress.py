"""The progress of a run that a checkpoint stores as JSON, and a check of its entries before a run resumes from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from multipack.training.checkpoint import Checkpoint

_MARK = {"bytes": 0, "sha256": ""}
FORM: dict[str, Any] = {
    "data": dict,
    "corpus": {"documents": "", "tokens": ""},
    "files": {},
    "world_size": 1,
    "threads": 1,
    "running": [0.0, 0.0, ""],
    "evaluated": 0,
    "best": None,
    "best_step": 0,
    "callbacks": dict,
    "marks": {"metrics": _MARK, "samples": _MARK, "documents": _MARK},
}
"""An example of each entry. The feed and the sampler check their state, `data`, themselves."""
AFTER_EVALUATION = {"best": 0.0, "improved": [0, 0.0]}
"""Entries (of callbacks too) that are None until the first evaluation → an example of their later values."""


def checked_progress(checkpoint: Checkpoint, callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """The progress of a checkpoint, after checking the types of its entries.

    Args:
        checkpoint: the checkpoint.
        callbacks: name of a callback → its state in this run, an example of its state in the checkpoint.

    Raises:
        ValueError: an entry is missing or has another type.
    """
    progress = checkpoint.progress
    saved = progress.get("callbacks")
    states = {name: state for name, state in callbacks.items() if isinstance(saved, dict) and name in saved}
    problem = _difference(progress, FORM, "progress")
    if states:  # none, if the run has no callbacks of the saved one
        problem = problem or _difference(saved, states, "progress.callbacks")
    if problem:
        raise ValueError(
            f"checkpoint {checkpoint.path} cannot be read: {problem}; resume from another one in"
            f" {checkpoint.path.parent}"
        )
    return progress


def _difference(value: Any, example: Any, name: str) -> str:
    """How a JSON value differs in type from an example, empty if it does not."""
    last = name.rpartition(".")[2]
    if example is None and value is not None:
        example = AFTER_EVALUATION.get(last)
    if example is dict or example is None:
        fits, parts = isinstance(value, dict) or (example is None and value is None), []
    elif isinstance(example, dict):
        keys = example or (value if isinstance(value, dict) else {})  # an empty example: names → texts
        fits = isinstance(value, dict) and value.keys() >= keys.keys()
        parts = [(f"{name}.{key}", key, example.get(key, "")) for key in keys]
    elif isinstance(example, list | tuple):
        fits = isinstance(value, list) and len(value) == len(example)
        parts = [(f"{name}.{index}", index, part) for index, part in enumerate(example)]
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        whole = not isinstance(example, int) or isinstance(value, int)
        fits, parts = isinstance(value, str) if isinstance(example, str) else number and whole, []
    if not fits:
        expected = example.__name__ if isinstance(example, type) else example
        return f"{name} is {str(value)[:60]!r} instead of a value such as {expected!r}"
    return next(filter(None, (_difference(value[key], part, label) for label, key, part in parts)), "")
