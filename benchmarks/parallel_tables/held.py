"""Bytes that a rank holds: of storages, each of which counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from multipack.parallel.state import local


@torch.no_grad()
def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address → bytes of the storages of this rank's parts."""
    held = [local(each.detach()).untyped_storage() for each in tensors]
    return {each.data_ptr(): each.nbytes() for each in held}


def parameters_of(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters of modules, gathered ones too, and their shards, which the optimizer has."""
    shards = [each for group in optimizer.param_groups for each in group["params"]]
    return [*shards, *(each for module in modules for each in module.parameters())]


def bytes_held(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state."""
    held = parameters_of(modules, optimizer)
    slots = [value for state in optimizer.state.values() for value in state.values()]
    kinds = {
        "parameters": held,
        "gradients": [each.grad for each in held if each.grad is not None],
        "optimizer": [value for value in slots if isinstance(value, Tensor) and value.ndim],
    }
    return {kind: sum(storages(tensors).values()) for kind, tensors in kinds.items()}


class Saved:
    """Counts the bytes that autograd saves; those of parameters do not count.

    Attributes:
        now, most: bytes that are saved, and the most so far.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.modules, self.optimizer = modules, optimizer
        self.users, self.now, self.most = Counter[int](), 0, 0

    def parameters(self) -> dict[int, int]:
        """Address → bytes of the storages of parameters, as they are."""
        return storages(parameters_of(self.modules, self.optimizer))

    def keep(self, tensor: Tensor) -> _Kept:
        """Count a tensor that autograd saves."""
        ((place, size),) = storages([tensor]).items()
        return _Kept(self, tensor, place, 0 if place in self.parameters() else size)


@dataclass
class _Kept:
    """A saved tensor, counted until autograd lets it go."""

    saved: Saved
    tensor: Tensor
    place: int
    size: int

    def __post_init__(self) -> None:
        self.saved.users[self.place] += 1
        if self.saved.users[self.place] == 1:
            self.saved.now += self.size
            self.saved.most = max(self.saved.most, self.saved.now)

    def __del__(self) -> None:
        self.saved.users[self.place] -= 1
        if not self.saved.users[self.place]:
            self.saved.now -= self.size
