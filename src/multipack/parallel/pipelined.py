"""The engine whose ranks hold different layers: micro-batches go through all of them, by the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from multipack.parallel.base import ModelEngine, StepResult
from multipack.parallel.mesh import Mesh
from multipack.parallel.pipeline import Pipeline


class PipelineEngine(ModelEngine):
    """Runs stages of a model; the last one gives the summed loss.

    Args:
        stages: what this rank holds.
        pipeline: that runs them.
        optimizer, mesh, dtype, **more: see `ModelEngine`.
        share: this rank's share of a pack, where ranks divide its tokens.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        *,
        share: Callable[[Any], Any] | None = None,
        **more: Any,
    ) -> None:
        self.pipeline = pipeline
        self._share = share or (lambda batch: batch)
        super().__init__(stages, optimizer, mesh, dtype, duplicates=pipeline.duplicates, **more)

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        denominator: float,
        watch: Callable[[int], None] | None = None,
    ) -> StepResult:
        """See `ModelEngine`; nobody watches, as micro-batches overlap."""
        scale = self.mesh.gradient_size / max(denominator, 1) * self.loss_scale
        losses = self.pipeline.forward_backward(micro_batches, scale, self._share, self.autocast)
        seconds = self.pipeline.seconds
        return StepResult(self._told(losses), seconds("forward"), seconds("backward") + seconds("reduce"))

    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """See `ModelEngine`."""
        return self._told(self.pipeline.evaluate(micro_batches, self._share, self.autocast))
