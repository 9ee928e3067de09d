"""Spike guard: skips steps whose loss or gradient norm jumps, or stops the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from multipack.training.callbacks.callback import Callback, RunStopped

DECAY = 0.98
"""Decay of the statistics per step: they cover about 50 steps."""
WARM_UP = 20
"""Number of steps in the statistics before a step can be a spike."""
MOST_IN_A_ROW = 10
"""Stop after this many consecutive skipped steps."""
FACTOR = 6.0
"""Standard deviations above the recent mean that count as a jump."""
SMALLEST_DEVIATION = 1e-3
"""Lower limit of the deviation, relative to the mean: rounding must not make a spike of a nearly constant loss."""


@dataclass
class RunningMoments:
    """Mean and variance of recent values, with weights that decay by `DECAY` per value and sum to 1.

    The update is West's (1979, doi:10.1145/359146.359153) for weighted values.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        share = (1 - DECAY) / (1 - DECAY**self.count)
        difference = value - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference**2)


class SpikeGuard(Callback):
    """Compares the loss and gradient norm of every step with the recently applied steps.

    A step is a spike if either is more than `FACTOR` standard deviations above its recent mean. Skipped steps do not
    enter the statistics, so that a long spike does not become normal.
    """

    name = "spikes"

    def __init__(self, action: Literal["skip", "stop"], report: Callable[[str], None] = print) -> None:
        self.action = action
        self.skipped = 0
        self._report = report
        self._in_a_row = 0
        self._moments = {"loss": RunningMoments(), "grad_norm": RunningMoments()}

    def accept(self, step: int, loss: float, grad_norm: float) -> bool:
        """See `Callback`.

        Raises:
            RunStopped: the action is to stop, or too many consecutive steps were skipped.
        """
        values = {"loss": loss, "grad_norm": grad_norm}
        jumps = [text for name, value in values.items() if (text := self._jump(name, value))]
        if not jumps:
            self._in_a_row = 0
            for name, value in values.items():
                self._moments[name].add(value)
            return True
        reason = f"step {step} is a spike: {' and '.join(jumps)}"
        if self.action == "stop":
            raise RunStopped(
                f"{reason}; the step was not applied, and train.spike=stop ends the run. Lower optimizer.lr, or use"
                " train.spike=skip to skip such steps"
            )
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise RunStopped(
                f"{reason}; train.spike=skip has skipped {self._in_a_row} consecutive steps. Lower optimizer.lr"
            )
        self._report(f"{reason}; the step was skipped ({self.skipped} so far)")
        return False

    def _jump(self, name: str, value: float) -> str:
        """How a value exceeds its limit, for a message; empty if it does not."""
        moments = self._moments[name]
        deviation = max(math.sqrt(moments.variance), SMALLEST_DEVIATION * abs(moments.mean))
        limit = moments.mean + FACTOR * deviation
        if moments.count < WARM_UP or value <= limit:
            return ""
        return (
            f"{name} {value:.4g} is above {limit:.4g} (recent mean {moments.mean:.4g}"
            f" + {FACTOR:g} x {deviation:.3g})"
        )

    def state(self) -> dict[str, Any]:
        """Statistics and counts."""
        moments = {name: asdict(moments) for name, moments in self._moments.items()}
        return {"moments": moments, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        self._moments = {name: RunningMoments(**values) for name, values in state["moments"].items()}
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]
