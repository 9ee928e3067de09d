"""The backend `loop`: torch's own kernels, called once per run of equally long documents.

On a CPU it is one operator, `multipack::document_attention`, whose only input that changes from pack to pack is the
tensor `cu_seqlens`, so torch.compile compiles once for all layouts of documents. It calls the kernels behind
`scaled_dot_product_attention` directly, forward and backward: results are bit for bit those of a loop over that
function, without an autograd node per document.

    window=3      keys    a b c d e f g          A document longer than the window is cut into tiles of
    queries a b c       ■ ■ ■                    queries, each with the keys that any of them sees: work
            d e f         ■ ■ ■ ■ ■              grows with length · window, not with length².
            g                   ■ ■ ■

Where documents share tokens (`PackedBatch.tree`), nodes are computed like documents. Then all nodes behind a node see
its keys, in one call without a mask, and results merge by their log-sum-exps:

    p p p ─┬─ a a         p p p │ a a │ b           queries a a b see keys p p p
           └─ b

On other devices it calls `scaled_dot_product_attention` in a loop over `batch.lengths`, which is not compiled; there
the queries of a node see the keys of its path, which are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention.masks import tile_mask
from multipack.ops.attention.runs import (
    PathBlock,
    Run,
    gathered,
    heads_first,
    merge,
    path_blocks,
    path_runs,
    repeat_heads,
    runs,
    tiles,
    tokens_first,
)
from multipack.ops.autocast import at_least_float32

FLOAT32_TOKENS = 512
"""On a CPU, half-precision documents of at most this number of tokens are computed in float32: more exact, and faster
than bfloat16 (2.1 × at 64 tokens, 1.3 × at 200, equal at 500; benchmarks/precision.py)."""

GROUPED_KERNELS = torch.__version__ >= "2.13"
"""Whether torch's CPU kernels support fewer key heads than query heads, backward too: earlier versions may read beyond
the end of k and v."""

TILE_TOKENS = 128
"""Minimum number of queries in a tile of a sliding window: with smaller tiles, kernel calls cost more time than the
skipped pairs save."""

PATH_TILE_TOKENS = 512
"""Queries in a tile of a node behind others: half of its pairs with its own keys are masked."""


def loop(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """The backend `loop`: (T, H, D); arguments are those of `attention`."""
    if q.device.type != "cpu":
        return _by_sdpa(q, k, v, batch, window)
    if k.shape[1] != q.shape[1] and not GROUPED_KERNELS:
        k, v = repeat_heads(k, q), repeat_heads(v, q)
    ends = None if batch.tree is None else batch.tree.ends
    out: Tensor = document_attention(q, k, v, batch.cu_seqlens, window, ends)[0]
    return out.to(q.dtype)


def _tiles(q: Tensor, k: Tensor, before: int, window: int) -> Iterator[tuple[slice, slice]]:
    """`tiles` of a size that suits the window."""
    size = max(window, TILE_TOKENS) if window < before + q.shape[2] else PATH_TILE_TOKENS
    return tiles(q, k, before, window, size)


def _band(queries: slice, keys: slice, before: int, window: int, like: Tensor) -> Tensor | None:
    """(queries, keys) additive mask of a tile: 0 or −∞; None if plain causal attention is equivalent.

    The first query has the position of key `before`.
    """
    if not before and queries.stop <= window:
        return None
    seen = tile_mask(queries, keys, before, window, like.device)
    return like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)


def _lengths(cu_seqlens: Tensor, slots: int) -> list[int]:
    """Slots of each document."""
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != slots:
        raise ValueError(
            f"cu_seqlens must go from 0 to {slots:,}, the tokens of q; got {starts[0]} … {starts[-1]}"
        )
    return [stop - start for start, stop in pairwise(starts)]


def _kernel_dtypes(found: Sequence[Run], window: int | None, dtype: torch.dtype) -> list[torch.dtype]:
    """The dtype in which the kernel computes each run, for inputs of `dtype`."""
    visible = [
        run.length if window is None else min(run.length, max(window, TILE_TOKENS) + window - 1)
        for run in found
    ]
    return [at_least_float32(dtype) if keys <= FLOAT32_TOKENS else dtype for keys in visible]


def _by_run(x: Tensor, found: Sequence[Run], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """(T, H, D) → (documents, H, l, D) of each run in its dtype, with one cast for all runs."""
    cast = {dtype: heads_first(x.to(dtype), found) for dtype in set(dtypes)}
    return [cast[dtype][index] for index, dtype in enumerate(dtypes)]


def _untiled(q: Tensor, k: Tensor, before: int, window: int) -> bool:
    """Whether one call of a kernel computes all queries: causally with `before` 0, else each sees all keys."""
    return window >= before + q.shape[2] and (before == 0 or before >= k.shape[2])


def _attend(
    window: int | None,
    before: int,
    kernel: Callable[..., tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, ...]:
    """The results of `kernel` for a run, in tiles where keys are hidden; tensors are (documents, H, l, …).

    The first query has the position of key `before`, where there may be no key.
    """
    window = before + q.shape[2] if window is None else window
    if _untiled(q, k, before, window):
        return kernel(q, k, v, is_causal=before == 0)
    parts = []
    for rows, columns in _tiles(q, k, before, window):
        band = _band(rows, columns, before, window, q)
        tile = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        parts.append(kernel(*tile, is_causal=band is None, attn_mask=band))
    return tuple(torch.cat(each, dim=2) for each in zip(*parts, strict=True))


def _gradients(
    window: int | None,
    before: int,
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of a run; tensors are (documents, H, l, …), `before` as in `_attend`."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    window = before + q.shape[2] if window is None else window
    if _untiled(q, k, before, window):
        dq, dk, dv = kernel(upstream, q, k, v, out, lse, 0.0, before == 0)
        return dq, dk, dv
    # Tiles have keys in common, whose gradients are summed.
    parts, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns in _tiles(q, k, before, window):
        band = _band(rows, columns, before, window, q)
        tile = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        part_lse = lse[:, :, rows].transpose(1, 2).contiguous().transpose(1, 2)  # see `heads_first`
        found = kernel(
            upstream[:, :, rows], *tile, out[:, :, rows], part_lse, 0.0, band is None, attn_mask=band
        )
        parts.append(found[0])
        dk[:, :, columns] += found[1]
        dv[:, :, columns] += found[2]
    return torch.cat(parts, dim=2), dk, dv


# Schemas are written out: torch 2.4 does not read postponed annotations.
@torch.library.custom_op(
    "multipack::document_attention",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt? window, Tensor? ends=None)"
    " -> (Tensor, Tensor)",
)
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention inside each document on a CPU, and its log-sum-exp.

    Args:
        q: (T, H, D).
        k: (T, K, D), where K divides H; K < H needs `GROUPED_KERNELS`.
        v: (T, K, D).
        cu_seqlens: (N + 1,) starts of the documents, or nodes, and T; empty ones are skipped.
        window: as for `attention`.
        ends: (T,) where documents share tokens, see `PackedTree`; None = they do not.

    Returns:
        (T, H, D) and (T, H) in float32, or float64 for float64: in half precision the backward pass reads the
        unrounded result.
    """
    found = list(runs(_lengths(cu_seqlens, len(q))))
    dtypes = _kernel_dtypes(found, window, q.dtype)
    inputs = zip(*(_by_run(x, found, dtypes) for x in (q, k, v)), strict=True)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts = zip(*(_attend(window, 0, kernel, *each) for each in inputs), strict=True)
    out, lse = (tokens_first(each).to(at_least_float32(q.dtype)) for each in parts)
    for part in path_blocks(cu_seqlens, ends, window):
        own = _of_block(part, window, (q,), (k, v))
        more, more_lse = _attend(window, part.before, kernel, *own)
        merge(out[part.rows], lse[part.rows], more[0].transpose(0, 1), more_lse[0].transpose(0, 1))
    return out, lse


