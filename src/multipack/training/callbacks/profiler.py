"""A torch trace of a few steps, for `chrome://tracing` or https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from multipack.parallel.engine import Engine
from multipack.training.callbacks.callback import Callback

SKIP_STEPS = 2
"""Steps of a process before the trace: they compile and allocate."""
TRACED_STEPS = 3
"""Steps in the trace."""


class Trace(Callback):
    """Profiles a few steps of this process and writes one trace to `path`, with the kernels of a CUDA `device`."""

    name = "trace"

    def __init__(self, path: Path, device: torch.device, report: Callable[[str], None] = print) -> None:
        self.path, self._device, self._report = path, device, report
        self._profiler: profile | None = None

    def before_step(self, step: int) -> None:
        """Start the profiler with the first step of the process."""
        if self._profiler is not None:
            return
        cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=SKIP_STEPS - 1, warmup=1, active=TRACED_STEPS, repeat=1),
            on_trace_ready=self._write,
        )
        self._profiler.start()

    def after_step(self, step: int, engine: Engine, applied: bool) -> None:
        """Advance the profiler's schedule."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self, failed: bool) -> None:
        """Write a shorter trace if the run ended within it."""
        if self._profiler is not None:
            self._profiler.stop()
        if not self.path.exists():
            self._report(
                f"train.profile=true traces {TRACED_STEPS} steps after the first {SKIP_STEPS} of a process, but this"
                " one ended before them: no trace was written"
            )

    def _write(self, profiler: profile) -> None:
        if profiler.step_num <= SKIP_STEPS:
            return
        written = self.path.with_name(f".{self.path.name}.partial")
        profiler.export_chrome_trace(str(written))
        written.replace(self.path)
        self._report(f"trace of {TRACED_STEPS} steps: {self.path} (open it in https://ui.perfetto.dev)")
