"""What a step reports: every metric defined once, and its legend."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from multipack.planning.options import LossWeighting

LEGEND: dict[str, str] = {
    "step": "global step, from 1",
    "loss": "mean loss over the step's targets, all ranks and micro-batches, weighted by train.loss_weighting",
    "lr": "learning rate of the step",
    "grad_norm": "global norm of the gradient before clipping",
    "dt": "seconds of the step, from one step's end to the next, evaluation and saving left out",
    "dtf": "seconds in forward passes (device synchronized)",
    "dtb": "seconds in backward passes, gradient synchronization included (device synchronized)",
    "dto": "seconds clipping the gradient and in the optimizer (device synchronized)",
    "data_time": "seconds the step waited for its batches",
    "sps": "documents per second",
    "sps_per_device": "documents per second and device",
    "tps": "real tokens per second; padding never counts",
    "tps_per_device": "real tokens per second and device",
    "target_tokens": "target tokens of the step: what the loss is divided by, unless it is a mean over documents",
    "padding": "share of token slots that hold no token of a document",
    "mfu": "model FLOPs of the packed documents over the devices' matmul peak, measured on a CPU, in percent",
    "memory": "peak memory of this process, GiB",
    "cost_spread": "dearest rank's predicted cost over the mean rank's, minus 1",
    "train_loss": "mean loss since the last evaluation, over the same as loss",
    "val_loss": "mean loss of the validation documents, over the same as loss",
}
"""Metric → meaning, in the order in which they are printed."""

PREDICTED = "seconds that the plan's measured cost predicts for dtf + dtb"
"""Meaning of `dt_predicted`, which runs with a measured cost have."""

SKIPPED = "1 where the step was left out: fp16 overflowed, or the loss or gradient jumped"
"""Meaning of `skipped`."""


@dataclass(frozen=True)
class StepMeasure:
    """What is known of a step when it has ended; rates are derived here and nowhere else.

    Attributes:
        step: global step, from 1.
        loss_sum: summed loss over all ranks, each target with its weight.
        target_tokens: targets over all ranks.
        denominator: what the loss is divided by: targets, or documents that have one.
        documents: documents over all ranks.
        tokens: real tokens over all ranks.
        slots: token slots that were computed, over all ranks.
        flops: model FLOPs of the step's documents, forward and backward; of real tokens, never of padding.
        seconds: the whole step.
        forward_seconds: in forward passes.
        backward_seconds: in backward passes.
        optimizer_seconds: clipping and optimizer.
        data_seconds: waiting for batches.
        devices: number of ranks.
        peak_flops: matmul peak of one device in FLOP/s; 0 = unknown.
        learning_rate: of the step.
        grad_norm: before clipping.
        cost_spread: dearest rank over mean rank, minus 1.
        predicted_seconds: of forward and backward passes, where the cost was measured.
        skipped: whether the step was left out.
    """

    step: int
    loss_sum: float
    target_tokens: int
    denominator: int
    documents: int
    tokens: int
    slots: int
    flops: float
    seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    data_seconds: float
    devices: int
    peak_flops: float
    learning_rate: float
    grad_norm: float
    cost_spread: float
    predicted_seconds: float | None = None
    skipped: bool = False

    def metrics(self) -> dict[str, float]:
        """The step's line: metric → value, in the legend's order."""
        seconds = max(self.seconds, 1e-12)
        peak = self.peak_flops * self.devices
        return {
            "step": self.step,
            "loss": self.loss_sum / max(self.denominator, 1),
            "lr": self.learning_rate,
            "grad_norm": self.grad_norm,
            "dt": self.seconds,
            "dtf": self.forward_seconds,
            "dtb": self.backward_seconds,
            "dto": self.optimizer_seconds,
            "data_time": self.data_seconds,
            "sps": self.documents / seconds,
            "sps_per_device": self.documents / seconds / self.devices,
            "tps": self.tokens / seconds,
            "tps_per_device": self.tokens / seconds / self.devices,
            "target_tokens": self.target_tokens,
            "padding": 1.0 - self.tokens / max(self.slots, 1),
            "mfu": 100.0 * self.flops / seconds / peak if peak else 0.0,
            "memory": peak_memory_bytes() / 2**30,
            "cost_spread": self.cost_spread,
            **({} if self.predicted_seconds is None else {"dt_predicted": self.predicted_seconds}),
            **({"skipped": 1.0} if self.skipped else {}),
        }


@dataclass
class RunningLoss:
    """Loss and its denominators since the last evaluation; part of a checkpoint."""

    loss_sum: float = 0.0
    denominator: int = 0
    loss_weighting: LossWeighting = "token"

    def add(self, loss_sum: float, denominator: int) -> None:
        """Count one step."""
        self.loss_sum += loss_sum
        self.denominator += denominator

    def take(self) -> float | None:
        """The mean so far (None before the first step), starting anew."""
        mean = self.loss_sum / self.denominator if self.denominator else None
        self.loss_sum, self.denominator = 0.0, 0
        return mean

    def weigh(self, loss_weighting: LossWeighting) -> list[str]:
        """Go on with `loss_weighting`; where it changes, start anew and return a note: such sums do not add up."""
        before = self.loss_weighting
        if before == loss_weighting:
            return []
        self.loss_sum, self.denominator, self.loss_weighting = 0.0, 0, loss_weighting
        return [
            f"train.loss_weighting was {before} until now and is {loss_weighting} from here on: the logged losses"
            " before and after are means over different things"
        ]


@dataclass
class Prediction:
    """Predicted against measured seconds of forward and backward passes, over the steps of this process."""

    steps: int = 0
    predicted: float = 0.0
    measured: float = 0.0
    apart: float = 0.0

    def add(self, predicted: float | None, measured: float) -> None:
        """Count one step, if anything was predicted. The first step warms up and is left out."""
        if predicted is None:
            return
        self.steps += 1
        if self.steps > 1:
            self.predicted += predicted
            self.measured += measured
            self.apart += abs(predicted - measured)

    def rows(self) -> list[tuple[str, str]]:
        """Both means, and how far single steps are apart."""
        counted = self.steps - 1
        if counted < 1 or not self.measured:
            return [("steps", "too few to compare")]
        return [
            ("predicted", f"{self.predicted / counted:.4g} s a step, forward and backward"),
            ("measured", f"{self.measured / counted:.4g} s a step, over {counted} steps"),
            (
                "predicted / measured",
                f"{self.predicted / self.measured:.3f} of the sums; single steps are"
                f" {100 * self.apart / self.measured:.1f} % apart",
            ),
        ]


def peak_memory_bytes() -> int:
    """Most memory this process ever held: on the GPU where one is used, else resident in main memory."""
    if torch.cuda.is_available() and torch.cuda.memory_allocated():
        return torch.cuda.max_memory_allocated()
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def format_line(metrics: Mapping[str, float]) -> str:
    """`step=10 loss=3.154310 dt=0.282833 …`, metrics in the order given."""
    return " ".join(f"{name}={_format(name, value)}" for name, value in metrics.items())


def _format(name: str, value: float) -> str:
    if name in {"step", "target_tokens"}:
        return f"{int(value)}"
    if name in {"tps", "tps_per_device"}:
        return f"{value:.0f}"
    if name in {"lr", "cost_spread"}:
        return f"{value:.3g}"
    if name in {"sps", "sps_per_device", "mfu", "memory"}:
        return f"{value:.2f}"
    return f"{value:.4f}"
