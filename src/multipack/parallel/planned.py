"""Attention over a pack whose documents a placement divides among ranks (planning/placement.py).

    document of 12 tokens on 3 ranks      keys    0 1   2 3   4 5 6 7   8 9   10 11
                                                 rank 0  1    rank 2     1     0
    rank 0   queries 0 1                          ◣                                      ◣ each piece alone
             queries 10 11                        ■     ■      ■         ■    ◣          ■ a rectangle without a mask
    rank 1   queries 2 3                          ■     ◣
             queries 8 9                          ■     ■      ■         ◣
    rank 2   queries 4 5 6 7                      ■     ■      ◣

A piece attends to itself, and to all tokens of its document before it. So a rank needs the document's keys and values
up to the beginning of its last piece. Ranks exchange them in one all-to-all, whose sizes every rank knows from the
placement, while they compute their own pieces; results merge by their log-sum-exp (ops/attention/kernel.py). Whole
documents are in no message, and a pack of whole documents needs no all-to-all. The backward pass exchanges keys and
values again, and returns their gradients to their owners. All ranks call the same collectives in the same order, so
none waits forever.

A rank with s tokens to send and r to receive (counted once for each receiver) sends s · 2·K·D elements forward and
(s + r) · 2·K·D backward, of K key heads of width D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from multipack.data.packs.batch import Movable
from multipack.ops.attention import check_heads, select
from multipack.ops.attention.kernel import (
    Gradients,
    KeyBlock,
    Limits,
    Pieces,
    Saved,
    add_gradients,
    merge_blocks,
)
from multipack.ops.attention.table import Backend
from multipack.ops.autocast import at_least_float32
from multipack.parallel.collectives import Group
from multipack.planning.lengths import offsets_of
from multipack.planning.placement import Placement

PADDING = 128
"""Most slots of a piece of padding, which attends to itself: the cost grows with the square."""
ALL = Limits(causal=False)
"""Every query sees every key."""
Wait = Callable[[], Any]
Exchange = Callable[[Tensor, Sequence[int], Sequence[int]], tuple[Tensor, Wait]]
"""(rows sent, rows for each rank, rows from each rank) → the rows received, complete after a call of the function."""


@dataclass(frozen=True)
class Schedule(Movable):
    """One rank's work for one pack, computed on the host.

    Attributes:
        pieces: the rank's pieces, in the order of documents and tokens, then pieces of padding.
        tokens: (tokens of the rank,) int64 places of the rank's tokens in the pack.
        sent: int64 own tokens whose keys are sent, by receiver.
        sent_sizes, received_sizes: tokens for each rank, and from each rank.
        kept: int64 own tokens of divided documents before the rank's last piece.
        order: int64 places of the keys of each divided document in order, in `kept` followed by the received tokens.
        blocks: ranges of the rank's queries, and of the earlier keys that all of them see, counted in `order`.
        is_local: whether no rank sends anything.
    """

    pieces: Pieces
    tokens: Tensor
    sent: Tensor
    sent_sizes: tuple[int, ...]
    received_sizes: tuple[int, ...]
    kept: Tensor
    order: Tensor
    blocks: tuple[KeyBlock, ...]
    is_local: bool

    @classmethod
    def of(cls, placement: Placement, rank: int, slots: int = 0) -> Schedule:
        """The work of a rank, which computes this number of slots, with padding; 0 = one for each of its tokens."""
        own = np.flatnonzero(placement.rank == rank)
        sizes = placement.sizes
        # Of an own piece its first row; of a document its range of pieces, which are in the order of tokens.
        place = dict(zip(own.tolist(), offsets_of(sizes[own])[:-1].tolist(), strict=True))
        bounds = np.searchsorted(placement.document, np.arange(len(placement.lengths) + 1))
        # Pieces sent to and received from each rank; of a divided document, those before the rank's last.
        to = [list[int]() for _ in range(placement.ranks)]
        source = [list[int]() for _ in range(placement.ranks)]
        prefixes = list[list[int]]()
        for document in np.unique(placement.document[own]).tolist():
            pieces = range(bounds[document], bounds[document + 1])
            if len(pieces) == 1:
                continue
            last = {int(placement.rank[piece]): piece for piece in pieces}  # a rank needs all keys before it
            for piece in pieces:
                owner = int(placement.rank[piece])
                if owner == rank:
                    for other, until in last.items():
                        if other != rank and piece < until:
                            to[other].append(piece)
                elif piece < last[rank]:
                    source[owner].append(piece)
            prefixes.append([piece for piece in pieces if piece < last[rank]])
        kept = [piece for prefix in prefixes for piece in prefix if piece in place]
        arriving = [*kept, *(piece for pieces in source for piece in pieces)]
        begins = dict(zip(arriving, offsets_of(sizes[arriving])[:-1].tolist(), strict=True))
        blocks, first = list[KeyBlock](), 0
        for prefix in prefixes:  # keys first … stop − 1 of `order` are those before a piece
            stop = first
            for piece in [*prefix, *(prefix[-1:] and [prefix[-1] + 1])]:  # and the rank's last piece
                if piece in place and stop > first:
                    rows = slice(place[piece], place[piece] + int(sizes[piece]))
                    blocks.append(KeyBlock(rows, slice(first, stop), stop - first))
                stop += int(sizes[piece]) if piece in begins else 0
            first = stop
        starts = offsets_of(placement.lengths)[placement.document] + placement.start
        held = int(sizes[own].sum())
        padding = max(slots - held, 0)
        lengths = [*sizes[own].tolist(), *[PADDING] * (padding // PADDING), padding % PADDING]
        lengths = [length for length in lengths if length]
        starts_of_pieces = torch.from_numpy(offsets_of(np.array(lengths)).astype(np.int32))
        return cls(
            pieces=Pieces(tuple(lengths), starts_of_pieces, max(lengths, default=0)),
            tokens=_ranges([(int(starts[piece]), int(sizes[piece])) for piece in own]),
            sent=_ranges([(place[piece], int(sizes[piece])) for pieces in to for piece in pieces]),
            sent_sizes=tuple(int(sizes[pieces].sum()) for pieces in to),
            received_sizes=tuple(int(sizes[pieces].sum()) for pieces in source),
            kept=_ranges([(place[piece], int(sizes[piece])) for piece in kept]),
            order=_ranges([(begins[piece], int(sizes[piece])) for prefix in prefixes for piece in prefix]),
            blocks=tuple(blocks),
            is_local=not placement.sent.any(),
        )


def _ranges(parts: Sequence[tuple[int, int]]) -> Tensor:
    """int64 numbers of consecutive (start, size) ranges."""
    found = [np.arange(start, start + size) for start, size in parts]
    return torch.from_numpy(np.concatenate(found) if found else np.empty(0, dtype=np.int64))


def exchange_rows(
    group: Group, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
) -> tuple[Tensor, Wait]:
    """Exchange rows in a process group; see `Exchange`."""
    received = sent.new_empty((sum(received_sizes), *sent.shape[1:]))
    work = dist.all_to_all_single(
        received, sent, list(received_sizes), list(sent_sizes), group=group, async_op=True
    )

    def wait() -> None:  # holds what is sent until then: its memory must not be used for something else
        work.wait()
        del sent_until_then[:]

    sent_until_then = [sent]
    return received, wait


def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    group: Group = None,
    backend: str = "auto",
    exchange: Exchange | None = None,
) -> Tensor:
    """Causal attention inside each document, of this rank's queries to the keys of all ranks, scaled by 1/√D.

    Every rank of the group must call it and run it backward.

    Args:
        q: (S, H, D) queries of this rank's slots.
        k: (S, K, D) keys of the same slots, where K divides H.
        v: (S, K, D) values.
        schedule: this rank's work for this pack; its tensors are on the device of q.
        group: process group of the ranks.
        backend: name of the kernel, as for `attention`; its results must merge.
        exchange: sends messages; None = `exchange_rows` in the group.

    Returns:
        (S, H, D) in q's dtype.

    Raises:
        ValueError: shapes or dtypes do not match, q does not have the slots of the schedule, or the kernel does not
            support these tensors.
    """
    check_heads(q, k, v)
    if len(q) != sum(schedule.pieces.lengths):
        raise ValueError(
            f"this rank's share has {sum(schedule.pieces.lengths):,} slots, but q has {len(q):,}"
        )
    kernel = select(backend, q, merges=True)
    work = _Work(schedule, kernel, exchange or partial(exchange_rows, group))
    out: Tensor = _PlannedAttention.apply(q, k, v, work)  # type: ignore[no-untyped-call]
    return out


class _PlannedAttention(torch.autograd.Function):
    """`planned_attention` as an autograd function: the backward pass needs the merged result and communicates."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: _Work) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            merged, lse = work.forward(q, k, v)
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = Saved(*ctx.saved_tensors)
        with torch.autocast(upstream.device.type, enabled=False):
            dq, dk, dv = ctx.work.backward(upstream, saved)
        return dq.to(saved.q.dtype), dk.to(saved.k.dtype), dv.to(saved.v.dtype), None


