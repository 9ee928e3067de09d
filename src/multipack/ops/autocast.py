"""Dtypes of operations that autocast does not cover: custom operators, and tensors that are sent to other ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would run a matrix product of `x`; its own where autocast is off.

    Like autocast itself, this leaves float64 unchanged.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def in_autocast_dtype(x: Tensor) -> Tensor:
    """`x` in `autocast_dtype(x)`."""
    return x.to(autocast_dtype(x))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: the dtype of sums over half-precision numbers."""
    return torch.float64 if dtype == torch.float64 else torch.float32
