"""Runs: neighboring documents of equal length, which one call of a batched attention kernel processes; their tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.ops.autocast import at_least_float32


class Run(NamedTuple):
    """Neighboring documents of equal length.

    Attributes:
        documents: their number.
        length: tokens of each.
    """

    documents: int
    length: int


def runs(lengths: Iterable[int]) -> Iterator[Run]:
    """Runs of documents with these lengths, in order; empty documents are skipped."""
    for length, equal in groupby(lengths):
        if length:
            yield Run(len(list(equal)), length)


def path_runs(lengths: Iterable[int], paths: Iterable[int]) -> tuple[list[Run], list[Run]]:
    """Runs of nodes of a tree with equal lengths and equally long paths: of their tokens, and of their paths."""
    found, behind = list[Run](), list[Run]()
    for (length, path), equal in groupby(zip(lengths, paths, strict=True)):
        if length:
            count = len(list(equal))
            found.append(Run(count, length))
            behind.append(Run(count, path))
    return found, behind


class PathBlock(NamedTuple):
    """Queries of nodes, and keys of a node that they see.

    Attributes:
        rows: slots of the queries.
        columns: slots of the keys.
        before: positions from the first key to the first query.
    """

    rows: slice
    columns: slice
    before: int


def path_blocks(cu_seqlens: Tensor, ends: Tensor | None, window: int | None) -> Iterator[PathBlock]:
    """What queries of nodes see of the nodes before theirs: nothing without `ends`, which are of `PackedTree`.

    All nodes behind a node are neighbors, and see all its keys: one block. With a window each node has one with
    every node of its path that has keys in reach, and these tokens alone, so that no query is without a key.
    """
    if ends is None:
        return
    bounds = cu_seqlens.tolist()
    behind = ends[cu_seqlens[:-1].clamp(max=len(ends) - 1)].tolist()
    path = list[tuple[int, int, int, int]]()  # nodes before: bounds, end of those behind, position
    for (start, stop), end in zip(pairwise(bounds), behind, strict=True):
        while path and path[-1][2] <= start:
            path.pop()
        position = path[-1][3] + path[-1][1] - path[-1][0] if path else 0
        if window is None:
            if end > stop > start:
                yield PathBlock(slice(stop, end), slice(start, stop), stop - start)
        else:
            for first, last, _, place in path:
                hidden = max(0, position - place - window + 1)
                before = position - place - hidden
                rows = min(stop - start, last - first - hidden + window - 1 - before)
                if rows > 0:
                    yield PathBlock(slice(start, start + rows), slice(first + hidden, last), before)
        path.append((start, stop, end, position))


def tiles(q: Tensor, k: Tensor, before: int, window: int | None, size: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of at most `size` queries of a run, and of the keys that any of them sees: slices.

    Tensors are (documents, H, l, D). The first query has the position of key `before`, where there may be no key.
    """
    for start in range(0, q.shape[2], size):
        stop = min(start + size, q.shape[2])
        first = 0 if window is None else max(0, before + start - window + 1)
        yield slice(start, stop), slice(first, min(k.shape[2], before + stop))


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the result over other keys into `out` (Q, H, D) and `lse` (Q, H), in place; see ops/partial.py."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(other, (other_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def gathered(k: Tensor, v: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Keys and values (S, …) in the order of the bounds of keys; where no tokens are shared, as they are."""
    if batch.tree is None:
        return k, v
    slots = batch.tree.key_slots
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


def heads_first(x: Tensor, found: Sequence[Run]) -> list[Tensor]:
    """(T, H, …) → (documents, H, l, …) of each run: views in the layout of torch's kernels.

    A contiguous (T, H) tensor of log-sum-exps gives views stored as (documents, l, H), which torch's CPU kernel writes.
    Its backward pass reads the strides in torch 2.13; other versions may assume the layout, and would return wrong
    gradients for another one without an error.
    """
    # One split for all runs: a slice per run would cost more operators, and in autograd a gradient of T rows each.
    pieces = x.transpose(0, 1)[None].split_with_sizes([run.documents * run.length for run in found], dim=2)
    return [
        piece if run.documents == 1 else torch.unflatten(piece[0], 1, run).transpose(0, 1)
        for piece, run in zip(pieces, found, strict=True)
    ]


def tokens_first(parts: Iterable[Tensor]) -> Tensor:
    """(documents, H, l, …) of each run → (T, H, …)."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """(T, K, D) → (T, H, D): each key head once for every query head that reads it."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)
