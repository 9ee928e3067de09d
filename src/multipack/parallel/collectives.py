"""Differentiable collectives: what tensor and context parallelism exchange, each as a function of a tensor.

    identity          nothing moves           all_gather        every rank gets all pieces
    its gradient      summed over ranks       its gradient      reduce_scatter: every rank gets one piece of the sum
                                              all_to_all        every rank sends every rank a piece

All ranks of the group must call a function with tensors of one shape, dtype and device type; `group=None` means all
ranks of the run, and a process on its own is a group of one. Every function returns a new contiguous tensor.

**Gradients.** A collective is a linear map from what all ranks hold to what all ranks get. Its backward pass is the
transposed map, itself a collective (beside each other above), which every rank must run. The loss is the sum of the
losses of all ranks; the argument of `identity` is one value that all ranks hold (Megatron-LM's f; Shoeybi et al. 2019,
arXiv:1909.08053, section 3).

**Failures.** After a collective that fails or exceeds the group's timeout under gloo (nccl's watchdog ends the process
instead), ranks look for each other through the store, so that the error names the ranks that are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.parallel.rollcall import Group, missing_ranks, place_in

GRACE_SECONDS = 5.0
"""How long ranks whose collective failed wait for each other before they name the missing ones."""

# Names since torch 2.13, where the older ones warn.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def identity(tensor: Tensor, group: Group = None) -> Tensor:
    """Pass one value that all ranks hold to work that differs from rank to rank.

                      ┌─▶ rank 0   x ─▶ y₀            dy₀ ─┐
        x  (the same  │   rank 1   x ─▶ y₁    and     dy₁ ─┼─ dx = Σ dyᵣ  everywhere
         everywhere) ─┴─▶ rank 2   x ─▶ y₂  backward  dy₂ ─┘

    Args:
        tensor: the same value on all ranks, which is not checked.
        group: the ranks that use it, each in its own way.

    Returns:
        `tensor`; its gradient is the sum of the ranks' gradients.
    """

    def back(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        run_collective("all_reduce", dist.all_reduce, group, total)
        return total

    return _apply(tensor, place_in(group)[1], lambda own: own.view_as(own), back)


def all_gather(tensor: Tensor, dim: int = 0, group: Group = None) -> Tensor:
    """Join all ranks' pieces. The gradient is a reduce-scatter.

        rank 0   x₀ ─┐     ┌─▶ x₀ x₁ x₂ x₃
        rank 1   x₁ ─┤     ├─▶ x₀ x₁ x₂ x₃
        rank 2   x₂ ─┤     ├─▶ x₀ x₁ x₂ x₃
        rank 3   x₃ ─┘     └─▶ x₀ x₁ x₂ x₃

    Args:
        tensor: this rank's piece, of one shape on all ranks.
        dim: dimension along which pieces are joined.
        group: the ranks that take part.

    Returns:
        Like `tensor`; `dim` is larger by the number of ranks.
    """
    size = place_in(group)[1]

    def move(own: Tensor) -> Tensor:
        piece = own.movedim(dim, 0).contiguous()
        whole = _empty(own, (size * piece.shape[0], *piece.shape[1:]))
        run_collective("all_gather", _all_gather_single, group, whole, piece)
        return whole.movedim(0, dim).contiguous()

    return _apply(tensor, size, move, lambda gradient: reduce_scatter(gradient, dim, group))


def reduce_scatter(tensor: Tensor, dim: int = 0, group: Group = None) -> Tensor:
    """Sum over ranks; every rank gets its piece of the sum. The gradient is an all-gather.

        rank 0   a₀ b₀ c₀ d₀ ─┐     ┌─▶ Σ aᵣ
        rank 1   a₁ b₁ c₁ d₁ ─┤     ├─▶ Σ bᵣ
        rank 2   a₂ b₂ c₂ d₂ ─┤     ├─▶ Σ cᵣ
        rank 3   a₃ b₃ c₃ d₃ ─┘     └─▶ Σ dᵣ

    Args:
        tensor: of one shape on all ranks; `dim` is a multiple of their number.
        dim: dimension along which the sum is split.
        group: the ranks that take part.

    Returns:
        Like `tensor`; `dim` is smaller by the number of ranks.

    Raises:
        ValueError: `dim` is not a multiple of the number of ranks.
    """
    size = _divisor("reduce_scatter", tensor, dim, group)

    def move(own: Tensor) -> Tensor:
        whole = own.movedim(dim, 0).contiguous()
        piece = _empty(own, (whole.shape[0] // size, *whole.shape[1:]))
        run_collective("reduce_scatter", _reduce_scatter_single, group, piece, whole)
        return piece.movedim(0, dim).contiguous()

    return _apply(tensor, size, move, lambda gradient: all_gather(gradient, dim, group))


def all_to_all(tensor: Tensor, split_dim: int = 0, join_dim: int = 0, group: Group = None) -> Tensor:
    """Split every rank's tensor, send the r-th piece to rank r, join what arrives. The gradient is sent back.

        rank 0   a₀ b₀ c₀ d₀ ─┐     ┌─▶ a₀ a₁ a₂ a₃
        rank 1   a₁ b₁ c₁ d₁ ─┤     ├─▶ b₀ b₁ b₂ b₃
        rank 2   a₂ b₂ c₂ d₂ ─┤     ├─▶ c₀ c₁ c₂ c₃
        rank 3   a₃ b₃ c₃ d₃ ─┘     └─▶ d₀ d₁ d₂ d₃

    With `split_dim=1, join_dim=0` a shard of the tokens with all heads, (T/n, H, D), becomes all tokens with a shard of
    the heads, (T, H/n, D): the exchange of Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509).

    Args:
        tensor: of one shape on all ranks; `split_dim` is a multiple of their number.
        split_dim: dimension along which it is split.
        join_dim: dimension along which pieces are joined, in the order of their ranks.
        group: the ranks that take part.

    Returns:
        Like `tensor`; `split_dim` is smaller and `join_dim` larger by the number of ranks.

    Raises:
        ValueError: `split_dim` is not a multiple of the number of ranks.
    """
    size = _divisor("all_to_all", tensor, split_dim, group)

    def move(own: Tensor) -> Tensor:
        sent = torch.stack(own.chunk(size, split_dim))
        received = _empty(own, sent.shape)
        run_collective("all_to_all", dist.all_to_all_single, group, received, sent)
        return torch.cat(received.unbind(), join_dim)

    return _apply(tensor, size, move, lambda gradient: all_to_all(gradient, join_dim, split_dim, group))


def run_collective(name: str, collective: Callable[..., Any], group: Group, *tensors: Any) -> None:
    """Run a collective of torch.distributed; if it fails, find out which ranks are missing.

    Raises:
        TimeoutError: ranks are missing; they are named.
        RuntimeError: the backend's own error, if all ranks are there.
    """
    try:
        collective(*tensors, group=group)
    except RuntimeError as error:
        missing = missing_ranks(group, GRACE_SECONDS)
        if missing:
            raise TimeoutError(
                f"{name} failed, because {missing} did not take part ({error}): look for an error there"
            ) from error
        raise


class _Linear(torch.autograd.Function):
    """A linear map whose transpose is known: `move` takes tensors forward, `back` takes gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return move(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _apply(
    tensor: Tensor, size: int, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply a differentiable collective; in a group of one every collective is a copy."""
    if size == 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    result: Tensor = _Linear.apply(tensor, move, back)  # type: ignore[no-untyped-call]
    return result


def _divisor(name: str, tensor: Tensor, dim: int, group: Group) -> int:
    """The number of ranks, which must divide a dimension."""
    size, length = place_in(group)[1], tensor.shape[dim]
    if length % size:
        raise ValueError(
            f"{name}: {size} ranks cannot share dimension {dim}, which is {length} long, evenly;"
            f" pad it to {-(-length // size) * size}"
        )
    return size


def _empty(tensor: Tensor, shape: Any) -> Tensor:
    """Contiguous memory to receive into, whatever the strides of `tensor`."""
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
