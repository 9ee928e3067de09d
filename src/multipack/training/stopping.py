"""Whether it is time to stop: the validation loss has not become better for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multipack.training.observer import Observer


class EarlyStopping(Observer):
    """Stops a run whose validation loss was not improved for some evaluations.

    Args:
        patience: evaluations without an improvement after which the run stops.
        min_improvement: an improvement is a loss lower by more than this than the last improvement's, so that many
            small steps down count once they add up.
    """

    name = "stopping"

    def __init__(self, patience: int, min_improvement: float = 0.0) -> None:
        self.patience = patience
        self.min_improvement = min_improvement
        self._improved: tuple[int, float] | None = None
        self._without = 0

    def evaluated(self, step: int, val_loss: float) -> str:
        """Why the run should stop; empty = it goes on."""
        if self._improved is None or val_loss < self._improved[1] - self.min_improvement:
            self._improved, self._without = (step, val_loss), 0
            return ""
        self._without += 1
        if self._without < self.patience:
            return ""
        more = f" by more than {self.min_improvement:g}" if self.min_improvement else ""
        return (
            f"the validation loss was not lowered{more} in {self._without} evaluations"
            f" (train.patience={self.patience}): it was {self._improved[1]:.4f} after step {self._improved[0]}"
            f" and is {val_loss:.4f}"
        )

    def state(self) -> dict[str, Any]:
        """The last improvement, and evaluations since."""
        if self._improved is None:
            return {}
        return {"improved": list(self._improved), "without": self._without}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state()` gave."""
        step, val_loss = state["improved"]
        self._improved, self._without = (int(step), float(val_loss)), int(state["without"])
