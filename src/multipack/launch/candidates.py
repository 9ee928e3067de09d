"""Ways to share a training step among devices: which there are, what each needs, and how long a step takes about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from multipack.launch.memory_model import (
    FLOAT32,
    Dtype,
    Memory,
    Recompute,
    memory,
)
from multipack.launch.traffic import Traffic, communication
from multipack.parallel.parallel_config import ContextMethod, Data, ParallelConfig, Schedule
from multipack.parallel.stages import bubble, fit_micro_batches, stage_imbalance
from multipack.planning.cost import CostModel
from multipack.shapes import ModelShape

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""From the fastest to the smallest."""
SELECTIVE_SLOWDOWN = 1.03
"""Assumed: norms, rotations and activations again. Between 1 and the 1.04 of Korthikanti et al. 2022, table 4."""
BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's time: two products of three."""
HOST_LINK = 20e9
"""Assumed bytes a second between a device and its host's memory."""
HOST_MEMORY = 20e9
"""Assumed bytes a second of host memory for each device: AdamW on the host reads and writes 28 bytes a parameter."""
SHORTEST_SHARE = 512
"""Fewest slots of a pack that a rank is given of it."""


@dataclass(frozen=True)
class Setting:
    """What is trained on what.

    Attributes:
        shape: the decoder, with its vocabulary.
        devices: ranks.
        devices_per_host: neighbors with the faster link.
        usable: bytes of a device that are planned for.
        capacity: slots of a pack.
        packs: of a step, over all devices.
        dtype: of products.
        document_tokens: of a usual document, for FLOPs.
        flops: that a device reaches in products, a second.
        host_bandwidth: bytes a second that a device sends to others of its host.
        network_bandwidth: likewise, to other hosts.
    """

    shape: ModelShape
    devices: int
    devices_per_host: int
    usable: float
    capacity: int
    packs: int
    dtype: Dtype
    document_tokens: int
    flops: float
    host_bandwidth: float
    network_bandwidth: float

    def bandwidth(self, traffic: Traffic) -> float:
        """Bytes a second of the slowest link that takes part."""
        inside = traffic.reach <= self.devices_per_host and self.devices_per_host % traffic.reach == 0
        return (
            self.host_bandwidth if inside or self.devices <= self.devices_per_host else self.network_bandwidth
        )


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        setting: what on what.
        config: how ranks share the work.
        recompute: which activations are computed again.
    """

    setting: Setting
    config: ParallelConfig
    recompute: Recompute

    @cached_property
    def micro_batches(self) -> int:
        """Packs of a rank in a step; a pipeline may need more than were asked for."""
        data = self.config.data_size(self.setting.devices)
        return fit_micro_batches(self.config, -(-self.setting.packs // data))

    @property
    def packs(self) -> int:
        """Packs of a step."""
        return self.micro_batches * self.config.data_size(self.setting.devices)

    @cached_property
    def memory(self) -> Memory:
        """Bytes of the rank that needs most."""
        one = self.setting
        return memory(
            one.shape,
            self.config,
            one.devices,
            one.capacity,
            one.dtype,
            self.recompute,
            self.micro_batches,
        )

    @property
    def fits(self) -> bool:
        """Whether a device holds it."""
        return self.memory.peak <= self.setting.usable

    @cached_property
    def traffic(self) -> list[Traffic]:
        """What a rank exchanges in a step."""
        one = self.setting
        return communication(
            one.shape,
            self.config,
            one.devices,
            one.capacity,
            one.dtype,
            self.recompute,
            self.micro_batches,
        )

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(each.sent for each in self.traffic)

    @cached_property
    def compute_seconds(self) -> float:
        """Of a step on a rank, if it never waits."""
        one = self.setting
        full, rest = divmod(one.capacity, min(one.document_tokens, one.capacity))
        lengths = [min(one.document_tokens, one.capacity)] * full + [rest] * (rest > 0)
        cost = CostModel.from_shape(one.shape, recompute="full" if self.recompute == "full" else "flash")
        slower = SELECTIVE_SLOWDOWN if self.recompute == "selective" else 1.0
        return (
            slower * self.micro_batches * cost.executed_flops(lengths) / (self.config.model_ranks * one.flops)
        )

    @cached_property
    def busy_seconds(self) -> float:
        """The same with what pipelines wait for: stages that cost more, and filling and draining."""
        dearest = stage_imbalance(self.setting.shape, self.config)
        return self.compute_seconds * dearest / (1 - bubble(self.config, self.micro_batches))

    @cached_property
    def exchange_seconds(self) -> dict[str, float]:
        """Time on links, by the setting that asks for it; partly while ranks compute."""
        found: dict[str, float] = {}
        for each in self.traffic:
            seconds = each.sent / self.setting.bandwidth(each)
            found[each.method] = found.get(each.method, 0.0) + seconds
        return found

    @cached_property
    def step_seconds(self) -> float:
        """Of a step, about.

        Tensor and context parallelism wait for what they exchange. Shards are gathered and scattered while other blocks
        compute; what is reduced once a step can hide behind the last backward pass alone; zero1's new values and what
        is offloaded come after it.
        """
        exposed, behind_all, behind_last = self._offload_seconds(), 0.0, 0.0
        for each in self.traffic:
            seconds = each.sent / self.setting.bandwidth(each)
            if each.method in ("tensor", "context") or each.kind == "broadcast":
                exposed += seconds
            elif each.kind == "all_reduce":
                behind_last += seconds
            else:
                behind_all += seconds
        last = BACKWARD_SHARE * self.busy_seconds / self.micro_batches
        return max(self.busy_seconds, behind_all) + max(0.0, behind_last - last) + exposed

    def _offload_seconds(self) -> float:
        if self.config.offload == "none":
            return 0.0
        held = self.memory.host / (4 * FLOAT32)  # elements
        moved = 3 * self.micro_batches * FLOAT32 * held  # to the device twice, its gradients back
        return moved / HOST_LINK + 28 * held / HOST_MEMORY

    @property
    def tokens_per_second(self) -> float:
        """Slots of all devices a second."""
        return self.packs * self.setting.capacity / self.step_seconds

    @property
    def name(self) -> str:
        """Short: `zero3 tp=2 ring=4 pp=2×2` (two stages a rank: interleaved), `zero3+cpu` (offloaded), `tp=8` (ddp)."""
        config = self.config
        word = f"hsdp/{config.replicate or 2}" if config.data == "hsdp" else config.data
        words = [word + ("+cpu" if config.offload == "cpu" else "")]
        words += [f"tp={config.tensor}"] if config.tensor > 1 else []
        divided = "ring" if config.context_method == "ring" else "cp"
        words += [f"{divided}={config.context}"] if config.context > 1 else []
        twice = f"×{config.stages // config.pipeline}" if config.schedule == "interleaved" else ""
        words += [f"pp={config.pipeline}{twice}"] if config.pipeline > 1 else []
        return " ".join(words[1:] if words[0] == "ddp" and len(words) > 1 else words)

    @property
    def words(self) -> list[str]:
        """What `multipack train` takes: of parallel and recomputation."""
        usual = ParallelConfig()
        names = (
            "data",
            "replicate",
            "tensor",
            "context",
            "context_method",
            "pipeline",
            "schedule",
            "offload",
        )
        said = [
            f"parallel.{name}={getattr(self.config, name)}"
            for name in names
            if getattr(self.config, name) != getattr(usual, name)
        ]
        return [*(said or ["parallel.data=ddp"]), f"train.recompute={self.recompute}"]

    @property
    def complexity(self) -> int:
        """How far it is from the usual: axes, then stages of ZeRO, then ways of an axis that are no default."""
        config = self.config
        axes = sum(ranks > 1 for ranks in (config.tensor, config.context, config.pipeline))
        stage = ("ddp", "zero1", "zero2", "zero3", "hsdp").index(config.data)
        unusual = (config.context_method == "ring") + (config.schedule == "interleaved")
        return 1000 * (config.offload == "cpu") + 100 * axes + 10 * stage + unusual

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: bytes and seconds."""
        held = {name: value for name, value in vars(self.memory).items() if name != "instants"}
        return {
            "name": self.name,
            "words": self.words,
            "recompute": self.recompute,
            "micro_batches": self.micro_batches,
            "fits": self.fits,
            "memory": {**held, "instants": self.memory.instants, "peak": self.memory.peak},
            "traffic": [{**vars(each), "sent": each.sent} for each in self.traffic],
            "compute_seconds": self.compute_seconds,
            "busy_seconds": self.busy_seconds,
            "exchange_seconds": self.exchange_seconds,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def leanest_that_fits(setting: Setting, config: ParallelConfig) -> Candidate:
    """The candidate with the least recomputation that fits; with the most, where none does."""
    tried = [Candidate(setting, config, recompute) for recompute in RECOMPUTE]
    return next((each for each in tried if each.fits), tried[-1])


def check(setting: Setting, config: ParallelConfig) -> None:
    """Refuse what a run would refuse.

    Raises:
        ValueError: the settings and the nearest legal choice.
    """
    config.check(setting.shape, setting.devices, setting.capacity)
    config.check_dtype(setting.dtype, setting.devices)


def configurations(setting: Setting) -> Iterator[ParallelConfig]:
    """All that a run would take and that make sense: tensors within a host, shares of packs of 512 slots at least."""
    devices, host = setting.devices, setting.devices_per_host
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for tensor in (size for size in sizes if size <= host and host % size == 0):
        for context in (size for size in sizes if setting.capacity // size >= SHORTEST_SHARE or size == 1):
            for pipeline in (size for size in sizes if size <= setting.shape.layers):
                if devices % (tensor * context * pipeline):
                    continue
                for form in _forms(tensor, context, pipeline):
                    yield from _legal(setting, form)


def _forms(tensor: int, context: int, pipeline: int) -> Iterator[ParallelConfig]:
    """Both ways to divide tokens, and both schedules."""
    usual = ParallelConfig(tensor=tensor, context=context, pipeline=pipeline)
    methods: list[ContextMethod] = ["ulysses", "ring"] if context > 1 else ["ulysses"]
    schedules: list[Schedule] = ["1f1b", "interleaved"] if pipeline > 1 else ["1f1b"]
    for context_method in methods:
        for schedule in schedules:
            yield replace(usual, context_method=context_method, schedule=schedule)


def _legal(setting: Setting, form: ParallelConfig) -> Iterator[ParallelConfig]:
    """Each way to divide the state among data-parallel ranks that a run would take."""
    try:
        check(setting, form)
    except ValueError:
        return
    yield form
    data = form.data_size(setting.devices)
    stages: list[Data] = ["zero1"] if data * form.context > 1 else []
    stages += ["zero2", "zero3"] if data * form.context > 1 and setting.dtype != "fp16" else []
    for stage in stages:
        yield replace(form, data=stage)
    if "zero3" in stages:
        yield replace(form, data="zero3", offload="cpu")
        shards = setting.devices_per_host // (form.tensor * form.context)
        if 1 < shards < data and data % shards == 0:
            yield replace(form, data="hsdp", replicate=data // shards)
