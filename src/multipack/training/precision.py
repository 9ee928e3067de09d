"""The precision of forward passes, the matmul peak in it, and runs that are equal to the last bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from multipack.parallel.world import World
from multipack.training.peak import matmul_peak

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `train.dtype` names."""

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable that makes cuBLAS's results repeatable; the command line sets it where nobody else has."""


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


@contextmanager
def deterministic(wanted: bool, device: torch.device) -> Iterator[None]:
    """A context in which torch uses only kernels whose results never differ between runs, if that is `wanted`.

    An operation that has no such kernel raises. On a CPU a run is repeated to the last bit with as many threads as
    before; on a GPU, on one of the same kind with the same libraries.

    Raises:
        ValueError: cuBLAS was not told to be deterministic before it was loaded.
    """
    if not wanted:
        yield
        return
    if device.type == "cuda" and os.environ.get(WORKSPACE) not in (":4096:8", ":16:8"):
        raise ValueError(
            f"train.deterministic=true on a GPU needs {WORKSPACE}=:4096:8 in the environment, which cuBLAS reads"
            " before the run begins"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
