"""`AdviseRequest`: what is to be trained and on what, as a user says it, and in plain numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Literal

from multipack.launch.candidates import Setting
from multipack.launch.memory_model import Dtype
from multipack.shapes import SHAPES, ModelShape

LINKS = {"fast": (300.0, 40.0), "slow": (20.0, 1.25)}
"""GB a second that a device sends, assumed: within its host (NVLink; PCIe), and to another host (400 Gbit/s InfiniBand
for each device; 100 Gbit/s Ethernet for eight), as far as collectives reach it."""
TERAFLOPS = {"bf16": 400.0, "fp16": 400.0, "fp32": 200.0}
"""10^12 FLOP a second that a device reaches in products, assumed: 40 % of an H100's peak (fp32: as TF32)."""
UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


@dataclass
class AdviseRequest:
    """What is to be trained, and on what."""

    devices: int = 8
    """Devices (processes) of the run."""
    devices_per_host: int = 8
    """Devices of a host, which have the faster link to each other."""
    memory: str = "80GiB"
    """Memory of a device: a number and GiB, GB, MiB, MB or TiB."""
    link: Literal["fast", "slow"] = "fast"
    """Links: fast is NVLink and InfiniBand, slow is PCIe and shared Ethernet; the numbers used are printed."""
    capacity: int = 8192
    """Slots of a pack, which holds the longest document: plan.capacity."""
    micro_batches: int = 4
    """Packs of a step for each device; a step has devices times as many, however they are shared."""
    dtype: Dtype = "bf16"
    """Precision of forward passes: train.dtype."""
    document_tokens: int = 1024
    """Tokens of a usual document: what attention costs depends on it."""
    reserve: float = 0.1
    """Share of the memory that is left for the allocator, CUDA and NCCL."""
    teraflops: float = 0.0
    """10^12 FLOP a second that a device reaches in matrix products; 0 = 400 in bf16 and fp16, 200 in fp32."""
    host_bandwidth: float = 0.0
    """GB a second that a device sends to others of its host; 0 = as link says."""
    network_bandwidth: float = 0.0
    """GB a second that a device sends to other hosts; 0 = as link says."""
    model: ModelShape = field(default_factory=lambda: SHAPES["llama-8b"])

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, least in (
            ("devices", 1),
            ("devices_per_host", 1),
            ("capacity", 2),
            ("micro_batches", 1),
            ("document_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("teraflops", "host_bandwidth", "network_bandwidth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}; 0 = the usual one")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve must be in [0, 1), got {self.reserve}")
        self.devices_per_host = min(self.devices_per_host, self.devices)
        if self.devices % self.devices_per_host:
            near = max(1, round(self.devices / self.devices_per_host)) * self.devices_per_host
            raise ValueError(
                f"devices={self.devices} are no whole hosts of devices_per_host={self.devices_per_host}: use"
                f" devices={near}, or another devices_per_host"
            )
        read_size("memory", self.memory)

    def setting(self) -> Setting:
        """The same in plain numbers.

        Raises:
            ValueError: a model that the decoder does not build, or whose vocabulary is not known.
        """
        shape = self.model
        for name in ("experts", "kv_rank"):
            if getattr(shape, name):
                raise ValueError(
                    f"model.{name}={getattr(shape, name)}: this model serves planning only, and is not trained here:"
                    " choose one without experts and latent attention"
                )
        if not shape.vocabulary_size:
            raise ValueError(
                "model.vocabulary_size=0 means the tokenizer's own size, which is not known here, and embeddings and"
                " logits need memory: say model.vocabulary_size=50257, or whatever it is"
            )
        if (
            self.capacity > shape.context
            and shape.positions == "learned"
            and self.document_tokens > shape.context
        ):
            raise ValueError(
                f"document_tokens={self.document_tokens} exceeds the model's table of learned positions,"
                f" model.context={shape.context}: shorten documents, or raise model.context"
            )
        inside, outside = LINKS[self.link]
        return Setting(
            shape=shape,
            devices=self.devices,
            devices_per_host=self.devices_per_host,
            usable=(1 - self.reserve) * read_size("memory", self.memory),
            capacity=self.capacity,
            packs=self.devices * self.micro_batches,
            dtype=self.dtype,
            document_tokens=self.document_tokens,
            flops=1e12 * (self.teraflops or TERAFLOPS[self.dtype]),
            host_bandwidth=1e9 * (self.host_bandwidth or inside),
            network_bandwidth=1e9 * (self.network_bandwidth or outside),
        )


def read_size(name: str, text: str) -> int:
    """`80GiB`, `141 GB` → bytes.

    Raises:
        ValueError: no number with a unit, or nothing.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", text.strip())
    size = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if size < 1:
        raise ValueError(f"{name}={text} is no size: write a number and its unit, such as {name}=80GiB")
    return size


def model_words(shape: ModelShape) -> list[str]:
    """The words of `multipack train` for a model: a preset, and what differs; its vocabulary is the tokenizer's."""

    def differing(other: ModelShape) -> list[str]:
        values = {each.name: getattr(shape, each.name) for each in fields(shape)}
        return [
            f"model.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in values.items()
            if name != "vocabulary_size" and value != getattr(other, name)
        ]

    nearest = min(SHAPES, key=lambda name: len(differing(SHAPES[name])))
    return [f"model={nearest}", *differing(SHAPES[nearest])]
