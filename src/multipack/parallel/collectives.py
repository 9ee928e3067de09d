"""Differentiable collectives of tensor and context parallelism, each a function of a tensor; exchange of bytes.

    function          forward pass                         backward pass
    identity          nothing is sent                      all-reduce
    all_reduce        every rank gets the sum              all-reduce
    all_gather        every rank gets all pieces           reduce-scatter
    reduce_scatter    every rank gets a piece of the sum   all-gather
    all_to_all        every rank sends each rank a piece   all-to-all

All ranks of the group must call a function with tensors of one shape, dtype and device type; `group=None` means all
ranks of the run. Every function returns a new contiguous tensor.

**Gradients.** A collective is a linear map from the inputs of all ranks to their outputs. Its backward pass is the
transposed map, itself a collective, which every rank must run. The loss is the sum of the losses of all ranks;
`identity` is the f of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""The ranks that take part; None = all ranks of the run."""

# torch 2.13 renamed these functions, and the older names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def identity(tensor: Tensor, group: Group = None) -> Tensor:
    """Use one value, equal on all ranks, in computations that differ between ranks.

                      ┌─▶ rank 0   x ─▶ y₀            dy₀ ─┐
        x  (the same  │   rank 1   x ─▶ y₁    and     dy₁ ─┼─ dx = Σ dyᵣ  everywhere
         everywhere) ─┴─▶ rank 2   x ─▶ y₂  backward  dy₂ ─┘

    That it is the same is not checked. The gradient is the sum of the ranks' gradients.
    """
    return _apply(tensor, lambda own: own.view_as(own), lambda gradient: _sum(gradient, group))


def all_reduce(tensor: Tensor, group: Group = None) -> Tensor:
    """Sum the ranks' tensors, for computations that differ between ranks. The gradient is an all-reduce, too."""
    return _apply(tensor, lambda own: _sum(own, group), lambda gradient: _sum(gradient, group))


def all_gather(tensor: Tensor, group: Group = None) -> Tensor:
    """Join all ranks' pieces along the first dimension. The gradient is a reduce-scatter.

    rank 0   x₀ ─┐     ┌─▶ x₀ x₁ x₂
    rank 1   x₁ ─┼─────┼─▶ x₀ x₁ x₂
    rank 2   x₂ ─┘     └─▶ x₀ x₁ x₂
    """

    def move(own: Tensor) -> Tensor:
        whole = own.new_empty((dist.get_world_size(group) * own.shape[0], *own.shape[1:]))
        all_gather_single(whole, own.contiguous(), group=group)
        return whole

    return _apply(tensor, move, lambda gradient: reduce_scatter(gradient, group))


def reduce_scatter(tensor: Tensor, group: Group = None) -> Tensor:
    """Sum over ranks; every rank gets its piece of the sum. The gradient is an all-gather.

        rank 0   a₀ b₀ c₀ ─┐     ┌─▶ Σ aᵣ
        rank 1   a₁ b₁ c₁ ─┼─────┼─▶ Σ bᵣ
        rank 2   a₂ b₂ c₂ ─┘     └─▶ Σ cᵣ

    The first dimension is a multiple of the number of ranks.
    """

    def move(own: Tensor) -> Tensor:
        piece = own.new_empty((own.shape[0] // dist.get_world_size(group), *own.shape[1:]))
        reduce_scatter_single(piece, own.contiguous(), group=group)
        return piece

    return _apply(tensor, move, lambda gradient: all_gather(gradient, group))


def all_to_all(tensor: Tensor, split_dim: int = 0, join_dim: int = 0, group: Group = None) -> Tensor:
    """Split every rank's tensor, send the r-th piece to rank r, join what arrives. The gradient is sent back.

        rank 0   a₀ b₀ c₀ ─┐     ┌─▶ a₀ a₁ a₂
        rank 1   a₁ b₁ c₁ ─┼─────┼─▶ b₀ b₁ b₂
        rank 2   a₂ b₂ c₂ ─┘     └─▶ c₀ c₁ c₂

    With `split_dim=1, join_dim=0` a shard of the tokens with all heads, (T/n, H, D), becomes all tokens with a shard of
    the heads, (T, H/n, D): the exchange of Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509).

    `split_dim` is a multiple of the number of ranks. Pieces are joined in the order of their ranks.
    """

    def move(own: Tensor) -> Tensor:
        sent = torch.stack(own.chunk(dist.get_world_size(group), split_dim))
        received = own.new_empty(sent.shape)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join_dim)

    return _apply(tensor, move, lambda gradient: all_to_all(gradient, join_dim, split_dim, group))


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


def _sum(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _apply(tensor: Tensor, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Linear.apply(tensor, move, back)  # type: ignore[no-untyped-call]
    return result


# Bytes. torch's functions for objects unpickle what arrives, which runs code of any process that reaches the port.


def gather_bytes(own: bytes, group: Group = None) -> list[bytes]:
    """Every rank's bytes, by rank of the group."""
    sizes = _tensor([len(own)], group).new_empty(dist.get_world_size(group))
    all_gather_single(sizes, _tensor([len(own)], group), group=group)
    lengths = sizes.tolist()
    if not any(lengths):
        return [b""] * len(lengths)
    padded = _tensor(own.ljust(max(lengths), b"\0"), group)
    received = padded.new_empty(len(lengths) * padded.numel())
    all_gather_single(received, padded, group=group)
    rows = received.cpu().reshape(len(lengths), -1)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(own: bytes, source: int = 0, group: Group = None) -> bytes:
    """The bytes of rank `source` of the run, on every rank of the group."""
    size = _tensor([len(own)], group)
    dist.broadcast(size, source, group=group)
    if not int(size):
        return b""
    is_source = dist.get_rank() == source
    content = _tensor(own if is_source else bytes(int(size)), group)
    dist.broadcast(content, source, group=group)
    return own if is_source else content.cpu().numpy().tobytes()


def scatter_bytes(each: Sequence[bytes] | None, source: int, group: Group = None) -> Tensor:
    """This rank's entry of the bytes that rank `source` of the run has for every rank of the group, as a tensor.

    `each` is None on all ranks but the source.
    """
    count = dist.get_world_size(group)
    sizes = _tensor([len(entry) for entry in each] if each else [0] * count, group)
    dist.broadcast(sizes, source, group=group)
    lengths = sizes.tolist()
    padded = [_tensor(entry.ljust(max(lengths), b"\0"), group) for entry in each] if each else None
    own = torch.empty(max(lengths), dtype=torch.uint8, device=sizes.device)
    dist.scatter(own, padded, source, group=group)
    return own[: lengths[dist.get_rank(group)]]


def _tensor(values: bytes | list[int], group: Group) -> Tensor:
    """Bytes, at least one, or integers as a tensor on the device of the group's backend."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    if isinstance(values, list):
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).to(device)
