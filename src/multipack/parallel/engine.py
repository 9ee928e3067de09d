"""One `Engine` for the trainer, whatever the strategy: the only place that knows how they are applied."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from multipack.parallel.replicate import ReplicatedEngine, StepResult
from multipack.parallel.world import World


@dataclass
class ParallelConfig:
    """How the ranks of the world share the work."""

    data: Literal["ddp"] = "ddp"
    """Data parallel strategy: `ddp` keeps the whole model on every rank."""
    timeout_seconds: float = 600.0
    """Seconds that a collective waits for a missing rank before it raises."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.timeout_seconds <= 0:
            raise ValueError(f"parallel.timeout_seconds must be positive, got {self.timeout_seconds}")

    @property
    def sync(self) -> Literal["step", "micro", "pipeline"]:
        """When ranks meet, which is what the planner balances for: DDP synchronizes once a step."""
        return "step"


class Engine(Protocol):
    """What the trainer's loop needs: pipelines, shards and plain loops look alike behind it."""

    @property
    def world(self) -> World:
        """The ranks."""
        ...

    @property
    def overflowed(self) -> bool:
        """Whether the gradient of this step left fp16's range, so that the step cannot be applied."""
        ...

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by until `unscale`."""
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        denominator: float,
        watch: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Accumulate the gradient of the summed loss divided by `denominator`."""
        ...

    def unscale(self) -> None:
        """Make the accumulated gradient what it is without `loss_scale`."""
        ...

    def clip(self, max_norm: float) -> float:
        """Clip by the global norm; return that norm."""
        ...

    def step(self, learning_rate: float) -> None:
        """Apply the optimizer and clear the gradient."""
        ...

    def discard(self) -> None:
        """Clear the gradient without applying it."""
        ...

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """The model to evaluate with: eval mode, no gradients, the run's precision."""
        ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Named tensors of model and optimizer."""
        ...

    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over named tensors."""
        ...


def build_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    config: ParallelConfig,
    dtype: torch.dtype,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """Apply the configured strategies to `model` in their fixed order and return the engine."""
    strategies = {"ddp": ReplicatedEngine}
    return strategies[config.data](model, optimizer, world, dtype, clock)
