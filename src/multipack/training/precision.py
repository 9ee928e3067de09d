"""The dtype of forward passes, the matmul peak of a device (the reference of MFU), and deterministic runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multipack.parallel.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of `train.dtype`."""

PUBLISHED_TFLOPS: dict[str, float] = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "MI300X": 1307.0,
}
"""Dense bf16 peaks from vendors' data sheets, TFLOP/s, by a part of the device's name; the first match counts."""

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that makes cuBLAS deterministic; the command line sets a default."""


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of forward passes: `auto` is bf16 if the device computes it natively."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # torch has only private functions for this; if they are missing, fp32 is always correct.
        checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        native = any(getattr(torch.cpu, name, lambda: False)() for name in checks)
    return torch.bfloat16 if native else torch.float32


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.4, size: int = 0) -> float:
    """Peak FLOP/s of one device: published for bf16 on known GPUs, else the fastest of repeated square matmuls.

    Args:
        device: where to measure.
        dtype: dtype of the matrices.
        seconds: time after which no further matmul starts.
        size: rows and columns of the matrices; 0 = 768 on a CPU, 8192 on a GPU.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        published = [peak for key, peak in PUBLISHED_TFLOPS.items() if key in name]
        if published:
            return 1e12 * published[0]
    n = size or (8192 if device.type == "cuda" else 768)
    # A separate generator: measuring must not change the run's random numbers.
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(n, n, generator=generator).to(device, dtype)
    b = torch.randn(n, n, generator=generator).to(device, dtype)
    torch.mm(a, b)
    best, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2.0 * n**3 / (time.perf_counter() - began))
    return best


def mean_peak(world: World, dtype: torch.dtype, seconds: float = 0.4) -> float:
    """Mean over ranks of the matmul peak, measured simultaneously, because ranks on one CPU share it; collective."""
    world.barrier()
    return world.sum([matmul_peak(world.device, dtype, seconds)])[0] / world.size


@contextmanager
def deterministic(wanted: bool, device: torch.device) -> Iterator[None]:
    """Context in which torch uses only deterministic kernels, if `wanted`; operations without one raise an error.

    A CPU run repeats bit for bit with the same number of threads, a GPU run on the same device and libraries.

    Raises:
        ValueError: cuBLAS was loaded without its deterministic setting.
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