def _of_block(
    part: PathBlock, window: int | None, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> list[Tensor]:
    """(1, H, l, …) parts of tensors of queries and of keys, in the dtype in which the kernel computes them."""
    (dtype,) = _kernel_dtypes([Run(1, part.columns.stop - part.columns.start)], window, of_keys[0].dtype)
    cut = [*(x[part.rows] for x in of_queries), *(x[part.columns] for x in of_keys)]
    return [x.to(dtype).transpose(0, 1)[None] for x in cut]


@document_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dtype = at_least_float32(q.dtype)
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)


@torch.library.custom_op(
    "multipack::document_attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor upstream, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, SymInt? window,"
    " Tensor? ends) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    ends: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    found = list(runs(_lengths(cu_seqlens, len(q))))
    dtypes = _kernel_dtypes(found, window, q.dtype)
    tensors = (_by_run(x, found, dtypes) for x in (upstream, q, k, v, out))
    parts = zip(
        *(_gradients(window, 0, *each) for each in zip(*tensors, heads_first(lse, found), strict=True)),
        strict=True,
    )
    dq, dk, dv = (tokens_first(each).to(at_least_float32(q.dtype)) for each in parts)
    for part in path_blocks(cu_seqlens, ends, window):
        above, query, outs, key, value = _of_block(part, window, (upstream, q, out), (k, v))
        lses = lse[part.rows].transpose(0, 1)[None]
        more = _gradients(window, part.before, above, query, key, value, outs, lses)
        for total, place, each in zip(
            (dq, dk, dv), (part.rows, part.columns, part.columns), more, strict=True
        ):
            total[place] += each[0].transpose(0, 1)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@_backward.register_fake
def _(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    ends: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.window, ends = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, ends)


def _autograd_backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, ends = ctx.saved_tensors
    return (*_backward(upstream, *saved, ctx.window, ends), None, None, None)


document_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """Attention by `scaled_dot_product_attention` on any device, without a device synchronization."""
    grouped, found = k.shape[1] != q.shape[1], list(runs(batch.lengths))
    paths = found
    if batch.tree is not None:
        found, paths = path_runs(batch.lengths, batch.tree.lengths_k)
        k, v = gathered(k, v, batch)

    def kernel(query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> tuple[Tensor]:
        return (F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **mask),)

    befores = [path.length - run.length for run, path in zip(found, paths, strict=True)]
    inputs = zip(befores, heads_first(q, found), heads_first(k, paths), heads_first(v, paths), strict=True)
    return tokens_first([_attend(window, before, kernel, *each)[0] for before, *each in inputs])
