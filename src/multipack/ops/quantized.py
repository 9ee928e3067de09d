"""Frozen matrices that are held as bytes, and products with them, in the formats of shapes/formats.py.

    weight    ─┬─ weight_codes   (out, ·)  the numbers           divide by rows, or by columns between blocks
               ├─ weight_scales  (out, ·)  scales of blocks      divide in the same way
               └─ weight_steps   (·,)      of the whole matrix   whole on every tensor-parallel rank
    down_proj ─── down_proj_codes, …       another parameter (ops/experts.py)

All three are uint8, so that no cast to a half-precision dtype changes them; a format (nf4.py, int8.py) says
what their bytes mean. Scales and steps are None in formats without them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from multipack.ops.autocast import in_autocast_dtype
from multipack.shapes.formats import FrozenFormat

_KINDS = ("codes", "scales", "steps")


def part_names(name: str) -> tuple[str, ...]:
    """Names of the parameters that replace one of this name."""
    return tuple(f"{name}_{kind}" for kind in _KINDS)


PARTS = part_names("weight")
"""Names of the parameters that replace a matrix's `weight`."""


def whole_name(part: str, names: Container[str]) -> str | None:
    """The name of the quantized parameter that a part belongs to; None for other parameters.

    Args:
        part: name of a parameter.
        names: names of all parameters.
    """
    name, _, kind = part.rpartition("_")
    return name if kind in _KINDS and part_names(name)[0] in names else None


@dataclass(frozen=True)
class Quantized(ABC):
    """A quantized matrix, or a rank's part of one; each format is a subclass.

    Attributes:
        codes: (rows, columns / facts.per_byte) uint8.
        scales: (rows, ·) uint8 or None.
        steps: (·,) uint8 of the whole matrix, or None.
        columns: of the whole matrix.
        first: row and column of the whole matrix at which this part begins.
        facts: of the format; `codes` have `facts.per_byte` numbers in a byte.
    """

    codes: Tensor
    scales: Tensor | None
    steps: Tensor | None
    columns: int
    first: tuple[int, int] = (0, 0)
    facts: ClassVar[FrozenFormat]

    @classmethod
    @abstractmethod
    def quantize(cls, weight: Tensor, double: bool = True) -> Self:
        """Quantize an (out, in) matrix, which may be on the meta device; `double`: the scales too, if it has blocks."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Tensor:
        """(rows, columns) the dequantized matrix, without gradient."""

    def part(self, name: str) -> Tensor:
        """One of the three parts, by the name of its parameter."""
        found: Tensor = getattr(self, name.rpartition("_")[2])
        return found

    @property
    def device(self) -> torch.device:
        """Device of its bytes."""
        return self.codes.device

    def __getitem__(self, rows: slice) -> Self:
        """Some of the rows, by a slice with a start."""
        scales = None if self.scales is None else self.scales[rows]
        first = (self.first[0] + rows.start, self.first[1])
        return replace(self, codes=self.codes[rows], scales=scales, first=first)


def held_parts(module: nn.Module, name: str, kind: type[Quantized], columns: int) -> Quantized:
    """The quantized matrix that a module holds in place of its parameter of this name."""
    # FSDP2 of torch 2.11 gathers bytes in bfloat16, which holds them exactly; 2.13 leaves them as they are.
    parts = (getattr(module, part, None) for part in part_names(name))
    codes, scales, steps = (cast(Tensor, None if each is None else each.to(torch.uint8)) for each in parts)
    return kind(codes, scales, steps, columns)


def linear(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; a quantized matrix is dequantized in each pass, and never saved."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    place = (weight.columns, weight.first)
    out: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        in_autocast_dtype(x), weight.codes, weight.scales, weight.steps, type(weight), place
    )
    return out if bias is None else out + bias.to(out.dtype)


class _Product(torch.autograd.Function):
    """x Wᵀ of a quantized W in the dtype of x; only the bytes of W are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        steps: Tensor | None,
        kind: type[Quantized],
        place: tuple[int, tuple[int, int]],
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, steps)
        ctx.kind, ctx.place = kind, place
        return F.linear(x, kind(codes, scales, steps, *place).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.kind(*ctx.saved_tensors, *ctx.place)
        return gradient @ weight.to(gradient.dtype), None, None, None, None, None


def positive(values: Tensor) -> Tensor:
    """Values as divisors: rows and blocks of zeros stay zeros."""
    return values.clamp(min=torch.finfo(values.dtype).tiny)
