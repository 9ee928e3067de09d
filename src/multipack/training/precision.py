"""The precision of forward passes, and the matmul peak in it."""

from __future__ import annotations

from typing import Literal

import torch

from multipack.parallel.world import World
from multipack.training.peak import matmul_peak

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `train.dtype` names."""


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of forward passes: `auto` is bf16 where the device has instructions for it."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # torch has no public word for it; where the private one is missing, fp32 is right everywhere.
        asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        native = any(getattr(torch.cpu, name, lambda: False)() for name in asks)
    return torch.bfloat16 if native else torch.float32


def name_of_dtype(dtype: torch.dtype) -> Literal["fp32", "bf16", "fp16"]:
    """What `train.dtype` calls a precision."""
    return "bf16" if dtype == torch.bfloat16 else "fp16" if dtype == torch.float16 else "fp32"


def mean_peak(world: World, dtype: torch.dtype, seconds: float = 0.4) -> float:
    """Mean over ranks of the matmul peak, measured at the same time: ranks on one CPU share it."""
    world.barrier()
    return world.sum([matmul_peak(world.device, dtype, seconds)])[0] / world.size
