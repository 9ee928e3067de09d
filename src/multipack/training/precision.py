"""The dtype of forward passes, the matmul peak of a device (the reference of MFU), TF32, and deterministic runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multipack.parallel.world import World
from multipack.training.settings import DtypeName

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of `train.dtype`."""

# fmt: off
PUBLISHED_TFLOPS: dict[str, float] = {
    "A100": 312.0, "A800": 312.0, "A30": 165.0, "A10": 125.0, "A10G": 70.0, "A40": 149.7,
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H800": 989.0, "H20": 148.0,
    "H200 NVL": 835.0, "H200": 989.0, "GH200": 989.0,
    "B200": 2250.0, "GB200": 2500.0, "B300": 2250.0, "GB300": 2500.0,
    "L4": 121.0, "L20": 119.5, "L40": 181.0, "L40S": 362.0, "RTX A6000": 154.8, "RTX 6000 Ada": 364.2,
    "RTX 3090": 71.2, "RTX 4090": 165.2, "RTX 5090": 209.5,
    "MI210": 181.0, "MI250X": 191.5, "MI250": 181.0, "MI300A": 980.6, "MI300X": 1307.4, "MI325X": 1307.4,
    "MI350X": 2306.9, "MI355X": 2516.6,
}
# fmt: on
"""Dense bf16 peaks with float32 sums, TFLOP/s, by words of the device's name; the first match counts.

From the vendors' data sheets, half of the values "with sparsity": NVIDIA's for A10, A30, A40, A100, H100, H200, H20,
L4, L40, L40S, RTX A6000, RTX 6000 Ada, GH200, HGX B200 and B300, GB200 and GB300 NVL72 (per GPU), its architecture
papers on GA102, Ada and Blackwell for GeForce; AMD's for Instinct MI210 to MI355X. torch shows each half of an MI250X
as a device.
"""

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that makes cuBLAS deterministic; the command line sets a default."""


def resolve_dtype(name: DtypeName, device: torch.device) -> DtypeName:
    """Name of the dtype of forward passes: `auto` is bf16 on a GPU that computes it natively, else fp32.

    On a CPU, casts cost more than products save where a model is small, and no default may depend on measured times.
    """
    if name != "auto":
        return name
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp32"


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.4, size: int = 0) -> float:
    """Peak FLOP/s of one device: published for bf16 on known GPUs, else the fastest of repeated square matmuls.

    No matmul starts after `seconds`. Matrices have `size` rows; 0 = 256, 512 and 768 in turn on a CPU, 8192 on a GPU.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        published = [peak for key, peak in PUBLISHED_TFLOPS.items() if re.search(rf"\b{key}\b", name)]
        if published and "Laptop" not in name:  # slower chips of the same name
            return 1e12 * published[0]
    # Where other processes compute too, a short product is often the only one that nothing interrupts.
    sizes = [size] if size else [8192] if device.type == "cuda" else [256, 512, 768]
    # A separate generator: measuring must not change the run's random numbers.
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(sizes[-1], sizes[-1], generator=generator).to(device, dtype)
    squares = [square[:n, :n].contiguous() for n in sizes]
    for each in squares:
        torch.mm(each, each)
    best, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for each in squares:
            began = time.perf_counter()
            torch.mm(each, each)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = max(best, 2.0 * len(each) ** 3 / (time.perf_counter() - began))
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


@contextmanager
def exact_float32() -> Iterator[None]:
    """Context without TF32: float32 matrix products on GPUs keep all 23 bits of the mantissa."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
