"""`StepResult`: losses of a step's micro-batches on one rank, and the times of their passes on its device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class DeviceClock:
    """Measures time on a device without synchronizing it: by CUDA events on a GPU, by a clock of the host elsewhere."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._is_cuda = device.type == "cuda"
        self._clock = clock

    def mark(self) -> Any:
        """Record the current time: on a GPU as an event in its stream, because the host runs ahead of it."""
        if not self._is_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds between two marks; waits for the second one."""
        if not self._is_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000.0


@dataclass(frozen=True)
class StepResult:
    """Result of the forward and backward passes of a step on one rank; reading a number of it waits for the device.

    Attributes:
        values: (micro-batches,) summed loss of each micro-batch, on the device. If several ranks compute the same loss,
            all but one of them have zeros, so that the sum over all ranks is the step's loss.
        forward, backward: (began, ended) marks of `clock` of all passes; backward passes include the synchronization
            of gradients.
        clock: the clock of the device.
    """

    values: Tensor
    forward: Sequence[tuple[Any, Any]]
    backward: Sequence[tuple[Any, Any]]
    clock: DeviceClock

    @property
    def losses(self) -> list[float]:
        """`values` on the host, in one transfer."""
        losses: list[float] = self.values.tolist()
        return losses

    @property
    def forward_seconds(self) -> float:
        """Time in forward passes."""
        return sum(self.clock.seconds(*marks) for marks in self.forward)

    @property
    def backward_seconds(self) -> float:
        """Time in backward passes."""
        return sum(self.clock.seconds(*marks) for marks in self.backward)

    @property
    def synchronizing_seconds(self) -> float:
        """Time of the last backward pass beyond the pace of the others, over the forward passes of their packs.

        Where only the last pass synchronizes gradients, this is the communication that computing did not hide; NaN with
        one micro-batch.
        """
        forward, backward = (
            [self.clock.seconds(*marks) for marks in passes] for passes in (self.forward, self.backward)
        )
        if len(forward) < 2 or not sum(forward[:-1]):
            return math.nan
        return max(backward[-1] - forward[-1] * sum(backward[:-1]) / sum(forward[:-1]), 0.0)
