"""ZeRO 2 and 3, FSDP and HSDP by torch's `fully_shard` (FSDP2): ranks hold shards, and one block whole at a time.

    at rest           rank 0 ▐ ¼ ▌  rank 1 ▐ ¼ ▌  rank 2 ▐ ¼ ▌  rank 3 ▐ ¼ ▌    parameters and optimizer state
    a block's turn    gathered, used, and freed again (zero3, hsdp) or kept for the backward pass (zero2)
    its gradient      reduced and scattered in every micro-batch: whole only while it is computed

A unit is a block; what is outside of blocks (embedding, last norm, head) is one more, which stays whole from the
beginning of the forward pass to the end of the backward pass, as both ends use it. Stages are those of Rajbhandari et
al. 2020 (arXiv:1910.02054) but for zero2's parameters, which are sharded at rest too.

With a mesh of two dimensions, groups × shards, groups hold the same shards (HSDP): gradients are scattered within a
group in every micro-batch and summed over groups once a step. Groups of one rank are plain data parallelism, also for
parameters that are `DTensor`s of tensor parallelism already: nothing is gathered, and gradients are all-reduced once
a step. That costs a copy of one unit's parameters at a time, and nothing else.
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
) -> None:
    """Shard a model's parameters, gradients and (through its parameters) optimizer state over a mesh, in place.

    Parameters become `DTensor`s and keep their names; they are whole in forward and backward passes only. The model
    may be on the meta device. Gradients are means over the mesh, in float32.

    Args:
        model: has `blocks`, and is called as a module: gathering hangs on its forward pass.
        mesh: of one dimension, over which everything is sharded, or of two: groups that hold the same, and the ranks
            of a group, over which it is sharded.
        reshard: free a block's parameters after its forward pass and gather them again for its backward pass.
        dtype: of gathered parameters, and so of what is computed: bfloat16 gathers half the bytes. Shards, reduction
            and optimizer stay float32, and so do inputs such as rotary tables.
        offload: keep shards of parameters and gradients, and so the optimizer and its state, in host memory.

    Raises:
        ValueError: a precision other than these two (float16's scaled gradients would overflow unseen in the
            reduction); a mesh of more dimensions.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"parameters cannot be sharded in {str(dtype).removeprefix('torch.')}: use train.dtype=bf16 or fp32, or"
            " parallel.data=ddp or zero1 without tensor and pipeline parallelism, which scale fp16's gradients"
        )
    if mesh.ndim > 2:
        raise ValueError(
            f"a mesh of shards is (shards) or (groups, shards), and this has {mesh.ndim} dimensions"
        )
    # Inputs are not cast: the embedding gives the parameters' dtype; tables and the loss's weights are to stay wide.
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    pinned = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    alike: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": policy}
    for block in model.get_submodule("blocks").children():
        fully_shard(block, reshard_after_forward=reshard, **alike)
    fully_shard(model, reshard_after_forward=False, **alike)
    model.register_forward_hook(_free_without_backward)


def _free_without_backward(model: nn.Module, inputs: Any, output: Any) -> None:
    """Free what is kept for a backward pass where there will be none: it would outlive the evaluation."""
    if not torch.is_grad_enabled():
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def synchronizing(model: nn.Module, *, keep: bool = False) -> Callable[[bool], AbstractContextManager[None]]:
    """When ranks synchronize in a step: a function from "is this the last micro-batch?" to the context it runs in.

    - DDP reduces gradients in the last micro-batch alone. Until then a rank's gradient is its own.
    - Shards reduce and scatter gradients in every micro-batch. Once a step would be less traffic, but a rank would hold
      the whole gradient meanwhile, and not to hold it is what sharding is for. Groups that hold the same shards sum
      them in the last micro-batch alone.

    Args:
        model: sharded, or in DDP; any other does not synchronize.
        keep: keep gathered parameters until the last backward pass, so that they are gathered once a step: for
            `shard(…, reshard=False)`, which holds them whole in every micro-batch anyway.
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
