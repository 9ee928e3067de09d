"""Context parallelism: ranks divide the tokens of every pack, and attention sees the tokens of all ranks.

    ulysses    rank 0  a a a b      tokens ↔ heads     all of a a a b b b b c with half of the heads: the model's own
               rank 1  b b b c      all-to-all         attention, windows included; then back

    planned    rank 0  b b b b      whole documents where they fit, and where a document is divided, keys and values to
               rank 1  a a a c      the ranks that need them (planned.py), as planning/placement.py places them

Everything but attention works on each token alone and is unchanged: `divide_context` replaces the `attend` of every
module that has one, and returns a function from a pack to this rank's share of it. Losses and gradients of the ranks
sum to the whole pack's. Elements that a rank sends per layer and pack of T slots, forward (n ranks, H query heads and
K key heads of width D on this rank):

    ulysses    (n − 1)/n · T/n · (2 H + 2 K) · D       and as much backward; K is first repeated to a multiple of n
    planned    2 K · D for each token that another rank needs, once for each such rank; twice as much backward

With `planned`, a pack for which Ulysses is cheaper is exchanged by Ulysses, if the ranks divide the heads.

Ulysses is Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from multipack.data.packs.batch import PackedBatch, PackedTree
from multipack.data.views.documents import IGNORE
from multipack.ops.autocast import in_autocast_dtype
from multipack.parallel.collectives import Group, all_to_all
from multipack.parallel.planned import Schedule, planned_attention
from multipack.planning.placement import Placing

DIVIDED = {"input_ids": 0, "targets": IGNORE, "position_ids": 0, "weights": 0}
"""Tensors of a pack that ranks divide, and their values in padding; `weights` may be None."""
LOSS = ("targets", "weights")
"""Tensors with an entry for each target, not for each token, in a pack whose documents share tokens."""
Attend = Callable[..., Tensor]
"""(query, key, value, batch, backend, window, cap) → (tokens, H, D)."""


@dataclass(frozen=True, kw_only=True)
class ContextBatch(PackedBatch):
    """One rank's tokens of a pack.

    The tensors of `DIVIDED` hold this rank's (T/ranks,) part, and `num_target_tokens` counts its targets. All other
    fields describe the whole pack. Where documents share tokens, `targets`, `weights` and the rows of targets in `tree`
    cover this rank's slots.

    Attributes:
        whole: the whole pack.
        schedule: this rank's work where a placement divides the documents; None = Ulysses.
    """

    whole: PackedBatch
    schedule: Schedule | None = None


def divide_context(
    model: nn.Module, mesh: DeviceMesh, placing: Placing | None = None
) -> Callable[[PackedBatch], ContextBatch]:
    """Make the model attend over tokens that the ranks of `mesh` divide, in place; collective.

    The number of heads follows from the tensors, so tensor parallelism may be applied first.

    Args:
        model: a model of modules with `attend`, an `Attend`.
        mesh: a mesh of one dimension, whose ranks hold the same model and get the same packs.
        placing: rule that places documents on ranks; None = every pack is exchanged by Ulysses.

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
    for module in modules:
        # torch.compile cannot trace code that reads lengths on the host and communicates.
        module.attend = torch.compiler.disable(partial(_attend, module.attend, group))  # type: ignore[no-untyped-call]
    return partial(_share, mesh.get_local_rank(), mesh.size(), placing)


def _share(rank: int, ranks: int, placing: Placing | None, batch: PackedBatch) -> ContextBatch:
    """A rank's share of a pack, whose slots ranks must divide evenly."""
    slots, multiple = batch.num_slots, ranks * (placing.multiple if placing else 1)
    if not slots or slots % multiple:
        near = max(multiple, slots // multiple * multiple)
        raise ValueError(
            f"a pack of {slots:,} slots cannot be divided evenly by parallel.context={ranks}: pad packs to"
            f" a multiple of {multiple}, such as {near:,} (plan.capacity, and pad_to=capacity)"
        )
    each, schedule = slots // ranks, None
    tokens = torch.arange(rank * each, (rank + 1) * each)
    if placing is not None and batch.tree is not None:
        raise ValueError(
            "parallel.context_method=planned places whole documents, and these share tokens: use"
            " parallel.context_method=ulysses, or data.share_prefixes=off"
        )
    if placing is not None:
        placement = placing(batch.lengths[: batch.num_documents], slots)
        if placement is not None:
            schedule = Schedule.of(placement, rank, each)
            tokens = schedule.tokens
    own: dict[str, Any] = {
        name: F.pad(tensor[tokens], (0, each - len(tokens)), value=padding)
        for name, padding in DIVIDED.items()
        if (tensor := getattr(batch, name)) is not None and (batch.tree is None or name not in LOSS)
    }
    if batch.tree is not None:
        own |= _targets_of(batch, batch.tree, slice(rank * each, (rank + 1) * each))
    held = vars(batch) | own | {"num_target_tokens": int((own["targets"] != IGNORE).sum())}
    return ContextBatch(**held, whole=batch, schedule=schedule)


def _targets_of(batch: PackedBatch, tree: PackedTree, piece: slice) -> dict[str, Any]:
    """The targets of some slots of a pack whose documents share tokens, and a tree with their rows."""
    kept = (tree.target_slots >= piece.start) & (tree.target_slots < piece.stop)
    return {
        "targets": batch.targets[kept],
        "weights": None if batch.weights is None else batch.weights[kept],
        "tree": replace(tree, target_slots=tree.target_slots[kept] - piece.start),
    }


def _attend(
    attend: Attend,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    backend: str,
    **limits: Any,
) -> Tensor:
    """Attend to the tokens of all ranks; arguments after the group as in `Attend`."""
    if not isinstance(batch, ContextBatch):
        raise ValueError(
            "this model's attention expects one rank's share of a pack, and got a whole pack: call the function that"
            " divide_context returned on it"
        )
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))  # before it is sent: half of the bytes
    if batch.schedule is not None:
        return planned_attention(q, k, v, batch.schedule, group, backend)
    return _ulysses(attend, group, q, k, v, batch.whole, backend, **limits)


def _ulysses(
    attend: Attend,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: PackedBatch,
    backend: str,
    **limits: Any,
) -> Tensor:
    """Exchange some tokens of all heads for all tokens of some heads, attend, and exchange back."""
    ranks = torch.distributed.get_world_size(group)
    # Where the ranks do not divide the key heads, several ranks read one key head, each its own copy.
    copies = math.lcm(k.shape[1], ranks) // k.shape[1]
    if copies > 1:
        k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    shares = [x.reshape(len(x), ranks, -1, x.shape[2]) for x in (q, k, v)]
    sizes = [share.shape[2] for share in shares]
    mixed = all_to_all(torch.cat(shares, dim=2).flatten(1, 2), split_dim=1, join_dim=0, group=group)
    out = attend(*torch.split(mixed, sizes, dim=1), whole, backend, **limits)
    return all_to_all(out, split_dim=0, join_dim=1, group=group)
