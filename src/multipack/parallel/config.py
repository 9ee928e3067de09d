"""`ParallelConfig`: how the ranks of a run share the work, and which combinations there are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from multipack.shapes import ModelShape

Data = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
ContextMethod = Literal["ulysses", "ring"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
STAGES_OF_RANK = 2
"""Stages that every rank of an interleaved pipeline holds."""


@dataclass
class ParallelConfig:
    """How the ranks of the world share the work.

    World size = pipeline × data-parallel ranks × context × tensor; data-parallel ranks are what is left of it.
    """

    data: Data = "ddp"
    """What data-parallel ranks divide: nothing, optimizer state, gradients too, parameters too, or these in groups."""
    replicate: int = 0
    """Groups of data-parallel ranks that hold the same shards, for parallel.data=hsdp; 0 = 2."""
    tensor: int = 1
    """Ranks that divide every matrix and the vocabulary; neighbors, best within one host."""
    context: int = 1
    """Ranks that divide the tokens of every pack."""
    context_method: ContextMethod = "ulysses"
    """How they attend to each other's tokens: exchange heads for tokens, or pass keys and values around a ring."""
    pipeline: int = 1
    """Ranks that divide the layers."""
    schedule: Schedule = "1f1b"
    """In which order a pipeline's micro-batches run."""
    offload: Literal["none", "cpu"] = "none"
    """Keep shards of parameters, gradients and optimizer state in host memory (zero2, zero3, hsdp)."""
    timeout_seconds: float = 600.0
    """Seconds that a collective waits for a missing rank before it raises."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, whatever the number of ranks."""
        if self.timeout_seconds <= 0:
            raise ValueError(f"parallel.timeout_seconds must be positive, got {self.timeout_seconds}")
        for name in ("tensor", "context", "pipeline"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} must be at least 1, got {getattr(self, name)}")
        if self.replicate < 0:
            raise ValueError(f"parallel.replicate must not be negative, got {self.replicate}")
        if self.replicate and self.data != "hsdp":
            raise ValueError(
                f"parallel.replicate={self.replicate} is the number of groups of parallel.data=hsdp, and"
                f" parallel.data={self.data} has none: set parallel.data=hsdp, or leave parallel.replicate out"
            )
        if self.offload != "none" and not self.shards_parameters:
            raise ValueError(
                f"parallel.offload={self.offload} moves shards of parameters, and parallel.data={self.data} has none:"
                " set parallel.data=zero3 (or zero2, hsdp), or leave parallel.offload out"
            )

    @property
    def sync(self) -> Literal["step", "micro", "pipeline"]:
        """When data-parallel ranks wait for each other, which is what the planner balances for.

        Shards are gathered for every micro-batch; without shards ranks meet once a step.
        """
        if self.pipeline > 1:
            return "pipeline"
        return "micro" if self.shards_parameters else "step"

    @property
    def shards_parameters(self) -> bool:
        """Whether data-parallel ranks hold shards of parameters."""
        return self.data in ("zero2", "zero3", "hsdp")

    @property
    def keeps_own_gradients(self) -> bool:
        """Whether every rank has the whole gradient of its own micro-batches until ranks synchronize."""
        return not self.shards_parameters and self.model_ranks == 1

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one model and see the same packs."""
        return self.pipeline * self.context * self.tensor

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline * (STAGES_OF_RANK if self.schedule == "interleaved" and self.pipeline > 1 else 1)

    @property
    def token_multiple(self) -> int:
        """What the slots of every pack must be a multiple of: each rank gets as many, a ring's each in two pieces."""
        pieces = 2 if self.context > 1 and self.context_method == "ring" else 1
        return self.context * pieces * self.tensor

    def data_size(self, world_size: int) -> int:
        """Data-parallel ranks of so many.

        Raises:
            ValueError: the world is not a multiple of what one model takes.
        """
        if world_size % self.model_ranks:
            fit = (d for d in range(1, world_size + 1) if world_size % d == 0)
            near = min(fit, key=lambda d: abs(d - self.model_ranks))
            named = [
                f"parallel.{name}={n}"
                for name in ("pipeline", "context", "tensor")
                if (n := getattr(self, name)) > 1
            ]
            count = max(1, round(world_size / self.model_ranks)) * self.model_ranks
            raise ValueError(
                f"{' x '.join(named)}: {self.model_ranks} ranks hold one model, which do not divide the {world_size}"
                f" process{'es' if world_size > 1 else ''} of this run: start {count} processes, or let {near} hold a"
                " model"
            )
        return world_size // self.model_ranks

    def axes(self, world_size: int) -> dict[str, int]:
        """Ranks along every axis of the mesh, outermost first.

        Raises:
            ValueError: they cannot be arranged so.
        """
        data = self.data_size(world_size)
        groups = data
        if self.shards_parameters:
            groups = (self.replicate or 2) if self.data == "hsdp" else 1
        if data % groups:
            near = _nearest_divisor(data, groups)
            raise ValueError(
                f"parallel.replicate={groups} groups of parallel.data=hsdp do not divide the {data} data-parallel ranks"
                f" of this run: use parallel.replicate={near}"
            )
        return {
            "pp": self.pipeline,
            "dp_replicate": groups,
            "dp_shard": data // groups,
            "cp": self.context,
            "tp": self.tensor,
        }

    def text(self, world_size: int) -> str:
        """One line for people: the strategies in effect, outermost first."""
        axes = self.axes(world_size)
        stages = f" ({self.schedule}, {self.stages} stages)"
        named = [f"pipeline {self.pipeline}{stages}"] if self.pipeline > 1 else []
        data = self.data_size(world_size)
        groups = f" in {axes['dp_replicate']} groups" if self.data == "hsdp" else ""
        named.append(
            f"{self.data} {data}{groups}" + (", offloaded to the host" if self.offload == "cpu" else "")
        )
        if self.context > 1:
            named.append(f"context {self.context} ({self.context_method})")
        if self.tensor > 1:
            named.append(f"tensor {self.tensor}")
        return " x ".join(named)

    def check(self, shape: ModelShape, world_size: int, capacity: int) -> None:
        """Refuse a model, a number of processes or a capacity that these settings cannot have.

        To be called before any process group exists.

        Args:
            shape: the decoder; its vocabulary is looked at if it is set.
            world_size: processes of the run.
            capacity: most slots of a pack.

        Raises:
            ValueError: the settings and the nearest legal choice are named.
        """
        self.axes(world_size)
        self._check_heads(shape)
        if self.tensor > 1:
            _divides("parallel.tensor", self.tensor, "model.d_ff", shape.d_ff)
            if shape.vocabulary_size:
                _divides("parallel.tensor", self.tensor, "model.vocabulary_size", shape.vocabulary_size)
        if self.context > 1 and self.context_method == "ring" and shape.window:
            raise ValueError(
                "parallel.context_method=ring passes keys and values of whole documents, and"
                f" model.window={shape.window} sees the last ones only: use parallel.context_method=ulysses"
            )
        if capacity % self.token_multiple:
            below = capacity // self.token_multiple * self.token_multiple
            near = below or self.token_multiple
            raise ValueError(
                f"plan.capacity={capacity} must be a multiple of {self.token_multiple}, so that parallel.context="
                f"{self.context} ({self.context_method}) and parallel.tensor={self.tensor} can divide its slots:"
                f" use plan.capacity={near}"
            )
        if self.stages > shape.layers:
            raise ValueError(
                f"parallel.pipeline={self.pipeline} with parallel.schedule={self.schedule} has {self.stages} stages,"
                f" and model.layers={shape.layers} are fewer: use parallel.pipeline="
                f"{max(1, shape.layers // (self.stages // self.pipeline))}"
            )

    def _check_heads(self, shape: ModelShape) -> None:
        """Tensors divide heads and key heads; Ulysses divides heads again, and copies key heads that are too few."""
        exchanged = self.context if self.context_method == "ulysses" else 1
        named = [f"parallel.tensor={self.tensor}"] if self.tensor > 1 else []
        for name, divided in (("kv_heads", self.tensor), ("heads", self.tensor * exchanged)):
            if name == "heads" and exchanged > 1:
                named.append(f"parallel.context={self.context} (ulysses)")
            heads = getattr(shape, name)
            if heads % divided:
                near = _nearest_divisor(
                    math.gcd(shape.heads, shape.kv_heads) if name == "kv_heads" else heads, divided
                )
                ring = ", or parallel.context_method=ring" if exchanged > 1 and name == "heads" else ""
                raise ValueError(
                    f"{' x '.join(named)} divides heads among {divided} ranks, and model.{name}={heads} is no multiple"
                    f" of that: use {near} ranks{ring}"
                )


def fit_micro_batches(config: ParallelConfig, micro_batches: int) -> int:
    """Micro-batches of a rank that a pipeline can run: at least as many as stages of ranks, in whole rounds.

    Args:
        config: how the ranks share the work.
        micro_batches: what the plan would have.
    """
    if config.pipeline == 1:
        return micro_batches
    wanted = max(micro_batches, config.pipeline)
    if config.schedule == "interleaved":
        wanted = -(-wanted // config.pipeline) * config.pipeline
    return wanted


def _divides(setting: str, ranks: int, name: str, size: int) -> None:
    if size % ranks:
        raise ValueError(
            f"{setting}={ranks} does not divide {name}={size}: use {name}={-(-size // ranks) * ranks}, or"
            f" {setting}={_nearest_divisor(size, ranks)}"
        )


def _nearest_divisor(size: int, wanted: int) -> int:
    fit: Iterable[int] = (n for n in range(1, size + 1) if size % n == 0)
    return min(fit, key=lambda n: abs(n - wanted))
