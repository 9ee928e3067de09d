"""Frozen matrices of 8 bits with one scale a row, as LLM.int8 holds them (Dettmers et al. 2022, arXiv:2208.07339).

    W (out, in) ─┬─ round(127 · W / absmax) ─▶ weight_codes (out, in) a byte each, of two's complement
                 └─ absmax of rows ──────────▶ weight_steps (4 · out,) bytes of float32

8 bits a number and 4 bytes a row. Products are computed in the dtype of activations, which are not quantized: the
paper's products of integers round the activations of each token too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from multipack.ops.quantized import Quantized, positive
from multipack.shapes.formats import FORMATS, FrozenFormat

LARGEST = 127
"""The code of a row's largest number."""


@dataclass(frozen=True)
class Int8(Quantized):
    """A matrix in 8 bits, or a rank's part of one; `steps` are the absmax of the whole matrix's rows."""

    facts: ClassVar[FrozenFormat] = FORMATS["int8"]

    @classmethod
    @torch.no_grad()
    def quantize(cls, weight: Tensor, double: bool = True) -> Int8:
        """Quantize an (out, in) matrix, which may be on the meta device; its scales stay in float32."""
        values = weight.float()
        absmax = values.abs().amax(1)
        codes = (values * (LARGEST / positive(absmax))[:, None]).round().to(torch.int8)
        return cls(codes.view(torch.uint8), None, absmax.view(torch.uint8), weight.shape[1])

    @torch.no_grad()
    def to(self, dtype: torch.dtype) -> Tensor:
        """(rows, columns) code · absmax / 127 in float32, then rounded."""
        assert self.steps is not None
        absmax = self.steps.view(torch.float32)[self.first[0] : self.first[0] + self.codes.shape[0]]
        return self.codes.view(torch.int8).float().mul_((absmax / LARGEST)[:, None]).to(dtype)
