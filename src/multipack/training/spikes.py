"""A guard against steps whose loss or gradient jumps: they are left out, or the run stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from multipack.training.metrics import SKIPPED
from multipack.training.observer import Observer, RunStopped, Verdict

DECAY = 0.98
"""Share of the statistics that a step keeps: they are over about 50 steps."""
WARM_UP = 20
"""Steps that fill the statistics before any step is judged."""
MOST_IN_A_ROW = 10
"""Steps left out one after another that say: this is no spike, the run is somewhere else."""
SMALLEST_DEVIATION = 1e-3
"""Of the mean: a loss that hardly varies must not make a spike of rounding."""


@dataclass
class RunningMoments:
    """Mean and variance of recent values, with weights that fall by `DECAY` a value and sum to 1.

    The update is West's (1979, doi:10.1145/359146.359153) for weighted values; the weights' sum is that of a
    geometric series, so that the first values are not pulled towards zero.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.count += 1
        share = (1 - DECAY) / (1 - DECAY**self.count)
        difference = value - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference**2)

    def deviation(self) -> float:
        """Standard deviation, at least a thousandth of the mean."""
        return max(math.sqrt(self.variance), SMALLEST_DEVIATION * abs(self.mean))


class SpikeGuard(Observer):
    """Compares every step's loss and gradient norm with those of the steps that were applied before.

    A step is a spike if either is more than `factor` standard deviations above its recent mean. What is left out does
    not enter the statistics, so that a spike of many steps does not become the usual.

    Args:
        action: leave such steps out, or stop the run.
        factor: standard deviations.
        tell: says that a step was left out, and why.
    """

    name = "spikes"
    legend: Mapping[str, str] = MappingProxyType({"skipped": SKIPPED})

    def __init__(
        self, action: Literal["skip", "stop"], factor: float, tell: Callable[[str], None] = print
    ) -> None:
        self.action = action
        self.factor = factor
        self.skipped = 0
        self._tell = tell
        self._in_a_row = 0
        self._moments = {"loss": RunningMoments(), "grad_norm": RunningMoments()}

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """Whether the step is applied.

        Raises:
            RunStopped: the action is to stop; or too many steps in a row were left out.
        """
        values = {"loss": loss, "grad_norm": grad_norm}
        jumps = [text for name, value in values.items() if (text := self._jump(name, value))]
        if not jumps:
            self._in_a_row = 0
            for name, value in values.items():
                self._moments[name].add(value)
            return "apply"
        why = f"step {step} jumps: {' and '.join(jumps)}"
        if self.action == "stop":
            raise RunStopped(
                f"{why}; the step was not applied, and train.spike=stop ends the run. Lower optimizer.lr, use"
                " train.spike=skip to leave such steps out, or raise train.spike_factor"
            )
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise RunStopped(
                f"{why}; it is the {self._in_a_row}th step in a row that train.spike=skip left out: this is no spike."
                " Lower optimizer.lr, or raise train.spike_factor"
            )
        self._tell(f"{why}; the step was left out ({self.skipped} so far)")
        return "skip"

    def _jump(self, name: str, value: float) -> str:
        moments = self._moments[name]
        limit = moments.mean + self.factor * moments.deviation()
        if moments.count < WARM_UP or value <= limit:
            return ""
        return (
            f"{name} {value:.4g} is above {limit:.4g} (recent mean {moments.mean:.4g}"
            f" + {self.factor:g} x {moments.deviation():.3g})"
        )

    def state(self) -> dict[str, Any]:
        """Statistics and counts."""
        moments = {name: asdict(moments) for name, moments in self._moments.items()}
        return {"moments": moments, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state()` gave."""
        self._moments = {name: RunningMoments(**values) for name, values in state["moments"].items()}
        self.skipped, self._in_a_row = int(state["skipped"]), int(state["in_a_row"])
