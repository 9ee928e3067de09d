"""Metrics of a step, each defined once, and their legend."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence

import torch

from multipack.parallel.engine import StepResult
from multipack.reports.console import LINE
from multipack.training.feed import StepData

LEGEND: dict[str, str] = {
    "step": "global step, from 1",
    "loss": "mean loss over the step's targets, all ranks and micro-batches, weighted by train.loss_weighting",
    "lr": "learning rate of the step",
    "grad_norm": "global norm of the gradient before clipping",
    "dt": "seconds of the step, from one step's end to the next, without evaluations and checkpoints",
    "dtf": "seconds in forward passes (CUDA events on a GPU)",
    "dtb": "seconds in backward passes, gradient synchronization included (CUDA events on a GPU)",
    "dto": "seconds from the backward passes to the end of the step: clipping, optimizer, callbacks",
    "data_time": "seconds the step waited for its batches",
    "sps": "documents per second",
    "sps_per_device": "documents per second and device",
    "tps": "tokens per second, without padding",
    "tps_per_device": "tokens per second and device",
    "target_tokens": "target tokens of the step: what the loss is divided by, unless it is a mean over documents",
    "padding": "share of token slots without a token of a document",
    "mfu": "model FLOPs of the packed documents over the devices' matmul peak, published or measured, in percent",
    "memory": "peak memory of this process, GiB",
    "cost_spread": "predicted cost of the most loaded rank over the mean, minus 1",
    "train_loss": "mean loss since the last evaluation, weighted as loss",
    "val_loss": "mean loss of the validation documents, weighted as loss (val_loss/NAME: of a source of a mixture)",
    # Of runs with several ranks, or with the settings that are named.
    "dtc": "seconds of dtb in which gradients are synchronized: the last backward pass beyond the pace of the others",
    "time_spread": "forward seconds of the slowest data-parallel rank over the mean, minus 1, of the step before",
    "skipped": "1 where the step was skipped: fp16 overflow, or a spike of loss or gradient (train.spike)",
    "gradient_noise": "gradient noise scale, in targets: larger steps than this help little (log.gradient_noise)",
}
"""Metric → meaning, in the order in which they are printed; objectives add their own."""

FORMATS: dict[str, str] = {
    **dict.fromkeys(("step", "target_tokens", "tps", "tps_per_device"), ".0f"),
    **dict.fromkeys(("lr", "cost_spread", "time_spread"), ".3g"),
    **dict.fromkeys(("sps", "sps_per_device", "mfu", "memory"), ".2f"),
}
"""Metric → its format in log lines; others have four decimals."""


def step_metrics(
    data: StepData, result: StepResult, slots: float, seconds: float, devices: int
) -> dict[str, float]:
    """Metrics of a step from its documents, computed slots and seconds; rates per device divide by `devices`."""
    tokens, documents, time = int(data.lengths.sum()), len(data.documents), max(seconds, 1e-12)
    return {
        "dt": seconds,
        "dtf": result.forward_seconds,
        "dtb": result.backward_seconds,
        "data_time": data.wait_seconds,
        "sps": documents / time,
        "sps_per_device": documents / time / devices,
        "tps": tokens / time,
        "tps_per_device": tokens / time / devices,
        "target_tokens": data.target_tokens,
        "padding": max(1.0 - int(data.computed[0].sum()) / max(slots, 1), 0.0),
        "memory": peak_memory_bytes() / 2**30,
        "cost_spread": data.cost_spread,
    }


def peak_memory_bytes() -> int:
    """Peak memory of this process in bytes: allocated on the GPU if it uses one, else resident in main memory."""
    if torch.cuda.is_available() and torch.cuda.memory_allocated():
        return torch.cuda.max_memory_allocated()
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def step_line(metrics: Mapping[str, float], steps: int, val_loss: float | None, seconds_left: float) -> str:
    """The record of a step as one line of at most 100 columns; `steps` is the last step of the run."""
    step = f"step {metrics['step']:>{len(str(steps))}.0f}/{steps}"
    parts = [step, f"loss {metrics['loss']:.4f}"]
    parts += [f"val {val_loss:.4f}"] if val_loss is not None else []
    parts += [f"{metrics['tps']:,.0f} tokens/s"]
    parts += [f"MFU {metrics['mfu']:.1f} %"] if metrics.get("mfu") else []
    parts += ["skipped"] if metrics.get("skipped") else []
    return "  ".join([*parts, f"{duration(seconds_left)} left"])


def evaluation_line(metrics: Mapping[str, float], tokens: bool = True, first: Sequence[str] = ()) -> str:
    """An evaluation as one line of at most 100 columns; metrics that do not fit are left out, and "…" says so.

    Losses that are means over `tokens` have a perplexity; metrics named in `first` are put before the others.
    """
    names = [name for name in (*first, *metrics) if name in metrics and name not in ("step", "val_loss")]
    line = f"evaluation after step {metrics['step']:.0f}: {loss_text(metrics['val_loss'], tokens)}"
    parts = [
        f", {name.removeprefix('val_').replace('_', ' ')} {metrics[name]:.4f}"
        for name in dict.fromkeys(names)
    ]
    for number, part in enumerate(parts, start=1):
        if len(line) + len(part) > LINE - (len(", …") if number < len(parts) else 0):
            return f"{line}, …"
        line += part
    return line


def sample_line(prompt: str, completion: str) -> str:
    """The end of a prompt and the beginning of its completion as one line of less than 100 columns."""
    begun, written = " ".join(prompt.split()), " ".join(completion.split())
    begun = begun if len(begun) <= 40 else f"…{begun[-39:]}"
    return f"{begun}▌{written}"[: LINE - 8]


def loss_text(loss: float, tokens: bool = True) -> str:
    """A validation loss with its perplexity, e^loss."""
    return f"validation loss {loss:.4f}" + (
        f" (perplexity {math.exp(min(loss, 700.0)):.4g})" if tokens else ""
    )


def duration(seconds: float) -> str:
    """Seconds as `1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_line(metrics: Mapping[str, float]) -> str:
    """All metrics as one line, in their order: `step=10 loss=3.1543 dt=0.2828 …`."""
    return " ".join(f"{name}={value:{FORMATS.get(name, '.4f')}}" for name, value in metrics.items())
