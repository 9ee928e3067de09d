"""The matmul peak of a device: what MFU is a share of."""

from __future__ import annotations

import time

import torch

PUBLISHED_TFLOPS: dict[str, float] = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "MI300X": 1307.0,
}
"""Dense bf16 peaks from the vendors' data sheets, TFLOP/s, looked up by a part of the device's name."""


def published_peak(name: str, dtype: torch.dtype) -> float:
    """FLOP/s that the vendor states for a GPU in bf16; 0 when the device or precision is not listed."""
    if dtype != torch.bfloat16:
        return 0.0
    return next((1e12 * peak for key, peak in PUBLISHED_TFLOPS.items() if key in name), 0.0)


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.4, size: int = 0) -> float:
    """FLOP/s of one device: as published for known GPUs, else the best of repeated square matmuls.

    Args:
        device: where to measure.
        dtype: of both factors.
        seconds: how long to measure, at most.
        size: rows and columns; 0 = 768 on a CPU, 8192 on a GPU.
    """
    if device.type == "cuda":
        published = published_peak(torch.cuda.get_device_name(device), dtype)
        if published:
            return published
    n = size or (8192 if device.type == "cuda" else 768)
    # Its own generator: measuring must not move the random numbers of the run.
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
