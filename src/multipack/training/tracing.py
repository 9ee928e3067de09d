"""One torch trace of a few steps, for `chrome://tracing` or https://ui.perfetto.dev."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from multipack.parallel.engine import ModelEngine
from multipack.training.observer import Observer


class Trace(Observer):
    """Profiles a few steps of this process, writes one trace, and is out of the way from then on.

    A run that is resumed keeps the trace that it has.

    Args:
        path: the file to write; None = this rank writes none.
        device: whose kernels are traced, beside the host's operators.
        first: first step that is traced, counted from 1 in this process: those before it compile and allocate.
        last: last step that is traced.
        tell: says where the trace is.
    """

    name = "trace"

    def __init__(
        self,
        path: Path | None,
        device: torch.device,
        first: int = 3,
        last: int = 5,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.path = path
        self._device = device
        self._first, self._last = first, last
        self._tell = tell
        self._steps = 0
        self._profiler: profile | None = None
        self._step = ExitStack()
        self._traced: list[int] = []

    def before_step(self, step: int) -> None:
        """Begin with the first step that is traced; mark every one by its number."""
        self._steps += 1
        if self.path is None or not self._first <= self._steps <= self._last:
            return
        if self._profiler is None:
            if self.path.exists():
                self._tell(f"{self.path} is of an earlier part of this run; remove it to have another trace")
                self.path = None
                return
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()
        self._step.enter_context(record_function(f"step {step}"))
        self._traced.append(step)

    def after_step(self, step: int, engine: ModelEngine, applied: bool) -> None:
        """Write the trace after the last step that is traced."""
        self._step.close()
        if self._steps == self._last:
            self._write()

    def close(self, failed: bool) -> None:
        """Write what there is of a run that was shorter."""
        self._step.close()
        if self._profiler is not None:
            self._write()
        elif self.path is not None and self._steps < self._first:
            self._tell(
                f"train.profile=true traces steps {self._first} to {self._last} of a process, but this one took"
                f" {self._steps}: no trace was written"
            )

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None or self.path is None:
            return
        profiler.stop()
        partial = self.path.with_name(f".{self.path.name}.partial")
        profiler.export_chrome_trace(str(partial))
        os.replace(partial, self.path)
        self._tell(
            f"trace of steps {self._traced[0]} to {self._traced[-1]}: {self.path} (open it in https://ui.perfetto.dev)"
        )
