"""Context parallelism: ranks divide the tokens of every pack, and attention sees the tokens of all ranks.

    ulysses    rank 0  a a a b      tokens ↔ heads     all of a a a b b b b c with half of the heads: the model's own
               rank 1  b b b c      all-to-all         attention, windows included; then back

    ring       rank 0  a a · · · · b c                 two chunks per rank; keys and values of documents that cross
               rank 1  · · a b b b · ·                 chunks are sent to the ranks that need them (ring.py)

Everything but attention works on each token alone and is unchanged: `divide_context` replaces the `attend` of every
module that has one, and returns a function from a pack to this rank's share of it. Losses and gradients of the ranks
sum to those of the whole pack. Elements that a rank sends per layer and pack of T slots, forward (n ranks, H query
heads and K key heads of width D on this rank):

    ulysses    (n − 1)/n · T/n · (2 H + 2 K) · D       and as much backward; K is first repeated to a multiple of n
    ring       at most 2 (n − 1) · T/n · K · D         and twice as much backward; less for shorter documents

Ulysses is Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from multipack.data.batch import IGNORE, PackedBatch, PackedTree
from multipack.ops.autocast import in_autocast_dtype
from multipack.parallel.collectives import Group, all_to_all
from multipack.parallel.parallel_config import ContextMethod
from multipack.parallel.ring import Ring, head_tail, ring_attention

DIVIDED = ("input_ids", "targets", "position_ids", "weights")
"""Tensors of a pack that ranks divide; `weights` may be None."""
Attend = Callable[..., Tensor]
"""(query, key, value, batch, backend, window) → (tokens, H, D)."""


@dataclass(frozen=True, kw_only=True)
class ContextBatch(PackedBatch):
    """One rank's tokens of a pack.

    The tensors of `DIVIDED` are this rank's (T/ranks,), and `num_target_tokens` counts its targets. All other fields
    are those of the whole pack. Where documents share tokens, `targets` and `weights`, and the rows of targets in
    `tree`, are those of this rank's slots.

    Attributes:
        whole: the whole pack.
        ring: this rank's work in a ring; None = Ulysses.
        own_cu_seqlens: (N + 1,) int32 starts of the documents' pieces in this rank's chunks; None = Ulysses.
    """

    whole: PackedBatch
    ring: Ring | None = None
    own_cu_seqlens: Tensor | None = None

    def _each(self, change: Callable[[Tensor], Tensor]) -> ContextBatch:
        whole = self.whole._each(change)
        held = {name: getattr(self, name) for name in (*DIVIDED, "own_cu_seqlens")}
        changed: dict[str, Any] = {name: change(value) for name, value in held.items() if value is not None}
        tree = None if self.tree is None else self.tree._each(change)
        return replace(self, **changed, cu_seqlens=whole.cu_seqlens, whole=whole, tree=tree)


def divide_context(
    model: nn.Module, mesh: DeviceMesh, method: ContextMethod
) -> Callable[[PackedBatch], ContextBatch]:
    """Make the model attend over tokens that the ranks of `mesh` divide, in place; collective.

    The number of heads follows from the tensors, so tensor parallelism may be applied first.

    Args:
        model: has modules with `attend` (query, key, value, batch, backend, window).
        mesh: of one dimension; its ranks hold the same model and get the same packs.
        method: how ranks attend to each other's tokens.

    Returns:
        A function from a pack to this rank's share, which the model takes instead. It counts targets, so call it
        before the pack is moved to a GPU.

    Raises:
        ValueError: no module has `attend`.
    """
    modules: list[Any] = [module for module in model.modules() if callable(getattr(module, "attend", None))]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no module with `attend`, so its attention cannot see the tokens of other"
            " ranks: use parallel.context=1"
        )
    group = mesh.get_group()
    if method == "ring":
        # nccl opens a group's connections in its first collective, which needs all ranks; in a ring, some may have
        # nothing to send.
        torch.distributed.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)
    for module in modules:
        attend = _ring if method == "ring" else partial(_ulysses, module.attend)
        # torch.compile cannot trace code that reads lengths on the host and communicates.
        module.attend = torch.compiler.disable(partial(attend, group))  # type: ignore[no-untyped-call]
    return partial(_share, mesh.get_local_rank(), mesh.size(), method)


def _share(rank: int, ranks: int, method: ContextMethod, batch: PackedBatch) -> ContextBatch:
    """A rank's share of a pack, whose slots ranks must divide evenly."""
    slots, multiple = batch.num_slots, ranks * (2 if method == "ring" else 1)
    if not slots or slots % multiple:
        near = max(multiple, slots // multiple * multiple)
        raise ValueError(
            f"a pack of {slots:,} slots cannot be divided evenly by parallel.context={ranks} ({method}): pad packs to"
            f" a multiple of {multiple}, such as {near:,} (plan.capacity, and pad_to=capacity)"
        )
    ring = starts = None
    pieces: tuple[slice, ...] = (slice(rank * slots // ranks, (rank + 1) * slots // ranks),)
    if method == "ring":
        if batch.tree is not None:
            raise ValueError(
                "parallel.context_method=ring sends the keys of whole documents, and these share tokens: use"
                " parallel.context_method=ulysses, or data.share_prefixes=off"
            )
        pieces, ring = head_tail(slots, rank, ranks), Ring.of(batch.lengths, rank, ranks)
        starts = torch.tensor(
            [0, *accumulate(ring.lengths)], dtype=torch.int32, device=batch.cu_seqlens.device
        )
    own: dict[str, Any] = {
        name: torch.cat([tensor[piece] for piece in pieces])
        for name in (DIVIDED if batch.tree is None else ("input_ids", "position_ids"))
        if (tensor := getattr(batch, name)) is not None
    }
    if batch.tree is not None:
        own |= _targets_of(batch, batch.tree, pieces[0])
    held = vars(batch) | own | {"num_target_tokens": int((own["targets"] != IGNORE).sum())}
    return ContextBatch(**held, whole=batch, ring=ring, own_cu_seqlens=starts)


def _targets_of(batch: PackedBatch, tree: PackedTree, piece: slice) -> dict[str, Any]:
    """The targets of some slots of a pack whose documents share tokens, and a tree with their rows."""
    inside = (tree.loss_slots >= piece.start) & (tree.loss_slots < piece.stop)
    kept = inside[tree.target_rows]
    rows = inside.cumsum(0) - 1  # of the slots inside, counted from 0
    return {
        "targets": batch.targets[kept],
        "weights": None if batch.weights is None else batch.weights[kept],
        "tree": replace(
            tree,
            loss_slots=tree.loss_slots[inside] - piece.start,
            target_rows=rows[tree.target_rows[kept]],
        ),
    }


def _ulysses(
    attend: Attend,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    backend: str,
    window: int | None,
) -> Tensor:
    """Exchange some tokens of all heads for all tokens of some heads, attend, and exchange back."""
    whole, ranks = _checked(batch).whole, torch.distributed.get_world_size(group)
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))  # before it is sent: half of the bytes
    # Where the ranks do not divide the key heads, several ranks read one key head, each its own copy.
    copies = math.lcm(k.shape[1], ranks) // k.shape[1]
    if copies > 1:
        k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    shares = [x.reshape(len(x), ranks, -1, x.shape[2]) for x in (q, k, v)]
    sizes = [share.shape[2] for share in shares]
    mixed = all_to_all(torch.cat(shares, dim=2).flatten(1, 2), split_dim=1, join_dim=0, group=group)
    out = attend(*torch.split(mixed, sizes, dim=1), whole, backend, window)
    return all_to_all(out, split_dim=0, join_dim=1, group=group)


def _ring(
    group: Group, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, backend: str, window: int | None
) -> Tensor:
    """Attend in a ring, which has its own kernels and no window; arguments are those of `Attend`."""
    share = _checked(batch)
    assert share.ring is not None and share.own_cu_seqlens is not None, "a share for Ulysses"  # noqa: PT018
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    return ring_attention(q, k, v, share.ring, share.own_cu_seqlens, group)


def _checked(batch: PackedBatch) -> ContextBatch:
    """The batch, if it is a share of a pack; raises a ValueError otherwise."""
    if isinstance(batch, ContextBatch):
        return batch
    raise ValueError(
        "this model's attention expects one rank's share of a pack, and got a whole pack: call the function that"
        " divide_context returned on it"
    )
