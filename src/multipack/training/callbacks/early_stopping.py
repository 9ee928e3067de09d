"""Early stopping: ends a run whose validation loss no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multipack.training.callbacks.callback import Callback


class EarlyStopping(Callback):
    """Stops the run after `patience` evaluations without an improvement.

    Args:
        patience: evaluations without an improvement after which the run stops.
        min_improvement: an improvement lowers the loss of the last improvement by more than this, so that small steps
            count once they add up.
    """

    name = "stopping"

    def __init__(self, patience: int, min_improvement: float = 0.0) -> None:
        self.patience = patience
        self.min_improvement = min_improvement
        self._improved: tuple[int, float] | None = None
        self._without = 0

    def stop_reason(self, step: int, val_loss: float) -> str:
        """See `Callback`."""
        if self._improved is None or val_loss < self._improved[1] - self.min_improvement:
            self._improved, self._without = (step, val_loss), 0
            return ""
        self._without += 1
        if self._without < self.patience:
            return ""
        margin = f" by more than {self.min_improvement:g}" if self.min_improvement else ""
        return (
            f"the validation loss did not improve{margin} in {self._without} evaluations"
            f" (train.patience={self.patience}): {self._improved[1]:.4f} after step {self._improved[0]},"
            f" {val_loss:.4f} now"
        )

    def state(self) -> dict[str, Any]:
        """The last improvement, and evaluations since."""
        if self._improved is None:
            return {}
        return {"improved": list(self._improved), "without": self._without}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        step, val_loss = state["improved"]
        self._improved, self._without = (int(step), float(val_loss)), int(state["without"])
