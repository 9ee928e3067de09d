"""The engine of ranks that run micro-batches one after the other, whatever each of them holds of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from multipack.parallel.base import ModelEngine, StepResult
from multipack.parallel.mesh import Mesh


class LoopEngine(ModelEngine):
    """Runs a model that takes a batch and returns the summed loss over its targets.

    Args:
        model: what this rank holds of it. It is not changed.
        optimizer, mesh, dtype, **more: see `ModelEngine`.
        call: the model as it is to be called, where that is another module (DDP's).
        share: this rank's share of a pack, where ranks divide its tokens.
        synchronizing: (whether ranks are to synchronize) → the context of a micro-batch; None = nothing to do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        *,
        call: nn.Module | None = None,
        share: Callable[[Any], Any] | None = None,
        synchronizing: Callable[[bool], AbstractContextManager[Any]] | None = None,
        **more: Any,
    ) -> None:
        self._call = call or model
        self._share = share or (lambda batch: batch)
        self._synchronizing = synchronizing or (lambda last: nullcontext())
        super().__init__([model], optimizer, mesh, dtype, **more)

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        denominator: float,
        watch: Callable[[int], None] | None = None,
    ) -> StepResult:
        """See `ModelEngine`; ranks synchronize in the last backward pass."""
        scale = self.mesh.gradient_size / max(denominator, 1) * self.loss_scale
        losses, forward, backward = [], 0.0, 0.0
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            moved = self._share(batch).to(self.world.device, non_blocking=True)
            with self._synchronizing(last):
                began = self._time()
                with self.autocast():
                    loss = self._call(moved)
                middle = self._time()
                (loss * scale).backward()
                ended = self._time()
            losses.append(float(loss.detach()))
            forward += middle - began
            backward += ended - middle
            if watch is not None and not last:
                watch(index)
        return StepResult(self._told(losses), forward, backward)

    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """See `ModelEngine`."""
        with self.evaluating() as model:
            found = [model(self._share(batch).to(self.world.device)) for batch in micro_batches]
        return self._told([float(loss) for loss in found])
