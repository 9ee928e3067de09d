"""Named tensors of a model and its optimizer on any number of ranks: state, saved values, pieces and norms.

A tensor has its name in the whole model. A rank holds it whole, as a shard (a `DTensor`), or not at all.

`torch.distributed.checkpoint.state_dict` names optimizer state in the same way, but only for one module with state for
all of its parameters: a rank may hold several stages of a pipeline, and under ZeRO-1 the state of some parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from multipack.parallel.mesh import Mesh

State = dict[str, dict[str, Tensor]]
"""Group ("model", "optimizer", …) → name → tensor; a `DTensor` where ranks hold shards."""


class StateSource(Protocol):
    """Saved tensors by group and name, such as a checkpoint's."""

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of a group's tensors; empty if there is no such group."""
        ...

    def fill(self, group: str, into: Mapping[str, Tensor]) -> None:
        """Copy saved values into tensors of the same names, in place; a shard receives its part of the whole."""
        ...


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Live state tensors of an optimizer as "<parameter>.<slot>", such as "head.weight.exp_avg".

    A slot may have another shape than its parameter. Parameters without state (frozen, or under ZeRO-1 updated by
    another rank) have no entries.
    """
    return {
        f"{name}.{slot}": value
        for name, parameter in parameters.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state: a step with zero gradients and learning rate 0; gradients are cleared."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        for parameter in group["params"]:
            parameter.grad = None


def slot_difference(
    own: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]], trained: Collection[str]
) -> str:
    """How saved optimizer state differs from this rank's, for an error message; empty if it does not.

    `trained` are names of the model's parameters that this rank does not hold frozen.
    """
    parameters = {name.rpartition(".")[0] for name in own}
    unknown = [
        name
        for name in saved.keys() - own.keys()
        if (parameter := name.rpartition(".")[0]) in parameters or parameter not in trained
    ]
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    return difference(shapes, {name: shape for name, shape in saved.items() if name in own}, unknown)


def difference(
    own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], unknown: Collection[str]
) -> str:
    """How names and whole shapes of saved tensors differ from `own`, for an error message; empty if they do not."""
    reshaped = [
        f"{name} {tuple(saved[name])} instead of {tuple(shape)}"
        for name, shape in own.items()
        if name in saved and tuple(saved[name]) != tuple(shape)
    ]
    problems = {"lacks": sorted(own.keys() - saved.keys()), "has unknown": sorted(unknown)}
    for problem, names in (problems | {"has other shapes:": reshaped}).items():
        if names:
            return f"{problem} {', '.join(names[:3])} ({len(names)} in all)"
    return ""


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_range(tensor: Tensor) -> tuple[slice, ...]:
    """The part of the whole tensor that this rank holds, as a slice of each dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    place = tensor.shape, tensor.device_mesh, tensor.placements
    sizes, offsets = compute_local_shape_and_global_offset(*place)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


def piece_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this rank holds if it is sharded like `like`: a view."""
    return whole[local_range(like)]


@torch.no_grad()
def squared_norm(tensors: Mapping[str, Tensor], mesh: Mesh, duplicates: Collection[str] = ()) -> Tensor:
    """Squared 2-norm of the model's tensors over all ranks, on the run's device: 0-d float64; collective.

    Tensors that this rank lacks count as zeros. Another stage of its pipeline counts `duplicates`.
    """
    total = _squares([tensor for name, tensor in tensors.items() if name not in duplicates], mesh).sum()
    if not mesh.is_plain:
        dist.all_reduce(total)
    return total


def _squares(tensors: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """(tensors,) float64 on the run's device: squared norms of the pieces, each divided by the ranks that hold it."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=mesh.world.device)
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32
    norms = torch._foreach_norm([local(each) for each in tensors], 2, dtype)
    shares = torch._foreach_mul(norms, [_copies(each, mesh) ** -0.5 for each in tensors])
    return torch.stack(shares).to(mesh.world.device).double().square()


def _copies(tensor: Tensor, mesh: Mesh) -> int:
    """Number of ranks that hold the same piece of a tensor; 1 on a plain mesh, where norms are not summed."""
    if mesh.is_plain:
        return 1
    pieces = 1
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
                pieces *= tensor.device_mesh.size(axis)
    return mesh.world.size // mesh.sizes["pp"] // pieces
