"""ZeRO 2 and 3, FSDP and HSDP by torch's `fully_shard` (FSDP2): ranks hold shards, and one block whole at a time.

    between steps     rank 0 ▐ ¼ ▌  rank 1 ▐ ¼ ▌  rank 2 ▐ ¼ ▌  rank 3 ▐ ¼ ▌    parameters and optimizer state
    a block runs      gathered, used, then freed (zero3, hsdp) or kept for the backward pass (zero2)
    its gradient      reduce-scattered in every micro-batch: whole only while it is computed

Every block is one FSDP unit. All that is outside of blocks (embedding, last norm, head) is one more unit, which stays
whole from the beginning of the forward pass to the end of the backward pass, because both use it. The stages follow
Rajbhandari et al. 2020 (arXiv:1910.02054), except that zero2's parameters are sharded between steps too.

On a mesh of two dimensions, groups × shards, groups hold the same shards (HSDP): gradients are reduce-scattered within
a group in every micro-batch and all-reduced over groups once a step. Groups of one rank are plain data parallelism,
also for parameters that are already `DTensor`s of tensor parallelism: nothing is gathered, and gradients are
all-reduced once a step. The only cost is a copy of one unit's parameters at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard: bool,
    dtype: torch.dtype = torch.float32,
    offload: bool = False,
    pin: bool = True,
) -> None:
    """Shard a model's parameters, gradients and (through its parameters) optimizer state over a mesh, in place.

    Parameters become `DTensor`s with the same names and are whole in forward and backward passes only. The model may be
    on the meta device. Gradients are averaged over the mesh, in float32.

    Args:
        model: a model with `blocks`; call it as a module, because hooks of its forward pass gather parameters.
        mesh: a mesh of one dimension (shards), or of two (groups that hold the same shards, shards).
        reshard: free a block's parameters after its forward pass and gather them again for its backward pass.
        dtype: dtype of gathered parameters, and so of the computation: bfloat16 gathers half the bytes. Shards,
            reduction, optimizer and inputs such as rotary tables stay float32. Not float16: its scaled gradients would
            overflow unnoticed in the reduction.
        offload: keep shards of parameters and gradients, and with them the optimizer state, in host memory.
        pin: offload to pinned memory, if the device is a GPU; mapped files cannot be pinned.
    """
    # Inputs are not cast: the embedding has the parameters' dtype; rotary tables and loss weights stay float32.
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    pinned = pin and mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": policy}
    for block in model.get_submodule("blocks").children():
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    model.register_forward_hook(_free_without_backward)


def _free_without_backward(model: nn.Module, inputs: Any, output: Any) -> None:
    """Free parameters kept for a backward pass in evaluation, where there is none."""
    if not torch.is_grad_enabled():
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def synchronizing(model: nn.Module, *, keep: bool = False) -> Callable[[bool], AbstractContextManager[None]]:
    """Choose when ranks synchronize gradients; returns a function: whether a micro-batch is the last → its context.

    - DDP all-reduces gradients in the last micro-batch only; until then a rank's gradient is its own.
    - Shards reduce-scatter gradients in every micro-batch. A reduction once a step would send less, but every rank
      would hold the whole gradient until then. Groups that hold the same shards all-reduce them in the last
      micro-batch only.

    Args:
        model: sharded, or in DDP; any other does not synchronize.
        keep: keep gathered parameters until the last backward pass, so that they are gathered once a step; for
            `shard(…, reshard=False)`, which holds them whole during every micro-batch anyway.
    """
    if isinstance(model, DistributedDataParallel):
        return lambda last: nullcontext() if last else model.no_sync()
    if isinstance(model, FSDPModule):
        return lambda last: _scattering(model, last, keep)
    return lambda last: nullcontext()


@contextmanager
def _scattering(model: FSDPModule, last: bool, keep: bool) -> Iterator[None]:
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or not keep)
    yield
