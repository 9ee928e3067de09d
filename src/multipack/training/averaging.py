"""A running mean of the weights, evaluated beside them: it lags behind, and is less noisy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from multipack.parallel.engine import ModelEngine
from multipack.parallel.state import local
from multipack.training.gradients import trainable
from multipack.training.observer import Observer


class MovingAverage(Observer):
    """Exponential moving average (EMA) of all trainable weights, in float32, over the steps that were applied.

    After t of them it is Σ decay^(t−i) · w_i / Σ decay^(t−i) over the weights w_i after step i: a mean with weights
    that sum to 1, so that the random weights which the run began with have no part in it (the bias correction of
    Adam: Kingma & Ba 2015, arXiv:1412.6980, section 3). A rank keeps the mean of what it holds of the weights: replicas
    hold the same, and so the same mean.

    Args:
        decay: share of the mean that a step keeps; 0.999 remembers about 1,000 steps.
    """

    name = "average"
    legend: Mapping[str, str] = MappingProxyType(
        {"val_loss_ema": "val_loss of the running mean of the weights"}
    )
    suffix = "_ema"
    """Of the metrics that are measured with the mean."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self._means: dict[str, Tensor] = {}

    @torch.no_grad()
    def after_step(self, step: int, engine: ModelEngine, applied: bool) -> None:
        """Take the weights into the mean, unless the step was left out."""
        if not applied:
            return
        weights = trainable(engine)
        means = self._means_like(weights)
        self.steps += 1
        share = (1 - self.decay) / (1 - self.decay**self.steps)
        if means:  # a stage of a pipeline may be frozen, and has none
            torch._foreach_lerp_(means, [local(weight).float() for weight in weights.values()], share)

    def weightings(self, engine: ModelEngine) -> Sequence[tuple[str, AbstractContextManager[None]]]:
        """The mean, once there is one."""
        return [(self.suffix, self._swapped(engine))] if self.steps else []

    @contextmanager
    def _swapped(self, engine: ModelEngine) -> Iterator[None]:
        """The model has the mean as its weights; after that its own, to the last bit."""
        weights = trainable(engine)
        means = self._means_like(weights)
        with torch.no_grad():
            tensors = [local(weight) for weight in weights.values()]
            own = [tensor.detach().clone() for tensor in tensors]
            _copy(tensors, means)
        try:
            yield
        finally:
            with torch.no_grad():
                _copy(tensors, own)

    def _means_like(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """What this rank holds of the means, in the weights' order and on their devices; zeros at first.

        Raises:
            ValueError: those of a checkpoint are of other weights.
        """
        if not self._means:
            self._means = {
                name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()
            }
        if self._means.keys() != weights.keys():
            other = sorted(self._means.keys() ^ weights.keys())
            raise ValueError(
                f"the checkpoint's mean of the weights (train.ema_decay) is over other weights: {', '.join(other[:3])}"
                f" ({len(other)} in all); keep optimizer.rules as they were, or begin a new run"
            )
        for name, weight in weights.items():
            if self._means[name].shape != weight.shape:
                raise ValueError(
                    f"the checkpoint's mean of {name} has shape {tuple(self._means[name].shape)} instead of"
                    f" {tuple(weight.shape)}"
                )
            if self._means[name].device != weight.device:  # just loaded
                self._means[name] = self._means[name].to(weight.device)
        return [local(self._means[name]) for name in weights]

    def state(self) -> dict[str, Any]:
        """How many steps the mean is over."""
        return {"steps": self.steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state()` gave."""
        self.steps = int(state["steps"])

    def tensors(self) -> dict[str, Tensor]:
        """The means by parameters' names; empty before the first applied step."""
        return dict(self._means)

    def blank(self, shapes: Mapping[str, tuple[int, ...]], engine: ModelEngine) -> dict[str, Tensor]:
        """See `Observer`: divided as the weights are."""
        weights = engine.state()["model"]
        return {
            name: torch.zeros_like(weights[name], dtype=torch.float32) for name in shapes if name in weights
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors()` gave."""
        self._means = dict(tensors)


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    if into:  # torch's own refuses an empty list
        torch._foreach_copy_(into, values)
