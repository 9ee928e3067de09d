"""Early stopping: ends a run whose validation loss no longer improves."""

from __future__ import annotations

from multipack.training.callbacks.callback import Callback


class EarlyStopping(Callback):
    """Stops the run after `patience` evaluations without an improvement.

    An evaluation improves the loss if it is lower than at the last improvement.
    """

    name = "stopping"
    saved = ("improved", "evaluations_since")

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.improved: tuple[int, float] | None = None  # step and loss of the last improvement
        self.evaluations_since = 0  # the last improvement

    def stop_reason(self, step: int, val_loss: float) -> str:
        """See `Callback`."""
        if self.improved is None or val_loss < self.improved[1]:
            self.improved, self.evaluations_since = (step, val_loss), 0
            return ""
        self.evaluations_since += 1
        if self.evaluations_since < self.patience:
            return ""
        return (
            f"the validation loss did not improve in {self.evaluations_since} evaluations"
            f" (train.patience={self.patience}): {self.improved[1]:.4f} after step {self.improved[0]},"
            f" {val_loss:.4f} now"
        )
