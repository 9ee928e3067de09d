"""torch's pipeline schedules over the stages of one rank.

All use of torch.distributed.pipelining, which is partly private API, is in this module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from multipack.parallel.engine import DeviceClock
from multipack.parallel.parallel_config import Schedule

Autocast = Callable[[], AbstractContextManager[Any]]

_SCHEDULES: dict[Schedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class ScheduledRun:
    """A schedule over this rank's stages, for one number and one size of micro-batches.

    Training and evaluation have one each: torch's buffers differ in whether they require gradients.

    Args:
        stages: number → module of this rank's stages.
        group: the ranks of the pipeline.
        schedule: order of passes.
        hidden: shape and dtype of what stages exchange.
        micro_batches: their number; in evaluation any.
        device: where stages run.
        clock: marks time on that device.
        trains: whether there are backward passes.

    Attributes:
        passes: (stage, micro-batch, kind, began, ended) of the passes of the last step, in their order, without the
            wait for their input: "forward", "backward", or "reduce" with micro-batch −1, which reduces gradients.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        schedule: Schedule,
        hidden: tuple[tuple[int, int], torch.dtype],
        micro_batches: int,
        *,
        device: torch.device,
        clock: DeviceClock,
        trains: bool,
    ) -> None:
        self.hidden, self.count, self.device, self.clock = hidden, micro_batches, device, clock
        self.batches: list[Any] = []
        self.losses: dict[int, Tensor] = {}
        self.passes: list[tuple[int, int, str, Any, Any]] = []
        self.autocast: Autocast = nullcontext
        self.scale = 1.0
        total = dist.get_world_size(group) * len(stages)
        # Under 1f1b stage s has at most `total − s` forward passes whose backward pass is still to come.
        bounded = trains and schedule == "1f1b"
        held = [
            Stage(self, module, number, total, group, bounded=bounded, trains=trains)
            for number, module in stages.items()
        ]
        kind = _SCHEDULES[schedule]
        if not trains:  # these take any number of micro-batches
            kind = ScheduleGPipe if len(held) == 1 else ScheduleLoopedBFS
        loss = self._scaled if trains else None  # without a loss torch's schedules run forward only
        one_or_all: Any = held[0] if len(held) == 1 else held
        self._schedule = kind(one_or_all, micro_batches, loss_fn=loss, scale_grads=False)

    def step(self, batches: list[Any], autocast: Autocast, scale: float) -> list[float]:
        """Run all passes.

        Args:
            batches: micro-batches with the same number of slots, the same packs on every rank of the pipeline.
            autocast: returns the context of forward passes.
            scale: factor of losses before their backward passes.

        Returns:
            Summed losses by micro-batch (not scaled) on the rank of the last stage; zeros elsewhere.
        """
        self.batches, self.autocast, self.scale = batches, autocast, scale
        self.losses, self.passes = {}, []
        # The schedule splits this into its elements: a stage gets the number of the micro-batch beside its input.
        numbers = torch.arange(self.count)
        try:
            self._schedule.step(number=numbers, target=numbers)
        except RuntimeError as error:  # torch wraps what a stage raises
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise
        finally:
            self.batches = []
        return [float(self.losses.get(number, 0.0)) for number in range(self.count)]

    def record(self, stage: int, micro_batch: int, kind: str, began: Any) -> None:
        """Note that a pass has ended."""
        self.passes.append((stage, micro_batch, kind, began, self.clock.mark()))

    def seconds(self, kind: str) -> float:
        """Seconds in passes of a kind in the last step."""
        return sum(self.clock.seconds(began, ended) for *_, each, began, ended in self.passes if each == kind)

    def _scaled(self, loss: Tensor, _: Tensor) -> Tensor:
        return (loss * self.scale).sum()


class Stage(PipelineStage):
    """torch's stage, which takes its batch from the run and declares the shapes it sends and receives."""

    def __init__(
        self,
        run: ScheduledRun,
        module: nn.Module,
        number: int,
        total: int,
        group: dist.ProcessGroup,
        *,
        bounded: bool,
        trains: bool,
    ) -> None:
        shape, dtype = run.hidden
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        loss = torch.empty(1, dtype=exact, device="meta", requires_grad=trains)
        super().__init__(
            module,
            number,
            total,
            run.device,
            input_args=() if number == 0 else (hidden,),
            output_args=(loss,) if number == total - 1 else (hidden,),
            group=group,
        )
        self._run: ScheduledRun = weakref.proxy(run)  # no cycle: buffers are freed with the run
        self._receives = total - number if bounded else run.count
        self._receives_gradients = 2 if bounded else run.count

    def forward_maybe_with_nosync(self, *args: Tensor, number: Tensor) -> Tensor:
        """Call the stage's module with the pack of this number."""
        index = int(number)
        began = self._run.clock.mark()
        with self._run.autocast():
            output: Tensor = super().forward_maybe_with_nosync(self._run.batches[index], *args)  # type: ignore[no-untyped-call]
        if self.is_last:
            self._run.losses[index] = output.detach()
            output = torch.stack([output])  # torch's schedules need a batch dimension that is not a view
        elif (tuple(output.shape), output.dtype) != self._run.hidden:
            raise ValueError(
                f"stage {self.stage_index} of the pipeline gave {tuple(output.shape)} of {output.dtype}, and the next"
                f" one expects {self._run.hidden[0]} of {self._run.hidden[1]}"
            )
        else:
            output = output.contiguous()
        self._run.record(self.stage_index, index, "forward", began)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """torch's, timed."""
        began = self._run.clock.mark()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._run.record(self.stage_index, bwd_chunk_id, "backward", began)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """torch's, timed; forward-only schedules call it too."""
        if self.has_backward:
            began = self._run.clock.mark()
            super().perform_reduce_grad(grad_scale_factor)
            self._run.record(self.stage_index, -1, "reduce", began)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        made = min(num_microbatches, self._receives)
        result = super()._prepare_forward_infra(made, *args, **kwargs)
        for number in range(made, num_microbatches):
            self.args_recv_info[number] = self.args_recv_info[number % made]
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        made = min(num_microbatches, self._receives_gradients)
        result = super()._prepare_backward_infra(made, *args, **kwargs)
        for number in range(made, num_microbatches):
            self.grad_recv_info[number] = self.grad_recv_info[number % made]
        self.chunks = num_microbatches
        return result
