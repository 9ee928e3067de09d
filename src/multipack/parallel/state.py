"""Named tensors of a model and its optimizer, on however many ranks, and where saved ones come from.

names are those of a whole model in one process; a rank may hold a tensor whole, a shard of it, or not at all
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

State = dict[str, dict[str, Tensor]]
"""Group ("model", "optimizer", …) → name → tensor; a `DTensor` where ranks hold shards."""


class Source(Protocol):
    """Saved tensors that can be read piece by piece: a checkpoint, or tensors in memory."""

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of a group's tensors; empty = there is no such group."""
        ...

    def fill(self, group: str, into: Mapping[str, Tensor]) -> None:
        """Copy saved values into tensors of these names, in place: into shards what they hold of the whole.

        Collective: every rank calls it, with whatever it holds.
        """
        ...


class Whole:
    """Whole tensors in this process's memory, the same on every rank."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._tensors = tensors

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """See `Source`."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.get(group, {}).items()}

    @torch.no_grad()
    def fill(self, group: str, into: Mapping[str, Tensor]) -> None:
        """See `Source`."""
        for name, tensor in into.items():
            local(tensor).copy_(piece_of(self._tensors[group][name], tensor))


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which ranks may hold pieces; collective where they do."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    level = log.level
    log.setLevel(logging.ERROR)  # torch warns, on every rank, that shards of pieces are gathered axis by axis
    try:
        return tensor.full_tensor()
    finally:
        log.setLevel(level)


def piece_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of `whole`, if it is divided as `like` is: a view."""
    if not isinstance(like, DTensor):
        return whole
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole
