"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): n = x · r · w with r = 1 / √(mean x² + ε) for each row.

torch has one kernel for it on a GPU, but on a CPU a dozen differentiable operators, most of them in the backward pass.
Here it is one autograd function, which saves only x and r (g is the gradient of n, d the width of a row):

    p = g · x · r        ∂w = Σ p over rows        ∂x = g · w · r − x · r² / d · Σ p · w over columns
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """`F.rms_norm` of (T, d) rows with (d,) weights, in their dtype."""
    is_exact = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    if x.device.type != "cpu" or x.dim() != 2 or eps is None or not is_exact or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _NormAndGradient.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class RMSNorm(nn.RMSNorm):
    """torch's module with this file's `rms_norm`.

    Attributes:
        function: (x, weight, eps) → (T, d), in place of it; see models/kernels.py.
    """

    function: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, d)."""
        return (self.function or rms_norm)(x, self.weight, self.eps)


class JointRMSNorm(RMSNorm):
    """RMSNorm of all heads together, which tensor parallelism divides."""


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose factor is 1 + weight, as in Gemma; weights start at 0."""

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, d)."""
        if self.function is not None:  # which adds 1
            return self.function(x, self.weight, self.eps)
        return rms_norm(x, self.weight + 1.0, self.eps)


class _NormAndGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=1, keepdim=True).square_()
        inverse = squares.div_(x.shape[1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        out: Tensor = x * inverse
        return out.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        product = (upstream * x).mul_(inverse)
        factor = product.mv(weight)[:, None].mul_(inverse.square()).div_(-x.shape[1])
        return torch.mul(upstream, weight).mul_(inverse).addcmul_(x, factor), product.sum(0), None
