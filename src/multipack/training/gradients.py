"""What can be seen in a step's gradient: norms layer by layer, and how noisy it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from multipack.parallel.engine import ModelEngine
from multipack.training.observer import Observer


def trainable(engine: ModelEngine) -> dict[str, Tensor]:
    """The live parameters that have a gradient, by name."""
    return {name: tensor for name, tensor in engine.parameters.items() if tensor.requires_grad}


class LayerNorms(Observer):
    """Norms of gradients and weights, of every block and of what stands before and behind the blocks.

    Metrics are `grad_norm/<layer>` and `weight_norm/<layer>`: `embedding`, `blocks.0`, …, `norm`, `head`. Both are of
    the step's begin: before clipping, and before the step is applied. The squares of the first sum to grad_norm's. A
    gradient that overflowed in fp16 has none.
    """

    name = "layer_norms"
    legend: Mapping[str, str] = MappingProxyType(
        {
            "grad_norm/PART": "norm of the gradient of a block, of the embedding or the head, before clipping",
            "weight_norm/PART": "norm of its weights",
        }
    )

    @torch.no_grad()
    def gradient(self, step: int, engine: ModelEngine) -> Mapping[str, float]:
        """Both norms of every layer that is trained."""
        held = {name: tensor for name, tensor in trainable(engine).items() if tensor.grad is not None}
        gradients = engine.squared_norms(
            {name: tensor.grad for name, tensor in held.items() if tensor.grad is not None}
        )
        weights = engine.squared_norms(held)
        if not math.isfinite(sum(gradients.values())):
            return {}
        trained = [name for name, square in gradients.items() if square or weights[name]]
        found: dict[str, float] = {}
        for kind, squares in (("grad_norm", gradients), ("weight_norm", weights)):
            for name in trained:
                key = f"{kind}/{layer_of(name)}"
                found[key] = found.get(key, 0.0) + squares[name]
        return {key: math.sqrt(square) for key, square in found.items()}


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: `blocks.3` of `blocks.3.attention.query.weight`, else its first part."""
    first, *more = name.split(".")
    return f"{first}.{more[0]}" if more and more[0].isdigit() else first


def _norms(tensors: list[Any]) -> Tensor:
    """(tensors,) 2-norms in float64, computed in float32 or wider."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 2, wide)).double()


class GradientNoise(Observer):
    """The simple noise scale tr Σ / |G|² of McCandlish et al. 2018 (arXiv:1812.06162).

    G is the gradient of the expected loss of a target, Σ the covariance of single targets' gradients. The mean g_b of b
    targets has the expected squared norm |G|² + tr Σ / b, also where they are a part of the B targets of a step. The
    small batch is every rank's first micro-batch: the last moment when a rank's gradient is its own. With means over
    ranks of |g_b|² and of 1 / b, and over about 100 steps of everything (a single step's values are far too noisy),
    appendix A.1's two equations become

        tr Σ = mean(|g_b|² − |g_B|²) / mean(1/b − 1/B)        |G|² = mean |g_B|² − tr Σ · mean 1/B

    The metric is `gradient_noise`, in targets (in documents where the loss is a mean over documents); there is none
    while one of both does not come out positive. Documents stay whole, so that what their targets have in common counts
    as noise; and they are dealt to micro-batches by their cost, not drawn: where long documents have other gradients
    than short ones, the scale is too high.
    """

    name = "gradient_noise"
    legend: Mapping[str, str] = MappingProxyType(
        {"gradient_noise": "the gradient's noise scale, in targets: beyond it a larger step helps little"}
    )
    decay = 0.99
    """Share of the running means that a step keeps."""

    def __init__(self) -> None:
        self.steps = 0
        self._means = {"squares": 0.0, "inverses": 0.0, "whole_square": 0.0, "whole_inverse": 0.0}
        self._small: tuple[float, float] | None = None
        self._whole = 0.0

    def before_step(self, step: int) -> None:
        """No micro-batch was seen so far."""
        self._small = None

    @torch.no_grad()
    def micro_batch(self, index: int, engine: ModelEngine, own: float, whole: float) -> None:
        """The small batch: this rank's gradient, before any other is added to it.

        Args:
            index: of the micro-batch on this rank, from 0.
            engine: whose parameters hold the gradient of the summed loss / `whole`, times ranks and loss scale.
            own: what this rank's micro-batches up to this one hold of the step's denominator.
            whole: the step's denominator.
        """
        if index:
            return
        self._whole = whole
        self._small = (0.0, 0.0)  # a rank without documents in this micro-batch knows nothing
        if own:
            scale = engine.mesh.gradient_size * engine.loss_scale / whole
            self._small = (_squared_norm(engine) / (scale * own) ** 2, 1.0 / own)

    @torch.no_grad()
    def gradient(self, step: int, engine: ModelEngine) -> Mapping[str, float]:
        """Take this step into the running means.

        Raises:
            ValueError: each rank has one micro-batch, so that there was no gradient but the whole step's.
        """
        if self._small is None:
            raise ValueError(needs_two_micro_batches(1))
        square, inverse = self._small
        squares, inverses, ranks = engine.world.sum([square, inverse, float(inverse > 0)])
        whole_square, whole_inverse = _squared_norm(engine), 1.0 / max(self._whole, 1.0)
        if ranks and math.isfinite(squares + whole_square):  # else it overflowed in fp16
            self._take(
                squares / ranks - whole_square, inverses / ranks - whole_inverse, whole_square, whole_inverse
            )
        noise = self._noise()
        return {} if noise is None else {"gradient_noise": noise}

    def _take(self, *values: float) -> None:
        self.steps += 1
        share = (1 - self.decay) / (1 - self.decay**self.steps)
        for name, value in zip(self._means, values, strict=True):
            self._means[name] += share * (value - self._means[name])

    def _noise(self) -> float | None:
        means = self._means
        if not means["inverses"] > 0:
            return None  # in every step all targets stood in one micro-batch
        trace = means["squares"] / means["inverses"]
        square = means["whole_square"] - trace * means["whole_inverse"]
        return trace / square if min(trace, square) > 0 else None

    def state(self) -> dict[str, Any]:
        """The running means."""
        return {"steps": self.steps, "means": dict(self._means)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state()` gave."""
        self.steps = int(state["steps"])
        self._means = {name: float(state["means"][name]) for name in self._means}


def needs_two_micro_batches(micro_batches: int) -> str:
    """The message of an error: the noise is seen in the difference between a micro-batch and the step."""
    return (
        f"log.gradient_noise=true compares a micro-batch with its whole step, but each rank has {micro_batches} a step:"
        " set plan.packs_per_step to at least twice the number of processes"
    )


def _squared_norm(engine: ModelEngine) -> float:
    gradients = [tensor.grad for tensor in trainable(engine).values() if tensor.grad is not None]
    return float(_norms(gradients).square().sum()) if gradients else 0.0
