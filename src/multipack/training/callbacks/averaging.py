"""Exponential moving average of the weights (EMA), evaluated beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from multipack.parallel.engine import Engine
from multipack.parallel.state import local
from multipack.training.callbacks.callback import Callback, Fill
from multipack.training.callbacks.gradients import trainable


class MovingAverage(Callback):
    """EMA of all trainable weights in float32, over the applied steps.

    After t steps it is Σ decay^(t−i) · w_i / Σ decay^(t−i) over the weights w_i after step i: the factors sum to 1, and
    the random initial weights are not included (as in Adam's bias correction: Kingma & Ba 2015, arXiv:1412.6980,
    section 3). Each rank averages its parts of the weights; replicas hold equal averages.

    Args:
        decay: share of the average that a step keeps; 0.999 averages about 1,000 steps.
    """

    name = "average"
    legend: Mapping[str, str] = {"val_loss_ema": "val_loss of the moving average of the weights"}
    saved = ("steps",)
    suffix = "_ema"
    """Suffix of metrics that are measured with the average."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self._means: dict[str, Tensor] = {}

    @torch.no_grad()
    def after_step(self, step: int, engine: Engine, applied: bool) -> None:
        """Add the weights to the average, unless the step was skipped."""
        if not applied:
            return
        weights = trainable(engine)
        means = self._local_means(weights)
        self.steps += 1
        share = (1 - self.decay) / (1 - self.decay**self.steps)
        if means:  # a frozen pipeline stage has none
            torch._foreach_lerp_(means, [local(weight).float() for weight in weights.values()], share)

    def weight_sets(self, engine: Engine) -> Sequence[tuple[str, AbstractContextManager[None]]]:
        """The average, once there is one."""
        return [(self.suffix, self._swapped(engine))] if self.steps else []

    @contextmanager
    def _swapped(self, engine: Engine) -> Iterator[None]:
        """Context in which the model has the averaged weights; on exit it has its own again, bit for bit."""
        weights = trainable(engine)
        means = self._local_means(weights)
        with torch.no_grad():
            tensors = [local(weight) for weight in weights.values()]
            own = [tensor.detach().clone() for tensor in tensors]
            _copy(tensors, means)
        try:
            yield
        finally:
            with torch.no_grad():
                _copy(tensors, own)

    def _local_means(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's part of the averages, in the order of the weights; zeros at first."""
        if not self._means:
            self._means = {
                name: torch.zeros_like(each, dtype=torch.float32) for name, each in weights.items()
            }
        return [local(self._means[name]) for name in weights]

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameters' names; empty before the first applied step."""
        return dict(self._means)

    def load_tensors(self, shapes: Mapping[str, tuple[int, ...]], fill: Fill, engine: Engine) -> None:
        """See `Callback`; averages are distributed as the weights are.

        Raises:
            ValueError: the averages belong to other weights.
        """
        weights = trainable(engine)
        other = sorted(name for name in engine.parameters if (name in weights) != (name in shapes))
        if other:
            raise ValueError(
                f"the checkpoint's average of the weights (train.ema_decay) is over other weights:"
                f" {', '.join(other[:3])} ({len(other)} in all); keep optimizer.rules as they were, or start a new run"
            )
        self._local_means(weights)
        fill(self._means)


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    if into:  # torch's function refuses an empty list
        torch._foreach_copy_(into, values)
