"""`AdviseRequest`: what to train and on which devices, the settings of `multipack advise`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from multipack.parallel.optimizers import OptimizerName
from multipack.ranges import Amount, Positive, Range, Share, check_ranges
from multipack.shapes import SHAPES, ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.words import byte_count

Dtype = Literal["bf16", "fp16", "fp32"]

LINKS = {"fast": (300.0, 40.0), "slow": (20.0, 1.25)}
"""Assumed GB/s that a device sends within its host (NVLink; PCIe) and to other hosts (400 Gbit/s InfiniBand per device;
100 Gbit/s Ethernet for eight), as achieved by collectives."""
TERAFLOPS = {"bf16": 400.0, "fp16": 400.0, "fp32": 200.0}
"""Assumed TFLOP/s of matrix products on a device: 40 % of an H100's peak (fp32: as TF32)."""


@dataclass
class PackSize:
    """The packs of a run."""

    capacity: Annotated[int, Range(2)] = 8192
    """Slots of a pack, at least the longest document."""

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "plan.")


@dataclass
class AdviseRequest:
    """What to train, and on which devices."""

    devices: Positive = 8
    """Number of devices (processes)."""
    devices_per_host: Positive = 8
    """Devices of a host, which share the faster link."""
    memory: str = "80GiB"
    """Memory of a device: a number and GiB, GB, MiB, MB or TiB."""
    host_memory: str = ""
    """Memory of a host for offload, as memory; state that does not fit goes to files. Empty = as much as needed."""
    link: Literal["fast", "slow"] = "fast"
    """fast = NVLink and InfiniBand, slow = PCIe and shared Ethernet; the assumed bandwidths are printed."""
    plan: PackSize = field(default_factory=PackSize)
    micro_batches: Positive = 4
    """Packs per device and step; a step has devices × micro_batches packs under every parallelism."""
    dtype: Dtype = "bf16"
    """Precision of forward passes: train.dtype."""
    optimizer: Literal["auto", OptimizerName] = "auto"
    """optimizer.name; auto = adamw, or adamw_bf16 or adamw_8bit, whose states are smaller, where only these fit."""
    document_tokens: Positive = 1024
    """Tokens of a typical document, which determine the cost of attention."""
    reserve: Share = 0.1
    """Share of the memory reserved for the allocator, CUDA and NCCL."""
    teraflops: Amount = 0.0
    """TFLOP/s of matrix products on a device; 0 = 400 in bf16 and fp16, 200 in fp32."""
    host_bandwidth: Amount = 0.0
    """GB/s that a device sends within its host; 0 = given by link."""
    network_bandwidth: Amount = 0.0
    """GB/s that a device sends to other hosts; 0 = given by link."""
    model: ModelShape = field(default_factory=lambda: SHAPES["llama-8b"])
    adapter: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        """Check ranges, and numbers that go together."""
        check_ranges(self)
        self.devices_per_host = min(self.devices_per_host, self.devices)
        if self.devices % self.devices_per_host:
            near = max(1, round(self.devices / self.devices_per_host)) * self.devices_per_host
            raise ValueError(
                f"devices={self.devices} is not a multiple of devices_per_host={self.devices_per_host}: use"
                f" devices={near}, or another devices_per_host"
            )
        for name in ("memory", *(["host_memory"] if self.host_memory else [])):
            if not byte_count(getattr(self, name)):
                raise ValueError(
                    f"{name}={getattr(self, name)}: write a number and a unit, such as {name}=80GiB"
                )

    @property
    def capacity(self) -> int:
        """Slots of a pack."""
        return self.plan.capacity

    @property
    def usable(self) -> float:
        """Bytes of a device that a run may use."""
        return (1 - self.reserve) * byte_count(self.memory)

    @property
    def usable_on_host(self) -> float:
        """Bytes of a host that offload may use."""
        return (1 - self.reserve) * byte_count(self.host_memory) if self.host_memory else math.inf

    @property
    def speeds(self) -> tuple[float, float, float]:
        """Assumed FLOP/s of a device, and bytes/s that it sends within its host and to other hosts."""
        inside, outside = LINKS[self.link]
        flops = 1e12 * (self.teraflops or TERAFLOPS[self.dtype])
        return flops, 1e9 * (self.host_bandwidth or inside), 1e9 * (self.network_bandwidth or outside)
