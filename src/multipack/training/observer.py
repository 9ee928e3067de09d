"""What watches the loop: means of weights, guards, statistics, traces, trackers. None of them is a branch in it.

    before_step ▸ [forward, backward ▸ micro_batch]… ▸ gradient ▸ clip ▸ judge ▸ optimizer ▸ after_step ▸ record
                                                                             evaluation ▸ weightings ▸ evaluated

An observer overrides what it needs; `Observers` asks all of them, in their order. Every rank has the same observers,
and what decides (`judge`, `evaluated`) must be a function of values that are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from multipack.parallel.engine import ModelEngine
from multipack.parallel.state import Source

Verdict = Literal["apply", "skip"]
"""What becomes of a step: its gradient is applied, or thrown away."""


class RunStopped(RuntimeError):
    """The run must stop here: nothing of the present step was applied, and the last checkpoint is still good."""


class Observer:
    """Watches a run. Every method does nothing, unless a kind of observer has something to do there."""

    name = "observer"
    """Of its state in checkpoints; no two observers of a run share one."""
    legend: Mapping[str, str] = MappingProxyType({})
    """Metrics that it adds to records, and their meaning."""

    def before_step(self, step: int) -> None:
        """`step` (from 1) begins: its batches are not yet taken."""

    def micro_batch(self, index: int, engine: ModelEngine, own: float, whole: float) -> None:
        """Micro-batch `index`, not the last one, has been through its backward pass: gradients are this rank's own.

        Args:
            index: of the micro-batch on this rank, from 0.
            engine: whose parameters hold the gradient of the summed loss / `whole`, times ranks and loss scale.
            own: what this rank's micro-batches up to this one hold of the step's denominator.
            whole: the step's denominator.
        """

    def gradient(self, step: int, engine: ModelEngine) -> Mapping[str, float]:
        """The step's gradient is whole and not yet clipped. Returns metrics for the step's record."""
        return {}

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """Whether the step is applied. Both values are the same on every rank, and finite.

        Raises:
            RunStopped: on every rank, with the reason; nothing of the step was applied.
        """
        return "apply"

    def after_step(self, step: int, engine: ModelEngine, applied: bool) -> None:
        """The weights are those after `step`, which was applied or left out."""

    def record(self, values: Mapping[str, float]) -> None:
        """A record of metrics.jsonl, `step` among its values; on rank 0 only."""

    def sample(self, step: int, text: str) -> None:
        """What the model wrote at an evaluation; on rank 0 only."""

    def weightings(self, engine: ModelEngine) -> Sequence[tuple[str, AbstractContextManager[None]]]:
        """More weights to evaluate with: a suffix for `val_loss`, and a context in which the model has them."""
        return []

    def evaluated(self, step: int, val_loss: float) -> str:
        """A validation loss, the same on every rank. Returns why the run should stop early; empty = it goes on."""
        return ""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values for JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state()` gave."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, as tensors."""
        return {}

    def blank(self, shapes: Mapping[str, tuple[int, ...]], engine: ModelEngine) -> dict[str, Tensor]:
        """Tensors for `load_tensors` that a checkpoint's values are copied into: on this rank, as far as it needs them.

        Args:
            shapes: names and whole shapes of what the checkpoint has of `tensors()`, of all ranks.
            engine: whose parameters these may be like.
        """
        return {name: torch.zeros(shape) for name, shape in shapes.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors()` gave: tensors of its own."""

    def close(self, failed: bool) -> None:
        """The run is over; `failed`: by an exception."""


class Observers:
    """All observers of a run as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        names = [observer.name for observer in observers]
        assert len(set(names)) == len(names), names
        self._all = list(observers)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._all)

    @property
    def legend(self) -> dict[str, str]:
        """Metrics of all, and their meaning."""
        return {name: meaning for observer in self._all for name, meaning in observer.legend.items()}

    def before_step(self, step: int) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.before_step(step)

    def micro_batch(self, index: int, engine: ModelEngine, own: float, whole: float) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.micro_batch(index, engine, own, whole)

    def gradient(self, step: int, engine: ModelEngine) -> dict[str, float]:
        """Metrics of all."""
        return {
            name: value for observer in self._all for name, value in observer.gradient(step, engine).items()
        }

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """A step is left out if any observer says so; all are asked."""
        verdicts = [observer.judge(step, loss, grad_norm) for observer in self._all]
        return "skip" if "skip" in verdicts else "apply"

    def after_step(self, step: int, engine: ModelEngine, applied: bool) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.after_step(step, engine, applied)

    def record(self, values: Mapping[str, float]) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.record(values)

    def sample(self, step: int, text: str) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.sample(step, text)

    def weightings(self, engine: ModelEngine) -> list[tuple[str, AbstractContextManager[None]]]:
        """The run's own weights, and those of all observers."""
        return [
            ("", nullcontext()),
            *(more for observer in self._all for more in observer.weightings(engine)),
        ]

    def evaluated(self, step: int, val_loss: float) -> str:
        """All reasons to stop."""
        return "; ".join(filter(None, [observer.evaluated(step, val_loss) for observer in self._all]))

    def state(self) -> dict[str, dict[str, Any]]:
        """States by observers' names; those without one are left out."""
        states = {observer.name: observer.state() for observer in self._all}
        return {name: state for name, state in states.items() if state}

    def load_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state()` gave; an observer that is new begins anew."""
        for observer in self._all:
            if observer.name in states:
                observer.load_state(states[observer.name])

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of all, as `<observer>.<name>`."""
        return {
            f"{observer.name}.{name}": tensor
            for observer in self._all
            for name, tensor in observer.tensors().items()
        }

    def load_tensors(self, source: Source, engine: ModelEngine) -> None:
        """Take over what a checkpoint has kept of `tensors()`, on any mesh; an observer that is new begins anew."""
        saved = source.shapes("observers")
        for observer in self._all:
            prefix = f"{observer.name}."
            own = {
                name.removeprefix(prefix): shape for name, shape in saved.items() if name.startswith(prefix)
            }
            if own:
                tensors = observer.blank(own, engine)
                source.fill("observers", {f"{prefix}{name}": tensor for name, tensor in tensors.items()})
                observer.load_tensors(tensors)

    def close(self, failed: bool) -> None:
        """Close all, in the opposite order."""
        for observer in reversed(self._all):
            observer.close(failed)
