"""The gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from multipack.parallel.engine import Engine
from multipack.training.callbacks.callback import Callback


class GradientNoise(Callback):
    """The simple noise scale tr Σ / |G|² of McCandlish et al. 2018 (arXiv:1812.06162).

    G is the gradient of the expected loss of a target, Σ the covariance of single targets' gradients. The mean gradient
    g_b of b targets has the expected squared norm |G|² + tr Σ / b. The small batch is each rank's first micro-batch,
    the large batch the step with its B targets. With means over ranks of |g_b|² and 1 / b, and moving averages over
    about 100 steps of everything (single steps are too noisy), appendix A.1's equations become

        tr Σ = mean(|g_b|² − |g_B|²) / mean(1/b − 1/B)        |G|² = mean |g_B|² − tr Σ · mean 1/B

    The metric is `gradient_noise`, in targets (in documents where the loss is a mean over documents); it is missing
    while one of the two estimates is not positive. Documents are not split, so correlation between the targets of a
    document counts as noise; and they are assigned to micro-batches by cost, not at random: where gradients depend on
    document length, the estimate is too high.
    """

    name = "gradient_noise"
    saved = ("steps", "means")
    decay = 0.99
    """Decay of the moving averages per step."""

    def __init__(self) -> None:
        self.steps = 0
        self.means = {"squares": 0.0, "inverses": 0.0, "whole_square": 0.0, "whole_inverse": 0.0}
        # |g|², factor to |g_b|², and 1 / b of this rank.
        self._small: tuple[Tensor | float, float, float] | None = None
        self._whole = 0.0  # B

    def before_step(self, step: int) -> None:
        """See `Callback`."""
        self._small = None

    @torch.no_grad()
    def micro_batch(self, index: int, engine: Engine, own: float, whole: float) -> None:
        """Measure the small batch: the gradient of this rank's first micro-batch."""
        if index:
            return
        self._whole = whole
        self._small = (0.0, 0.0, 0.0)  # stays so on a rank without targets in this micro-batch
        if own:
            scale = engine.mesh.gradient_size * engine.loss_scale / whole
            self._small = (_squared_norm(engine), 1.0 / (scale * own) ** 2, 1.0 / own)

    @torch.no_grad()
    def gradient(self, step: int, engine: Engine) -> Mapping[str, float]:
        """Update the moving averages."""
        assert self._small is not None, "ranks have two micro-batches or more"
        square, factor, inverse = self._small
        # Read here, after the last backward pass: reading waits for the device.
        own = [float(square) * factor, inverse, float(inverse > 0)]
        squares, inverses, ranks = engine.world.sum(own)
        whole_square, whole_inverse = float(_squared_norm(engine)), 1.0 / max(self._whole, 1.0)
        if ranks and math.isfinite(squares + whole_square):  # else fp16 overflowed
            self._update(
                squares / ranks - whole_square, inverses / ranks - whole_inverse, whole_square, whole_inverse
            )
        noise = self._noise()
        return {} if noise is None else {"gradient_noise": noise}

    def _update(self, *values: float) -> None:
        self.steps += 1
        share = (1 - self.decay) / (1 - self.decay**self.steps)
        for name, value in zip(self.means, values, strict=True):
            self.means[name] += share * (value - self.means[name])

    def _noise(self) -> float | None:
        means = self.means
        if not means["inverses"] > 0:
            return None  # all targets were in one micro-batch in every step
        trace = means["squares"] / means["inverses"]
        square = means["whole_square"] - trace * means["whole_inverse"]
        return trace / square if min(trace, square) > 0 else None


def _squared_norm(engine: Engine) -> Tensor | float:
    """Squared norm of this rank's gradient, on its device, computed in float32 or wider and summed in float64."""
    gradients = list(engine.gradients().values())
    if not gradients:
        return 0.0
    wide = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(gradients, 2, wide)).double().square().sum()
