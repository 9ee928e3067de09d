"""Runs: neighboring documents of equal length, which one call of a batched attention kernel processes; their tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multipack.ops.attention.kernel import Bounds, KeyBlock
from multipack.ops.autocast import at_least_float32


class Run(NamedTuple):
    """Neighboring documents of equal length.

    Attributes:
        documents: their number.
        length: tokens of each.
    """

    documents: int
    length: int


class Runs(NamedTuple):
    """Runs of queries, and the runs of keys that they belong to.

    Attributes:
        queries: runs of neighboring documents with equally many queries and equally many keys.
        keys: the same documents' keys.
        befores: position of the first query of each run among its keys, 0 for whole documents; at or beyond
            the number of keys, every key is before every query.
    """

    queries: list[Run]
    keys: list[Run]
    befores: list[int]

    @classmethod
    def of(cls, lengths: Iterable[int], paths: Iterable[int], causal: bool) -> Runs:
        """Documents of these numbers of queries and of keys; documents without queries are skipped."""
        queries, keys = list[Run](), list[Run]()
        for (length, path), equal in groupby(zip(lengths, paths, strict=True)):
            if length:
                count = len(list(equal))
                queries.append(Run(count, length))
                keys.append(Run(count, path))
        pairs = zip(queries, keys, strict=True)
        return cls(
            queries, keys, [key.length - query.length if causal else key.length for query, key in pairs]
        )

    @classmethod
    def whole(cls, q: Tensor, k: Tensor, before: int) -> Runs:
        """All queries and all keys as one document."""
        return cls([Run(1, len(q))], [Run(1, len(k))], [before])


def by_runs(
    attend: Callable[..., tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    causal: bool = True,
) -> tuple[Tensor, ...]:
    """The (T, H, …) results of a function for all runs of documents.

    Args:
        attend: (q, k, v, before) → results; tensors are (documents, H, l, …), and `before` is one of `Runs`.
        q: (T, H, D).
        k: (S, K, D).
        v: (S, K, V).
        bounds: documents; None = every query belongs to every key.
        causal: see `Limits`.
    """
    if bounds is None:
        runs = Runs.whole(q, k, len(k))
    else:
        paths = bounds.lengths if bounds.tree is None else bounds.tree.lengths_k
        runs = Runs.of(bounds.lengths, paths, causal)
        k, v = gathered(k, v, bounds)
    queries, keys, befores = runs
    inputs = zip(heads_first(q, queries), heads_first(k, keys), heads_first(v, keys), befores, strict=True)
    return tuple(map(tokens_first, zip(*(attend(*each) for each in inputs), strict=True)))


def path_blocks(cu_seqlens: Tensor, ends: Tensor | None, window: int | None) -> Iterator[KeyBlock]:
    """Blocks of the queries of nodes and the keys of earlier nodes; none without `ends` (`PackedTree.ends`).

    All nodes behind a node are neighbors, and see all its keys: one block. With a window there is a block for each
    node and each earlier node of its path with keys in reach, without the queries that reach none.
    """
    if ends is None:
        return
    bounds = cu_seqlens.tolist()
    # Empty nodes may start at T, beyond the last slot.
    behind = ends[cu_seqlens[:-1].clamp(max=len(ends) - 1)].tolist()
    path = list[tuple[int, int, int, int]]()  # earlier nodes: start, stop, end of the nodes behind, position
    for (start, stop), end in zip(pairwise(bounds), behind, strict=True):
        while path and path[-1][2] <= start:
            path.pop()
        position = path[-1][3] + path[-1][1] - path[-1][0] if path else 0
        if window is None:
            if end > stop > start:
                yield KeyBlock(slice(stop, end), slice(start, stop), stop - start)
        else:
            for first, last, _, place in path:
                hidden = max(0, position - place - window + 1)
                before = position - place - hidden
                rows = min(stop - start, last - first - hidden + window - 1 - before)
                if rows > 0:
                    yield KeyBlock(slice(start, start + rows), slice(first + hidden, last), before)
        path.append((start, stop, end, position))


def tiles(q: Tensor, k: Tensor, before: int, window: int | None, size: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of at most `size` queries of a run, and of the keys that any of them sees: slices.

    Tensors are (documents, H, l, D). The first query has the position of key `before`, where there may be no key.
    """
    for start in range(0, q.shape[2], size):
        stop = min(start + size, q.shape[2])
        first = 0 if window is None else max(0, before + start - window + 1)
        yield slice(start, stop), slice(first, min(k.shape[2], before + stop))


def gathered(k: Tensor, v: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Keys and values (S, …) in the order of the bounds of keys; where no tokens are shared, as they are."""
    if bounds is None or bounds.tree is None:
        return k, v
    slots = bounds.tree.key_slots
    return _Gather.apply(k, slots), _Gather.apply(v, slots)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Rows of a tensor by their numbers; gradients of repeated rows are summed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.rows = x.shape[0]
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        wide = at_least_float32(upstream.dtype)
        total = upstream.new_zeros((ctx.rows, *upstream.shape[1:]), dtype=wide)
        return total.index_add_(0, slots, upstream.to(wide)).to(upstream.dtype), None


def heads_first(x: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    """(T, H, …) → (documents, H, l, …) of each run: views in the layout of torch's kernels.

    A contiguous (T, H) tensor of log-sum-exps gives views stored as (documents, l, H), which torch's CPU kernel writes.
    Its backward pass reads the strides in torch 2.13; other versions may assume the layout, and would return wrong
    gradients for another one without an error.
    """
    # One split for all runs: a slice per run would cost more operators, and in autograd a gradient of T rows each.
    pieces = x.transpose(0, 1)[None].split_with_sizes([run.documents * run.length for run in runs], dim=2)
    return [
        piece if run.documents == 1 else torch.unflatten(piece[0], 1, run).transpose(0, 1)
        for piece, run in zip(pieces, runs, strict=True)
    ]


def tokens_first(parts: Iterable[Tensor]) -> Tensor:
    """(documents, H, l, …) of each run → (T, H, …)."""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """(T, K, D) → (T, H, D): each key head once for every query head that reads it."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def sum_repeated(grad: Tensor, x: Tensor) -> Tensor:
    """(T, H, D) gradient of `repeat_heads` → (T, K, D): the sum over the query heads that read a key head of x."""
    groups = grad.shape[1] // x.shape[1]
    return grad if groups == 1 else torch.unflatten(grad, 1, (-1, groups)).sum(2)
