"""Ring attention (Liu et al. 2023, arXiv:2310.01889) over packed documents: ranks exchange keys and values.

A pack of T slots is cut into 2n chunks for n ranks, and rank r holds chunks r and 2n−1−r: one early and one late, so
that the causal work of every rank is equal for a document that fills the pack.

    n = 2              keys   rank 0  rank 1  rank 1  rank 0
                               ch. 0   ch. 1   ch. 2   ch. 3        ◣ each document alone, inside a chunk
    queries rank 0   chunk 0    ◣                                    ■ a rectangle without a mask
            rank 1   chunk 1    ■       ◣
            rank 1   chunk 2    ■       ■       ◣
            rank 0   chunk 3    ■       ■       ■       ◣

Only one document can extend from chunk j into a later chunk i: the one with the last token of j and the first of i. All
its tokens in i see all its tokens in j. So the queries of one rank and the keys of another have at most one dense
rectangle in common, which `rectangle` computes from lengths on the host. Only these keys and values are sent; packs of
short documents send almost nothing.

In step s of n, rank r receives keys and values from rank r − s and sends its own to rank r + s, while it computes step
s − 1. Results merge by their log-sum-exp (ops/partial.py). In the backward pass keys and values are sent again, and
their gradients are sent back to their owner. Messages go directly to the rank that needs them: unlike in a ring of
neighbors, distant ranks communicate, but less is sent:

    elements sent forward ≤ 2 (n − 1) · T/n · K · D  (K key heads of width D), backward twice that
    over all ranks        ≤ 3 (n − 1)/2 · T · K · D  (3/4 of a ring of neighbors)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from multipack.ops.attention import check_heads
from multipack.ops.partial import Bounds, Gradients, Kernel, choose_kernel, merge
from multipack.parallel.collectives import Group

Wait = Callable[[], None]
Exchange = Callable[[Tensor | None, int, Tensor | None, int], Wait]
"""(sent, to, received, source) → a function that waits; starts sending a tensor to a rank of the ring and receiving one
from another; None = no message. Tensors are contiguous and must not change before the wait returns."""


class Rectangle(NamedTuple):
    """Queries of one rank that all see the same keys of another; positions count in each rank's own tokens.

    Attributes:
        queries: positions on the rank of the queries.
        keys: positions on the rank of the keys.
    """

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Ring:
    """One rank's work for one pack, computed on the host from the lengths of documents.

    Attributes:
        rank, ranks: this rank, and the number of ranks.
        lengths: tokens of each document within this rank's chunks, the early chunk first.
        seen: at index s the rectangle of this rank's queries and the keys of rank − s; None = it sees none of them.
        shown: at index s the rectangle of the queries of rank + s and this rank's keys; None = that rank sees none.
    """

    rank: int
    ranks: int
    lengths: tuple[int, ...]
    seen: tuple[Rectangle | None, ...]
    shown: tuple[Rectangle | None, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], rank: int, ranks: int) -> Ring:
        """Compute the work of a rank for a pack of these documents, padding included."""
        ends = list(accumulate(lengths))
        own: list[int] = []
        for chunk in head_tail(ends[-1], rank, ranks):
            cuts = ends[bisect_right(ends, chunk.start) : bisect_right(ends, chunk.stop - 1)]
            own += [b - a for a, b in pairwise((chunk.start, *cuts, chunk.stop)) if b > a]
        steps = range(ranks)
        seen = (rectangle(ends, rank, (rank - step) % ranks, ranks) for step in steps)
        shown = (rectangle(ends, (rank + step) % ranks, rank, ranks) for step in steps)
        return cls(rank, ranks, tuple(own), tuple(seen), tuple(shown))


def head_tail(slots: int, rank: int, ranks: int) -> tuple[slice, slice]:
    """Slices of a rank's early and late chunk in a pack of `slots` slots, a multiple of 2 · ranks."""
    size, late = slots // (2 * ranks), 2 * ranks - 1 - rank
    return slice(rank * size, (rank + 1) * size), slice(late * size, (late + 1) * size)


def rectangle(ends: Sequence[int], asking: int, owner: int, ranks: int) -> Rectangle | None:
    """The queries of one rank and the keys of another, in other chunks, that they see.

    Each pair of chunks gives a rectangle, and these are adjacent: a document in both chunks of a rank fills all slots
    between them, and so the end of the early chunk.

    Args:
        ends: ends of the pack's documents, ascending; the last one is T.
        asking: rank of the queries.
        owner: rank of the keys.
        ranks: number of ranks.

    Returns:
        The rectangle; None if no query sees a key.
    """
    slots = ends[-1]
    size = slots // (2 * ranks)
    rows: list[int] = []
    columns: list[int] = []
    for query_place, queries in enumerate(head_tail(slots, asking, ranks)):
        for key_place, keys in enumerate(head_tail(slots, owner, ranks)):
            crossing = bisect_right(ends, keys.stop - 1)
            end, start = ends[crossing], ends[crossing - 1] if crossing else 0
            if keys.start < queries.start < end:
                rows += query_place * size, query_place * size + min(end - queries.start, size)
                columns += key_place * size + max(start - keys.start, 0), (key_place + 1) * size
    return Rectangle(slice(min(rows), max(rows)), slice(min(columns), max(columns))) if rows else None


