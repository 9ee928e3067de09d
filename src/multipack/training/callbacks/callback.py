"""Base class of callbacks; the loop calls each hook of all of them in order.

    before_step ▸ [forward, backward ▸ micro_batch]… ▸ gradient ▸ clip ▸ accept ▸ optimizer ▸ after_step ▸ record
                                                                       evaluation ▸ stop_reason, sample

Every rank has the same callbacks, but for the trace of rank 0. `accept` and `stop_reason` decide about the run, so they
must be functions of values that are equal on all ranks.

A callback must not read values of the device in `micro_batch` or `after_step`, because the host would wait for it. Only
`gradient_noise`, off by default, reads them in `gradient`: the host waits twice a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from multipack.parallel.engine import Engine


class RunStopped(RuntimeError):
    """The run must stop; the last checkpoint is valid."""


class NonFiniteLoss(RunStopped):
    """A loss, gradient or weight is NaN or infinite; the last checkpoint is valid."""


class Callback:
    """Base class: every hook does nothing by default."""

    name = "callback"
    """Key of its state in checkpoints; unique in a run."""
    saved: Sequence[str] = ()
    """Names of attributes that are part of checkpoints; their values are JSON."""

    def before_step(self, step: int) -> None:
        """Called before the batches of `step` (from 1) are fetched."""

    def micro_batch(self, index: int, engine: Engine, own: float, whole: float) -> None:
        """Called after the backward pass of each micro-batch except the last: gradients are not yet synchronized.

        Args:
            index: index of the micro-batch on this rank, from 0.
            engine: its parameters hold this rank's gradient of the summed loss / `whole`, times `mesh.gradient_size`
                and loss scale.
            own: part of the step's denominator in this rank's micro-batches up to this one.
            whole: the step's denominator.
        """

    def gradient(self, step: int, engine: Engine) -> Mapping[str, float]:
        """Called with the complete, unclipped gradient of the step. Returns metrics for the step's record."""
        return {}

    def accept(self, step: int, loss: float, grad_norm: float) -> bool:
        """Whether the step is applied. Both values are finite and equal on every rank.

        Raises:
            RunStopped: on every rank, with the reason; nothing of the step was applied.
        """
        return True

    def after_step(self, step: int, engine: Engine, applied: bool) -> None:
        """Called after the optimizer, or after the step was skipped."""

    def record(self, values: Mapping[str, float]) -> None:
        """Called with every record of metrics.jsonl, which includes `step`; on rank 0 only."""

    def sample(self, step: int, text: str) -> None:
        """Called with the generated text of an evaluation; on rank 0 only."""

    def stop_reason(self, step: int, val_loss: float) -> str:
        """Called with a validation loss, equal on every rank. Returns why the run should stop; empty = continue."""
        return ""

    def state(self) -> dict[str, Any]:
        """Values for a checkpoint, as JSON."""
        return {name: deepcopy(getattr(self, name)) for name in self.saved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state()` returned."""
        for name in self.saved:
            setattr(self, name, deepcopy(state[name]))

    def close(self, failed: bool) -> None:
        """Called at the end of the run; `failed` is True if an exception ended it."""