@dataclass(frozen=True)
class _Work:
    """Forward and backward pass of a rank for one pack and layer."""

    schedule: Schedule
    kernel: Backend
    exchange: Exchange

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(S, H, D) results and (S, H) log-sum-exps over the keys of all ranks."""
        earlier = self.earlier_keys(k, v)
        own = self.kernel.forward(q, k, v, self.schedule.pieces, Limits())  # while messages are under way
        # Copies: activation checkpointing may keep the kernel's tensors.
        out, lse = (x.to(at_least_float32(x.dtype), copy=True) for x in own)
        keys, values = earlier().unbind(1)
        saved = Saved(q, keys, values, out, lse)
        merge_blocks(lambda q, k, v, _: self.kernel.forward(q, k, v, None, ALL), self.schedule.blocks, saved)
        return out, lse

    def backward(self, upstream: Tensor, saved: Saved) -> Gradients:
        """Gradients of this rank's q, k and v; k and v receive gradients from the queries of all ranks."""
        schedule, backward = self.schedule, self.kernel.backward
        assert backward is not None  # as its results merge
        q, k, v, out, lse = saved
        earlier = self.earlier_keys(k, v)
        dq, dk, dv = backward(upstream, saved, schedule.pieces, Limits())
        pairs = earlier()
        gradients = torch.zeros_like(pairs, dtype=dk.dtype)
        (keys, values), (of_keys, of_values) = pairs.unbind(1), gradients.unbind(1)

        def of_block(upstream: Tensor, saved: Saved, before: int) -> Gradients:
            return backward(upstream, saved, None, ALL)

        merged, totals = Saved(q, keys, values, out, lse), (dq, of_keys, of_values)
        add_gradients(of_block, schedule.blocks, upstream, merged, totals)
        del pairs, keys, values, merged  # frees them before tensors of this size are made
        arranged = torch.empty_like(gradients)
        arranged[schedule.order] = gradients
        count = len(schedule.kept)
        self.add(dk, dv, schedule.kept, arranged[:count])
        if not schedule.is_local:
            returned, wait = self.exchange(
                arranged[count:].to(k.dtype), schedule.received_sizes, schedule.sent_sizes
            )
            wait()
            # One receiver after the other: each has a token once, so that sums do not depend on the order of threads.
            sizes = list(schedule.sent_sizes)
            for tokens, of_tokens in zip(
                torch.split(schedule.sent, sizes), torch.split(returned, sizes), strict=True
            ):
                self.add(dk, dv, tokens, of_tokens)
        return dq, dk, dv

    def earlier_keys(self, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Start the exchange of keys and values.

        Returns:
            A function that waits for it and returns the (keys, 2, K, D) keys and values of `Schedule.order`.
        """
        schedule = self.schedule
        kept = torch.stack((k[schedule.kept], v[schedule.kept]), 1)
        if schedule.is_local:
            return lambda: kept
        sent = torch.stack((k[schedule.sent], v[schedule.sent]), 1)
        received, wait = self.exchange(sent, schedule.sent_sizes, schedule.received_sizes)

        def arranged() -> Tensor:
            wait()
            return torch.cat((kept, received))[schedule.order]

        return arranged

    @staticmethod
    def add(dk: Tensor, dv: Tensor, tokens: Tensor, gradients: Tensor) -> None:
        """Add (tokens, 2, K, D) gradients to `dk` and `dv` at `tokens`, in place; no token occurs twice."""
        if len(tokens):
            dk[tokens] += gradients[:, 0]
            dv[tokens] += gradients[:, 1]
