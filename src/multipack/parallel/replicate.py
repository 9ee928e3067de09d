"""Data parallel: every rank holds the whole model and its own packs; gradients are summed once a step.

    rank 0   pack 0 ─ pack 2 ─┐
    rank 1   pack 1 ─ pack 3 ─┴─ one all-reduce ─ the same optimizer step everywhere

The loss is a sum over targets divided by the step's *global* denominator, which the plan knows: its number of
targets or, where each document's targets share a weight of 1, of documents. DDP averages gradients over ranks, so
each rank's loss is multiplied by their number: the result is the gradient that one process would compute, however
unevenly targets and documents are spread.

Gradients are views of the buckets that are reduced, which DDP keeps from its first step on. Cleared, they are zeroed
and stay views: a gradient that is None would be made anew by the first of several micro-batches, and stand beside its
bucket until the last one, for 4 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model as it is to be called: rank 0's parameters everywhere, gradients reduced in the last backward pass.

    Args:
        model: whole, on this rank's device. Names of its parameters stay as they are.
        mesh: the ranks that are replicas of each other, in one dimension.

    Returns:
        A module that shares the model's parameters.
    """
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=ids, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """Zero gradients where they are, in DDP's buckets."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)
