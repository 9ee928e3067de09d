"""Applies steps and records their numbers, such as the loss, without a wait for the device inside a step.

    host     enqueue step 1 │ enqueue step 2 │ read 1 │ enqueue step 3 │ read 2 │ …
    device      step 1 ───────▶ copy 1 │ step 2 ───────▶ copy 2 │ step 3 ─────▶

The copy of a step's numbers to the host is enqueued after them, and read when the next step is enqueued: the device
always has work. Where something decides about a step by its numbers before it is applied, they are read at once.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from multipack.parallel.engine import Engine, StepResult
from multipack.parallel.mesh import Mesh
from multipack.training.assemble import Parts
from multipack.training.callbacks.callback import Callback, NonFiniteLoss
from multipack.training.feed import Feed, StepData
from multipack.training.metrics import LEGEND, step_metrics
from multipack.training.optimizer import learning_rate
from multipack.training.precision import mean_peak
from multipack.training.run_config import Config

Record = Callable[[int, StepData, dict[str, float]], None]
"""Called with the number, the data and the metrics of a step."""

DECIDING = ("micro_batch", "gradient", "accept")
"""Hooks of callbacks that read numbers of a step before it is applied."""


def read_later(tensor: Tensor) -> Callable[[], list[float]]:
    """Copy a tensor to the host in the background; returns a function that waits for the copy and has its elements."""
    if not tensor.is_cuda:
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def elements() -> list[float]:
        event.synchronize()
        found: list[float] = host.tolist()
        return found

    return elements


def may_read_later(engine: Engine, callbacks: Iterable[Callback]) -> bool:
    """Whether no part of a run needs the numbers of a step before it is applied.

    On a CPU there is nothing to wait for. In fp16 the norm decides whether the step is applied; with offload gradients
    are on the host.
    """
    on_device = all(each.is_cuda for each in engine.parameters.values())
    decides = any(
        getattr(type(each), hook) is not getattr(Callback, hook) for each in callbacks for hook in DECIDING
    )
    return engine.world.device.type == "cuda" and on_device and engine.dtype != torch.float16 and not decides


def sum_over_ranks(
    mesh: Mesh, data: StepData, result: StepResult, signal: int, seconds: float = 0.0
) -> Tensor:
    """Sum the numbers of a step over ranks by one all-reduce, which leaves them on the device.

    `signal` is the number of the one that this rank received, 0 = none; `seconds` are its forward seconds.

    Returns:
        (3 + data-parallel ranks + packs,) float64: the step's summed loss, its slots, the sum of signals, the
        `seconds` of each data-parallel rank, and for each pack of `data.packs` whether its loss is not
        finite. Losses that are not finite are left out of the sum.
    """
    losses = result.values.double()
    finite = losses.isfinite()
    broken = losses.new_zeros(len(losses), mesh.data_size)
    broken[:, mesh.data_rank] = (~finite).double()
    loss = sum(losses.where(finite, 0.0).unbind(), losses.new_zeros(()))
    slots = sum(batch.num_slots for batch in data.micro_batches) if mesh.is_replica_leader else 0
    own = [loss, *(losses.new_full((), float(number)) for number in (slots, signal))]
    times = losses.new_zeros(mesh.data_size)
    times[mesh.data_rank] = seconds if mesh.is_replica_leader else 0.0
    total = torch.cat([torch.stack(own), times, broken.flatten()])
    if mesh.world.size > 1:
        dist.all_reduce(total)
    return total


def diverged(config: Config, feed: Feed, what: str, documents: Sequence[int] = ()) -> NoReturn:
    """Raise NonFiniteLoss with a message on `what`, and the names of these documents of the feed."""
    names = [f"{number} ({feed.name(number)})" for number in documents[:20]]
    more = f" and {len(documents) - 20} more" if len(documents) > 20 else ""
    of = f" Its documents: {', '.join(names)}{more}." if names else ""
    raise NonFiniteLoss(
        f"{what}.{of} Lower optimizer.lr (now {config.optimizer.lr:g})"
        + (", or look at these documents" if names else "")
    )


class StopRequest:
    """Records SIGTERM and Ctrl-C for the loop, which saves and stops; a second Ctrl-C interrupts at once.

    Args:
        interrupt: called with the first signal; ends waiting for documents.
        announces: whether the first signal prints on standard error that the run will stop. Not below torchrun,
            which sends SIGTERM after the failure of a rank, too, and prints the line itself.

    Attributes:
        signal: the first signal that this rank received; None = none.
        agreed: whether all ranks know of a signal that one of them received, and end the run after the same step.
    """

    def __init__(self, interrupt: Callable[[], None] = lambda: None, announces: bool = False) -> None:
        self._interrupt, self._announces = interrupt, announces
        self.signal: signal.Signals | None = None
        self.agreed = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agree(self) -> None:
        """End the run after this step without an evaluation; called on all ranks if one received a signal."""
        self.signal, self.agreed = self.signal or signal.SIGTERM, True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if self._announces:  # print is not safe here: the signal may have interrupted one
            again = "; Ctrl-C once more stops at once" if number == signal.SIGINT else ""
            os.write(2, f"\n{self.signal.name}: the run saves and stops after this step{again}\n".encode())
        self._interrupt()


@dataclass
class TakenStep:
    """A step after its backward passes.

    Attributes:
        number: its number, from 1.
        data: its documents.
        result: this rank's losses and times.
        marks: of the device's clock: after the backward passes, and at its end.
        metrics: of the objective and callbacks, learning rate, loss and norm of the gradient.
        unread: reads its sums over ranks and the norm, where that waits until the next step is enqueued.
        loss: summed loss of all ranks.
        slots: computed slots of all ranks.
        time_spread: the metric of this name, of the step before; NaN = not measured.
    """

    number: int
    data: StepData
    result: StepResult
    marks: list[Any]
    metrics: dict[str, float]
    unread: Callable[[], list[float]] | None = None
    loss: float = 0.0
    slots: float = 0.0
    time_spread: float = math.nan


class StepApplier:
    """Applies steps after their backward passes, and reads and records their numbers, all in order.

    Args:
        parts: parts of the run.
        stop: the request to stop; ranks agree on a signal that one of them received.
        record: called with the metrics of every step.

    Attributes:
        step: number of the step that was applied last.
        steps: number of the run's last step, for the learning-rate schedule.
        loss: loss of the step that was read last.
        running: summed loss since the last evaluation, and the sum of the steps' denominators.
    """

    def __init__(self, parts: Parts, stop: StopRequest, record: Record) -> None:
        model = parts.model
        self.step, self.steps, self.loss = 0, parts.feeds.steps, math.nan
        self.running: list[float] = [0.0, 0]
        self._config, self._objective, self._cost_model = model.config, model.objective, model.cost_model
        self._engine, self._mesh = model.engine, model.engine.mesh
        self._callbacks, self._feed = parts.callbacks, parts.feeds.training
        self._stop, self._record_metrics = stop, record
        self._peak_flops = mean_peak(model.engine.world, model.engine.dtype)
        self._reads_later = not model.objective.legend and may_read_later(model.engine, parts.callbacks)
        self._last: TakenStep | None = None
        self._forward_seconds = 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start the clock of the next step now, after an evaluation or a checkpoint."""
        self._mark: Any = self._engine.clock.mark()

    def apply(self, step: int, data: StepData, result: StepResult) -> None:
        """Apply a step, unless its numbers forbid it, and record it, or the step before if numbers are read later."""
        engine, config = self._engine, self._config.optimizer
        rate = learning_rate(step, self.steps, config)
        sums = sum_over_ranks(self._mesh, data, result, self._stop.signal or 0, self._forward_seconds)
        taken, applied = TakenStep(step, data, result, [], {"lr": rate}), True
        if self._reads_later:
            taken.marks.append(engine.clock.mark())
            taken.unread = read_later(torch.cat([sums, engine.clip_on_device(config.clip)[None]]))
        else:
            self._check_losses(taken, sums.tolist())
            taken.marks.append(engine.clock.mark())
            taken.metrics |= self._objective.metrics(engine)
            for callback in self._callbacks:
                taken.metrics |= callback.gradient(step, engine)
            applied = self._check_norm(taken, norm := engine.clip(config.clip))
            if applied:
                loss = taken.metrics["loss"]
                answers = [callback.accept(step, loss, norm) for callback in self._callbacks]
                applied = all(answers)
        if applied:
            engine.step(rate)
        else:
            engine.discard()
            taken.metrics["skipped"] = 1.0
        self.step = step
        for callback in self._callbacks:
            callback.after_step(step, engine, applied)
        taken.marks.append(engine.clock.mark())
        self.settle()
        self._last = taken
        if not self._reads_later:
            self.settle()

    def settle(self) -> None:
        """Record the last applied step, after reading and checking its numbers; nothing if that was done."""
        taken, self._last = self._last, None
        if taken is None:
            return
        if taken.unread is not None:
            *numbers, norm = taken.unread()
            self._check_losses(taken, numbers)
            self._check_norm(taken, norm)
        self._record(taken)

    def _check_losses(self, taken: TakenStep, numbers: list[float]) -> None:
        """Read a step's sums and loss; a signal of any rank ends the run.

        Raises:
            NonFiniteLoss: on every rank, if the loss of a pack is not finite; names the pack's documents.
        """
        data, ranks = taken.data, self._mesh.data_size
        taken.loss, taken.slots, signals, *rest = numbers
        times, flags = rest[:ranks], rest[ranks:]
        if any(flags):
            broken = np.concatenate([data.packs[pack] for pack, flag in enumerate(flags) if flag])
            self._diverged(f"the loss of step {taken.number} is not finite; {self._undone}", broken.tolist())
        if signals:
            self._stop.agree()
        taken.time_spread = max(times) / (sum(times) / ranks) - 1.0 if all(times) else math.nan
        taken.metrics["loss"] = taken.loss / (data.denominator or 1)

    def _check_norm(self, taken: TakenStep, norm: float) -> bool:
        """Whether the gradient is finite; False for an fp16 overflow, after which the loss scale is lowered."""
        what, overflowed = f"the gradient of step {taken.number}", self._engine.overflowed
        documents = taken.data.documents.tolist()
        if overflowed and self._engine.loss_scale < 1:
            self._diverged(f"{what} overflows fp16 at every loss scale; train in bf16 or fp32", documents)
        if not overflowed and not math.isfinite(norm):
            self._diverged(f"{what} is not finite; {self._undone}", documents)
        taken.metrics["grad_norm"] = norm
        return not overflowed

    def _diverged(self, what: str, documents: list[int]) -> NoReturn:
        diverged(self._config, self._feed, what, documents)

    @property
    def _undone(self) -> str:
        return "nothing was saved after it" if self._reads_later else "the step was not applied"

    def _record(self, taken: TakenStep) -> None:
        data, result, metrics = taken.data, taken.result, taken.metrics
        self.running = [self.running[0] + taken.loss, self.running[1] + data.denominator]
        self.loss = metrics["loss"]
        (middle, ended), clock, world = taken.marks, self._engine.clock, self._engine.world
        seconds, self._mark = clock.seconds(self._mark, ended), ended
        flops, peak = self._cost_model.flops(*data.computed), self._peak_flops * world.size
        values = {
            "step": taken.number,
            "dto": clock.seconds(middle, ended),
            "mfu": 100.0 * flops / max(seconds, 1e-12) / peak if peak else 0.0,
            **step_metrics(data, result, taken.slots, seconds, world.size),
            **metrics,
        }
        record = {name: values[name] for name in LEGEND if name in values} | metrics
        self._forward_seconds = result.forward_seconds
        if self._mesh.data_size > 1 and math.isfinite(taken.time_spread):
            record["time_spread"] = taken.time_spread
            parallel = self._config.parallel
            synchronizes_once = parallel.data in ("ddp", "zero1") and parallel.model_ranks == 1
            if synchronizes_once and math.isfinite(seconds_waited := result.synchronizing_seconds):
                record["dtc"] = seconds_waited
        self._record_metrics(taken.number, data, record)
