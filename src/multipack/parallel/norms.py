"""Norms of tensors that are sharded or replicated over ranks: every element counts once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from multipack.parallel.mesh import Mesh
from multipack.parallel.state import local


@torch.no_grad()
def squared_norms(
    tensors: Mapping[str, Tensor], names: Sequence[str], mesh: Mesh, duplicates: Collection[str] = ()
) -> dict[str, float]:
    """Squared 2-norm of every tensor of the model over all ranks; collective where ranks hold different tensors.

    Σ over ranks of |piece|² / copies, where `copies` ranks hold the same piece.

    Args:
        tensors: what this rank holds, by name; missing ones count as zeros.
        names: of all the model's tensors, the same on every rank.
        mesh: the ranks.
        duplicates: names that this rank holds and another stage of its pipeline counts.

    Returns:
        In the order of `names`, the same on every rank.
    """
    held = {name: tensor for name, tensor in tensors.items() if name not in duplicates}
    squares = dict.fromkeys(names, 0.0)
    if held:
        is_double = any(tensor.dtype == torch.float64 for tensor in held.values())
        dtype = torch.float64 if is_double else torch.float32
        found = torch._foreach_norm([local(tensor) for tensor in held.values()], 2, dtype)
        weights = [1.0 / count_copies(tensor, mesh) for tensor in held.values()]
        values = torch.stack([each.to(mesh.world.device) for each in found]).double().square().tolist()
        squares |= {name: value * weight for name, value, weight in zip(held, values, weights, strict=True)}
    if mesh.is_plain:
        return squares
    return dict(zip(names, mesh.world.sum(list(squares.values())), strict=True))


def count_copies(tensor: Tensor, mesh: Mesh) -> int:
    """Number of ranks that hold the same piece of a tensor; 1 on a plain mesh, where norms are not summed."""
    if mesh.is_plain:
        return 1
    pieces = 1
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Partial):
                raise ValueError("a tensor of partial sums has no norm before it is reduced")
            if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
                pieces *= tensor.device_mesh.size(axis)
    return mesh.world.size // mesh.sizes["pp"] // pieces
