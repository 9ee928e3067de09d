"""Frozen experts of models of transformers, which hold the matrices of all experts of a layer in one parameter.

    down_proj (experts, rows, columns)  ─▶  down_proj_codes (experts · rows, ·), down_proj_scales, down_proj_steps

They are quantized like the matrices of linear layers, by rows of the last dimension. A layer's matrices are dequantized
for its forward pass, in which the model's own code reads them under their names, and freed after it: the backward pass
dequantizes the rows that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from multipack.ops.autocast import autocast_dtype
from multipack.ops.quantized import Quantized, held_parts


def expert_matrices(module: nn.Module) -> list[str]:
    """Names of a module's own parameters that hold a matrix of each expert."""
    experts = getattr(module, "num_experts", None)
    return [
        name
        for name, each in module.named_parameters(recurse=False)
        if each.dim() == 3 and len(each) == experts
    ]


class QuantizedExperts(nn.Module):
    """Experts with quantized matrices; `quantized_experts` turns a module of experts into it.

    Attributes:
        formats: name of a parameter that was quantized → its format and its shape.
        recomputed: whether activation checkpointing recomputes the forward pass, and so keeps nothing of it.
    """

    formats: dict[str, tuple[type[Quantized], torch.Size]]
    recomputed: bool = False

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        """The forward pass of the model's code."""
        dtype = autocast_dtype(x)
        whole = {
            name: self._quantized(name).to(dtype).view(shape) for name, (_, shape) in self.formats.items()
        }
        names = {each.untyped_storage().data_ptr(): name for name, each in whole.items()}

        def pack(saved: Tensor) -> Any:
            name = names.get(saved.untyped_storage().data_ptr())
            return saved if name is None else (name, saved.shape, saved.stride(), int(saved.storage_offset()))

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._view(dtype, *packed)

        self.__dict__.update(whole)
        try:
            # Hooks replace the hooks of activation checkpointing, which would keep what it has to recompute.
            with nullcontext() if self.recomputed else saved_tensors_hooks(pack, unpack):
                return super().forward(x, *more, **named)
        finally:
            for name in whole:
                del self.__dict__[name]

    def _quantized(self, name: str) -> Quantized:
        kind, shape = self.formats[name]
        return held_parts(self, name, kind, shape[-1])

    def _view(
        self, dtype: torch.dtype, name: str, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> Tensor:
        """A view of dequantized matrices, of which only the rows that it covers are dequantized."""
        columns = self.formats[name][1][-1]
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        first = offset // columns
        rows = self._quantized(name)[first : last // columns + 1].to(dtype)
        return rows.as_strided(shape, strides, offset - first * columns)


def quantized_experts(module: nn.Module) -> QuantizedExperts:
    """The module as `QuantizedExperts`, at first with nothing quantized."""
    if not isinstance(module, QuantizedExperts):
        kind = type(module)
        module.__class__ = type(kind.__name__, (QuantizedExperts, kind), {})
        cast(QuantizedExperts, module).formats = {}
    return cast(QuantizedExperts, module)
