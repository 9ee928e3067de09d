"""What saved states of samplers must agree in, and the state of a sampler that another one reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def digest(arrays: Iterable[NDArray[np.int64]]) -> str:
    """16 hexadecimal digits of a SHA-256 over arrays of integers and where one ends and the next begins."""
    made = hashlib.sha256()
    for array in arrays:
        made.update(len(array).to_bytes(8, "little"))
        made.update(array.astype("<i8", copy=False).tobytes())
    return made.hexdigest()[:16]


def check_identity(state: Mapping[str, Any], mine: Mapping[str, Any], more: Iterable[str]) -> None:
    """Refuse a state of another sampler.

    Args:
        state: as saved.
        mine: what it must agree in, by name.
        more: what else it must have.

    Raises:
        ValueError: something is missing or differs; the message names it.
    """
    missing = [name for name in (*mine, *more) if name not in state]
    if missing:
        raise ValueError(f"the saved sampler state lacks {', '.join(missing)}")
    changed = [f"{name}={state[name]!r} (now {mine[name]!r})" for name in mine if state[name] != mine[name]]
    if changed:
        raise ValueError(
            f"the saved sampler state is of another sampler: {', '.join(changed)}; go on with what it was saved"
            " with, or start a new run"
        )


def state_of(sampler: Any) -> dict[str, Any]:
    """A sampler's own state, as far as it shows one: taken after it was read, so that its next epoch follows."""
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return {"state_dict": sampler.state_dict()}
    state: dict[str, Any] = {}
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        state["generator"] = sampler.generator.get_state()
    if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
        state["epoch"] = sampler.epoch
    return state


def restore(sampler: Any, state: Mapping[str, Any]) -> None:
    """Put back what `state_of` took, where the sampler is of that kind."""
    if "state_dict" in state and hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(state["state_dict"])
    if "generator" in state and isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.set_state(state["generator"])
    if "epoch" in state and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(state["epoch"])