def send_and_receive(
    group: Group, sent: Tensor | None, to: int, received: Tensor | None, source: int
) -> Wait:
    """Exchange messages in a process group; see `Exchange`.

    nccl opens a group's connections in its first collective, which all ranks must call: run one before.
    """
    operations = []
    if sent is not None:
        operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=to))
    if received is not None:
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source))
    if not operations:
        return _no_wait
    works = dist.batch_isend_irecv(operations)

    def wait() -> None:
        for work in works:
            work.wait()
        operations.clear()  # they keep the tensors alive

    return wait


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    cu_seqlens: Tensor,
    group: Group = None,
    kernel: Kernel | None = None,
    exchange: Exchange | None = None,
) -> Tensor:
    """Causal attention inside each document, of this rank's queries to the keys of all ranks, scaled by 1/√D.

    Every rank of the group must call it and run it backward.

    Args:
        q: (T/ranks, H, D) queries of this rank's two chunks, the early one first.
        k: (T/ranks, K, D) keys of the same tokens, where K divides H.
        v: (T/ranks, K, D) values.
        ring: this rank's work for this pack.
        cu_seqlens: (N + 1,) int32 cumulative sums of `ring.lengths`, from 0, on the device of q.
        group: process group of the ranks.
        kernel: attention kernel; None = `choose_kernel(q)`.
        exchange: sends messages; None = `send_and_receive` in the group.

    Returns:
        (T/ranks, H, D) in q's dtype.

    Raises:
        ValueError: shapes or dtypes do not match, or q does not have the number of tokens of the ring.
    """
    check_heads(q, k, v)
    if len(q) != sum(ring.lengths):
        raise ValueError(f"this rank of the ring has {sum(ring.lengths):,} tokens, but q has {len(q):,}")
    exchange = exchange or partial(send_and_receive, group)
    work = _Work(ring, Bounds(ring.lengths, cu_seqlens), kernel or choose_kernel(q), exchange)
    out: Tensor = _RingAttention.apply(q, k, v, work)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    """`ring_attention` as an autograd function: the backward pass needs the merged result and communicates."""

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
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = ctx.work.backward(upstream, q, k, v, out, lse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


@dataclass(frozen=True)
class _Work:
    """Forward and backward pass of a rank for one pack and layer."""

    ring: Ring
    documents: Bounds
    kernel: Kernel
    exchange: Exchange

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(T/n, H, D) results and (T/n, H) log-sum-exps over the keys of all ranks."""
        for step, (seen, pair) in enumerate(self.steps(k, v)):
            if step == 0:  # while the first messages are under way
                out, lse = self.kernel.forward(q, k, v, self.documents)
            if seen is not None:
                rows, (key, value) = seen.queries, pair
                merge(out[rows], lse[rows], *self.kernel.forward(q[rows], key, value, None))
        return out, lse

    def backward(
        self, upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Gradients:
        """Gradients of this rank's q, k and v from the queries of all ranks."""
        add_gradients = _no_wait
        for step, (seen, pair) in enumerate(self.steps(k, v)):
            if step == 0:
                dq, dk, dv = self.kernel.backward(upstream, q, k, v, out, lse, self.documents)
            parts: list[Tensor] = []
            if seen is not None:
                rows, (key, value) = seen.queries, pair
                more, *parts = self.kernel.backward(
                    upstream[rows], q[rows], key, value, out[rows], lse[rows], None
                )
                dq[rows] += more
            add_gradients()
            add_gradients = self.return_gradients(step, parts, dk, dv, k.dtype)
        add_gradients()
        return dq, dk, dv

    def steps(self, k: Tensor, v: Tensor) -> Iterator[tuple[Rectangle | None, Sequence[Tensor]]]:
        """Rectangle, keys and values of each step, this rank's first; the next exchange runs during each step."""
        own = self.ring.seen[0]
        pair: Any = (k[own.keys], v[own.keys]) if own else ()
        for step, seen in enumerate(self.ring.seen, 1):
            wait, arriving = _no_wait, None
            if step < self.ring.ranks:
                shown = self.ring.shown[step]
                sent = torch.stack((k[shown.keys], v[shown.keys])) if shown else None
                arriving = _receive_buffer(self.ring.seen[step], k, k.dtype)
                wait = self.exchange(sent, self.neighbor(step), arriving, self.neighbor(-step))
            yield seen, pair
            wait()
            pair = arriving

    def return_gradients(
        self, step: int, parts: list[Tensor], dk: Tensor, dv: Tensor, dtype: torch.dtype
    ) -> Wait:
        """Start sending a step's key and value gradients to their owner.

        Returns:
            A function that waits for the gradients of this rank's keys and values, and adds them to dk and dv.
        """
        shown = self.ring.shown[step]
        sent = torch.stack(parts).to(dtype) if parts else None
        wait, arriving = _no_wait, sent
        if step > 0:
            arriving = _receive_buffer(shown, dk, dtype)
            wait = self.exchange(sent, self.neighbor(-step), arriving, self.neighbor(step))

        def add_received() -> None:
            wait()
            if shown and arriving is not None:
                dk[shown.keys] += arriving[0]
                dv[shown.keys] += arriving[1]

        return add_received

    def neighbor(self, steps: int) -> int:
        """The rank `steps` places after this one in the ring."""
        return (self.ring.rank + steps) % self.ring.ranks


def _no_wait() -> None:
    """A `Wait` for no message."""


def _receive_buffer(expected: Rectangle | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Uninitialized (2, S, K, D) tensor to receive keys and values of a rectangle, or their gradients."""
    if expected is None:
        return None
    tokens = expected.keys.stop - expected.keys.start
    return like.new_empty((2, tokens, *like.shape[1:]), dtype=dtype)
