"""Data parallelism: every rank holds the whole model and its own packs; gradients are averaged once a step.

    rank 0   pack 0 ─ pack 2 ─┐
    rank 1   pack 1 ─ pack 3 ─┴─ one all-reduce ─ the same optimizer step everywhere

How a mean over ranks becomes the gradient of the global loss: `ModelEngine.scale`.

Gradients are views of DDP's reduction buckets, which exist from the first step on. They are zeroed rather than set to
None: a gradient that is None would be allocated anew by the first of several micro-batches and exist beside its bucket
until the last one, for 4 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrap a model in DDP: rank 0's parameters everywhere, gradients averaged in the last backward pass of a step.

    Args:
        model: whole, on this rank's device. Names of its parameters stay the same.
        mesh: the ranks that are replicas of each other, in one dimension.

    Returns:
        The module to call in training; it shares the model's parameters.
    """
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=ids, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Zero gradients in place, in DDP's buckets."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)
