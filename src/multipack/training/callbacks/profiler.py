"""A torch trace of a few steps, for `chrome://tracing` or https://ui.perfetto.dev, and their communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from multipack.parallel.engine import Engine
from multipack.training.callbacks.callback import Callback

SKIP_STEPS = 2
"""Steps of a process before the trace: they compile and allocate."""
TRACED_STEPS = 3
"""Steps in the trace."""


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (begin, end) spans."""
    total, last = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, last), 0.0)
        last = max(last, end)
    return total


def communication(events: Iterable[Any]) -> dict[str, float]:
    """Time of traced steps in which this rank communicated and computed nothing, under every strategy.

    On a GPU, NCCL's kernels communicate and all other kernels compute; on a CPU, gloo's operations communicate and
    the operations of the training thread compute.

    Args:
        events: `profile.events()`.

    Returns:
        "seconds" of communication that computing did not hide, and seconds of all steps ("of"); empty without steps.
    """
    own = [each for each in events if each.time_range.end > each.time_range.start]
    steps = [each for each in own if each.name.startswith("ProfilerStep") and each.device_type.name == "CPU"]
    kernels = [each for each in own if each.device_type.name != "CPU" and not each.is_user_annotation]
    if kernels:
        sent = [each for each in kernels if "nccl" in each.name]
        computed = [each for each in kernels if "nccl" not in each.name]
    else:
        sent = [each for each in own if each.name.startswith("gloo:")]
        threads = {each.thread for each in steps}
        computed = [each for each in own if each.name.startswith("aten::") and each.thread in threads]
    if not steps:
        return {}
    busy, spans = (
        [(each.time_range.start, each.time_range.end) for each in some] for some in (computed, sent)
    )
    exposed = covered([*busy, *spans]) - covered(busy)
    whole = covered((each.time_range.start, each.time_range.end) for each in steps)
    return {"seconds": exposed / 1e6, "of": whole / 1e6}


class Trace(Callback):
    """Profiles a few steps of this process and writes one trace to `path`; None = this rank writes none.

    On a CUDA `device` its kernels are traced too. A resumed run keeps its earlier trace.

    Attributes:
        communication: communication of the traced steps, see the function; empty before the trace is written.
    """

    name = "trace"

    def __init__(
        self, path: Path | None, device: torch.device, report: Callable[[str], None] = print
    ) -> None:
        if path is not None and path.exists():
            report(f"{path} is of an earlier part of this run; remove it to get another trace")
            path = None
        self.path, self._device, self._report = path, device, report
        self._profiler: profile | None = None
        self.communication: dict[str, float] = {}

    def before_step(self, step: int) -> None:
        """Start the profiler with the first step of the process."""
        if self.path is None or self._profiler is not None:
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

    def ending(self) -> Mapping[str, Any]:
        """Communication of the traced steps."""
        return {"communication": self.communication} if self.communication else {}

    def close(self, failed: bool) -> None:
        """Write a shorter trace if the run ended within it."""
        if self._profiler is not None:
            self._profiler.stop()
        if self.path is not None and not self.path.exists():
            self._report(
                f"train.profile=true traces {TRACED_STEPS} steps after the first {SKIP_STEPS} of a process, but this"
                " one ended before them: no trace was written"
            )

    def _write(self, profiler: profile) -> None:
        if self.path is None or profiler.step_num <= SKIP_STEPS:
            return
        written = self.path.with_name(f".{self.path.name}.partial")
        profiler.export_chrome_trace(str(written))
        written.replace(self.path)
        self.communication = communication(profiler.events() or ())  # type: ignore[no-untyped-call]
        self._report(f"trace of {TRACED_STEPS} steps: {self.path} (open it in https://ui.perfetto.dev)")
