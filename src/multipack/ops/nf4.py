"""Frozen matrices of 4 bits: NF4 with double quantization (QLoRA: Dettmers et al. 2023, arXiv:2305.14314, section 3).

    W (out, in) ─ rows in blocks of 64 ─┬─ the nearest of 16 levels · absmax ─▶ weight_codes  (out, in / 2) two a byte
                                        └─ absmax (out, in / 64)
                                              └─ − mean, in blocks of 256 ─┬──▶ weight_scales (out, in / 64) a byte each
                                                                           └──▶ weight_steps  mean, and absmax of blocks

The levels are quantiles of a normal distribution, scaled to [−1, 1], with an exact 0. Bytes of `weight_scales` number
the values of the dynamic 8-bit type (Dettmers 2015, arXiv:1511.04561). Values and the order of bytes are as in
bitsandbytes, whose kernel dequantizes on GPUs where it is installed. 4.127 bits a number; 4.5 without double
quantization, where scales are kept in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.ops.quantized import Quantized, positive
from multipack.shapes.formats import FORMATS, NF4_BLOCK, NF4_SCALES_BLOCK, FrozenFormat


def _dynamic() -> Tensor:
    """(256,) values of the signed dynamic 8-bit type, ascending: 7 decades, each with twice the values of the last."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += [*means, *(-each for each in means)]
    return torch.tensor(sorted(values))


# fmt: off
LEVELS = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])
# fmt: on
"""(16,) float32: the values of NF4, as in appendix E of the paper."""
DYNAMIC = _dynamic()
"""(256,) float32: the values of a scale's byte, in steps."""
_PAIRS = torch.stack([LEVELS.repeat_interleave(16), LEVELS.repeat(16)], 1)  # of the halves of a byte


@dataclass(frozen=True)
class Nf4(Quantized):
    """A matrix in NF4, or a rank's part of one.

    `codes` are (rows, columns / 2), and the first of two numbers is in the high half of a byte; `scales` are
    (rows, columns / 64), or (rows, columns / 16) bytes of float32 without double quantization; `steps` are the mean of
    the absmax, and one step for 256 of the whole matrix's scales, in the order of rows; None without it.
    """

    facts: ClassVar[FrozenFormat] = FORMATS["nf4"]

    @classmethod
    @torch.no_grad()
    def quantize(cls, weight: Tensor, double: bool = True) -> Nf4:
        """Quantize a matrix to NF4.

        Args:
            weight: (out, in) matrix; it may be on the meta device.
            double: quantize the scales too.

        Raises:
            ValueError: `in` is not a multiple of 64.
        """
        rows, columns = weight.shape
        if columns % NF4_BLOCK:
            raise ValueError(f"a matrix of {columns} columns has no whole blocks of {NF4_BLOCK} numbers")
        blocks = weight.float().reshape(-1, NF4_BLOCK)
        absmax = blocks.abs().amax(1)
        numbers = _nearest(blocks / positive(absmax)[:, None], LEVELS).view(rows, columns)
        codes = numbers[:, ::2] << 4 | numbers[:, 1::2]
        if not double:
            return cls(codes, absmax.view(rows, -1).view(torch.uint8), None, columns)
        mean = absmax.mean()
        padded = F.pad(absmax - mean, (0, -len(absmax) % NF4_SCALES_BLOCK)).view(-1, NF4_SCALES_BLOCK)
        steps = padded.abs().amax(1)
        scales = _nearest(padded / positive(steps)[:, None], DYNAMIC).view(-1)[: len(absmax)]
        return cls(codes, scales.view(rows, -1), torch.cat([mean[None], steps]).view(torch.uint8), columns)

    @torch.no_grad()
    def to(self, dtype: torch.dtype) -> Tensor:
        """(rows, columns) level · absmax in float32, then rounded."""
        rows, columns = self.codes.shape[0], 2 * self.codes.shape[1]
        absmax = self._absmax()
        if (
            self.codes.is_cuda
            and not torch.compiler.is_compiling()
            and (kernel := _bitsandbytes()) is not None
        ):
            found: Tensor = kernel(
                self.codes.reshape(-1, 1), absmax.reshape(-1), NF4_BLOCK, "nf4", (rows, columns), dtype
            )
            return found
        pairs = F.embedding(self.codes.int(), _on(_PAIRS, self.codes))
        blocks = pairs.view(rows, -1, NF4_BLOCK)
        return blocks.mul_(absmax[..., None]).view(rows, columns).to(dtype)

    def _absmax(self) -> Tensor:
        """(rows, columns / 64) float32 absolute maxima of blocks."""
        assert self.scales is not None
        if self.steps is None:
            return self.scales.view(torch.float32)
        device, width = self.codes.device, self.columns // NF4_BLOCK
        rows = torch.arange(self.scales.shape[0], device=device) + self.first[0]
        columns = torch.arange(self.scales.shape[1], device=device) + self.first[1] // NF4_BLOCK
        steps = self.steps.view(torch.float32)
        index = (rows[:, None] * width + columns) // NF4_SCALES_BLOCK + 1
        return (
            F.embedding(self.scales.int(), _on(DYNAMIC[:, None], self.codes)).squeeze(-1) * steps[index]
            + steps[0]
        )


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """The number of the nearest entry of an ascending table, as uint8."""
    borders = _on((table[1:] + table[:-1]) / 2, values)
    return torch.bucketize(values, borders, out_int32=True).to(torch.uint8)


def _on(table: Tensor, like: Tensor) -> Tensor:
    """A constant table on the device of `like`, without a wait for the device."""
    return table.to(like.device, non_blocking=True)


@cache
def _bitsandbytes() -> Callable[..., Tensor] | None:
    """The kernel of bitsandbytes that dequantizes, where it is installed; before 0.46 it was no operator."""
    if find_spec("bitsandbytes") is None:
        return None
    import bitsandbytes  # noqa: F401 - registers its operators

    found = getattr(torch.ops.bitsandbytes, "dequantize_4bit", None)
    kernel: Callable[..., Tensor] | None = None if found is None else found.default
    return kernel
