"""ZeRO 1: ranks that hold the same parameters divide optimizer state and steps (arXiv:1910.02054, stage "os").

    gradient (all-reduced)   A  B  C  D  E      the same on every rank
    rank 0 steps             A        D         and has optimizer state for these alone
    rank 1 steps                B  C     E
    broadcast                A  B  C  D  E      every rank has all new values

A rank owns whole tensors, so that any optimizer can be divided and computes what one process computes. Tensors are
assigned by size, the largest first, each to the rank with the least so far: shares are even unless one tensor is larger
than a share. torch's ZeroRedundancyOptimizer does the same for plain tensors and fails on `DTensor`s (torch 2.13: they
cannot be broadcast); here each rank broadcasts its local part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from multipack.parallel.state import local

BUCKET_BYTES = 64 * 2**20
"""Size up to which tensors are broadcast together."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: every rank steps the tensors that it owns and broadcasts their new values.

    `param_groups` hold all parameters, as the factory made them, and are read at every step; `state` has entries for
    this rank's own tensors only.

    Args:
        factory: makes the optimizer, from the names and tensors of all parameters.
        parameters: parameters by name; their values (of a `DTensor` the local part) are equal on every rank.
        mesh: the ranks, in one dimension.

    Attributes:
        owners: name of a trained parameter → rank of the mesh that owns it.
    """

    def __init__(
        self,
        factory: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
        parameters: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
    ) -> None:
        self._wrapped = factory(parameters)
        super().__init__(self._wrapped.param_groups, self._wrapped.defaults)
        self.state = self._wrapped.state
        self._group, self._rank = mesh.get_group(), mesh.get_local_rank()
        stepped = {id(each) for group in self.param_groups for each in group["params"]}
        trained = {name: each for name, each in parameters.items() if id(each) in stepped}
        self.owners = assign_owners(
            {name: local(each).numel() for name, each in trained.items()}, mesh.size()
        )
        self._owned: list[list[nn.Parameter]] = [[] for _ in range(mesh.size())]
        for name, parameter in trained.items():
            self._owned[self.owners[name]].append(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step this rank's tensors, then exchange values; collective. Gradients are not changed."""
        others = [each for rank, held in enumerate(self._owned) if rank != self._rank for each in held]
        gradients = [each.grad for each in others]
        for parameter in others:
            parameter.grad = None  # optimizers skip parameters without gradients, and make no state for them
        try:
            self._wrapped.step()
        finally:
            for parameter, gradient in zip(others, gradients, strict=True):
                parameter.grad = gradient
        for owner, held in enumerate(self._owned):
            if held:
                values = [local(each) for each in held]
                dist._broadcast_coalesced(self._group, values, BUCKET_BYTES, owner)  # type: ignore[attr-defined]


def assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign tensors to ranks: the largest first, each to the first rank with the least so far.

    No rank has more than the mean plus the largest tensor.
    """
    loads, owners = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners
