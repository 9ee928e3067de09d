"""The kernel `loop`: torch's own kernels, called once per run of equally long documents.

On a CPU it is one operator, `multipack::document_attention`, which takes the layout of documents as tensors
(`cu_seqlens`, `ends`), so that torch.compile compiles once for all layouts. It calls the kernels behind
`scaled_dot_product_attention` directly, forward and backward: results equal a loop over that function bit for
bit, without an autograd node per document.

    window=3      keys    a b c d e f g          A document longer than the window is cut into tiles of
    queries a b c       ■ ■ ■                    queries, each with the keys that any of them sees: work
            d e f         ■ ■ ■ ■ ■              grows with length · window, not with length².
            g                   ■ ■ ■

Where documents share tokens (`PackedBatch.tree`), nodes are first computed like documents. Then the nodes
behind a node see its keys, in one call without a mask (with a window, in a call for each node behind it), and
results merge by their log-sum-exps:

    p p p ─┬─ a a         p p p │ a a │ b           queries a a b see keys p p p
           └─ b

On other devices it calls `scaled_dot_product_attention` in a loop over `batch.lengths`, which is not compiled; there
the queries of a node see the keys of its path, which are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.ops.attention.kernel import Bounds, Gradients, Limits, Saved, add_gradients, merge_blocks
from multipack.ops.attention.masks import tile_mask
from multipack.ops.attention.runs import (
    Run,
    Runs,
    by_runs,
    heads_first,
    path_blocks,
    repeat_heads,
    sum_repeated,
    tiles,
    tokens_first,
)
from multipack.ops.autocast import at_least_float32

FLOAT32_TOKENS = 512
"""On a CPU, half-precision documents (with a window: tiles) of at most this number of keys are computed in
float32: more exact, and faster than bfloat16 (2.1 × at 64 tokens, 1.3 × at 200, equal at 500;
benchmarks/precision.py)."""

GROUPED_KERNELS = torch.__version__ >= "2.13"
"""Whether torch's CPU kernels support fewer key heads than query heads, backward too: earlier versions may read beyond
the end of k and v."""

TILE_TOKENS = 128
"""Minimum number of queries in a tile of a sliding window: with smaller tiles, kernel calls cost more time than the
skipped pairs save."""

PATH_TILE_TOKENS = 512
"""Queries in a tile of a node that sees the keys of its path, with a mask but no window: half of the tile on
the diagonal is masked, and computed in vain."""

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, limits: Limits) -> tuple[Tensor, Tensor | None]:
    """The kernel `loop`; see `Backend`. On a CPU results are float32 or wider, and have log-sum-exps."""
    if q.device.type != "cpu":
        return _by_sdpa(q, k, v, bounds, limits)
    k, v = (_supported(x, q) for x in (k, v))
    if bounds is None:
        return _over_runs(None, q, k, v, Runs.whole(q, k, len(k)))
    ends = None if bounds.tree is None else bounds.tree.ends
    out, lse = document_attention(q, k, v, bounds.cu_seqlens, limits.window, ends, limits.causal)
    return out, lse


def backward(upstream: Tensor, saved: Saved, bounds: Bounds, limits: Limits) -> Gradients:
    """Gradients of the kernel `loop` on a CPU; see `Backend`."""
    q, k, v, *results = saved
    own = Saved(q, _supported(k, q), _supported(v, q), *results)
    if bounds is None:
        dq, dk, dv = _gradients_over_runs(None, upstream, own, Runs.whole(q, k, len(k)))
    else:
        ends = None if bounds.tree is None else bounds.tree.ends
        dq, dk, dv = _document_gradients(upstream, own, bounds.cu_seqlens, limits.window, ends, limits.causal)
    return dq, sum_repeated(dk, k), sum_repeated(dv, v)


def _supported(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values with as many heads as the kernels take."""
    return x if GROUPED_KERNELS else repeat_heads(x, q)


def _documents(cu_seqlens: Tensor, slots: int, causal: bool) -> Runs:
    """The runs of documents with these starts."""
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != slots:
        raise ValueError(
            f"cu_seqlens must go from 0 to {slots:,}, the tokens of q; got {starts[0]} … {starts[-1]}"
        )
    lengths = [stop - start for start, stop in pairwise(starts)]
    return Runs.of(lengths, lengths, causal)


def _tiles(q: Tensor, k: Tensor, before: int, window: int) -> Iterator[tuple[slice, slice]]:
    """`tiles` as long as a window that hides keys, but at least `TILE_TOKENS`; else `PATH_TILE_TOKENS`."""
    size = max(window, TILE_TOKENS) if window < before + q.shape[2] else PATH_TILE_TOKENS
    return tiles(q, k, before, window, size)


def _band(queries: slice, keys: slice, before: int, window: int, like: Tensor) -> Tensor | None:
    """(queries, keys) additive mask of a tile, 0 or −∞; None for a first tile that no window limits."""
    if not before and queries.stop <= window:
        return None
    seen = tile_mask(queries, keys, before, window, like.device)
    return like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)


def _kernel_dtypes(runs: Sequence[Run], window: int | None, dtype: torch.dtype) -> list[torch.dtype]:
    """The dtype in which the kernel computes each run of keys, for inputs of `dtype` (`FLOAT32_TOKENS`)."""
    visible = [
        run.length if window is None else min(run.length, max(window, TILE_TOKENS) + window - 1)
        for run in runs
    ]
    return [at_least_float32(dtype) if keys <= FLOAT32_TOKENS else dtype for keys in visible]


def _by_run(x: Tensor, runs: Sequence[Run], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """(T, H, D) → (documents, H, l, D) of each run in its dtype, with one cast for all runs."""
    cast = {dtype: heads_first(x.to(dtype), runs) for dtype in set(dtypes)}
    return [cast[dtype][index] for index, dtype in enumerate(dtypes)]


def _untiled(q: Tensor, k: Tensor, before: int, window: int) -> bool:
    """Whether one call without a mask is enough: causal if `before` is 0, else every query sees every key."""
    return window >= before + q.shape[2] and (before == 0 or before >= k.shape[2])


def _attend(
    kernel: Callable[..., tuple[Tensor, ...]],
    window: int | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: int,
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


def _gradients(window: int | None, before: int, upstream: Tensor, saved: Saved) -> Gradients:
    """Gradients of q, k and v of a run; tensors are (documents, H, l, …), `before` as in `_attend`."""
    q, k, v, out, lse = saved
    window = before + q.shape[2] if window is None else window
    if _untiled(q, k, before, window):
        dq, dk, dv = _kernel_backward(upstream, q, k, v, out, lse, 0.0, before == 0)
        return dq, dk, dv
    # Tiles have keys in common, whose gradients are summed.
    parts, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns in _tiles(q, k, before, window):
        band = _band(rows, columns, before, window, q)
        tile = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        part_lse = lse[:, :, rows].transpose(1, 2).contiguous().transpose(1, 2)  # see `heads_first`
        own = upstream[:, :, rows], *tile, out[:, :, rows], part_lse
        of_queries, of_keys, of_values = _kernel_backward(*own, 0.0, band is None, attn_mask=band)
        parts.append(of_queries)
        dk[:, :, columns] += of_keys
        dv[:, :, columns] += of_values
    return torch.cat(parts, dim=2), dk, dv


# Schemas are written out: torch 2.4 does not read postponed annotations.
@torch.library.custom_op(
    "multipack::document_attention",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt? window, Tensor? ends=None, bool causal=True)"
    " -> (Tensor, Tensor)",
)
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    ends: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention inside each document on a CPU, and its log-sum-exp.

    Args:
        q: (T, H, D).
        k: (T, K, D), where K divides H; K < H needs `GROUPED_KERNELS`.
        v: (T, K, D).
        cu_seqlens: (N + 1,) starts of the documents, or nodes, and T; empty ones are skipped.
        window: as for `attention`.
        ends: (T,) where documents share tokens, see `PackedTree`; None = they do not.
        causal: as for `attention`.

    Returns:
        (T, H, D) and (T, H) in float32, or float64 for float64: in half precision the backward pass reads the
        unrounded result.
    """
    out, lse = _over_runs(window, q, k, v, _documents(cu_seqlens, len(q), causal))

    def of_block(q: Tensor, k: Tensor, v: Tensor, before: int) -> tuple[Tensor, Tensor]:
        return _over_runs(window, q, k, v, Runs.whole(q, k, before))

    merge_blocks(of_block, path_blocks(cu_seqlens, ends, window), Saved(q, k, v, out, lse))
    return out, lse


@document_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = at_least_float32(q.dtype)
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)


@torch.library.custom_op(
    "multipack::document_attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor upstream, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, SymInt? window,"
    " Tensor? ends, bool causal) -> (Tensor, Tensor, Tensor)",
)
def _backward(upstream: Tensor, *saved_and_bounds: Any) -> Gradients:
    """`_document_gradients` in the dtypes of q, k and v."""
    saved, bounds = Saved(*saved_and_bounds[:5]), saved_and_bounds[5:]
    dq, dk, dv = _document_gradients(upstream, saved, *bounds)
    return dq.to(saved.q.dtype), dk.to(saved.k.dtype), dv.to(saved.v.dtype)


@_backward.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> Gradients:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _document_gradients(
    upstream: Tensor, saved: Saved, cu_seqlens: Tensor, window: int | None, ends: Tensor | None, causal: bool
) -> Gradients:
    """Gradients of q, k and v in float32 or float64; see `document_attention`."""
    totals = _gradients_over_runs(window, upstream, saved, _documents(cu_seqlens, len(saved.q), causal))

    def of_block(upstream: Tensor, saved: Saved, before: int) -> Gradients:
        return _gradients_over_runs(window, upstream, saved, Runs.whole(saved.q, saved.k, before))

    add_gradients(of_block, path_blocks(cu_seqlens, ends, window), upstream, saved, totals)
    return totals


def _over_runs(window: int | None, q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """(Q, H, D) results and (Q, H) log-sum-exps, in float32 or float64."""
    queries, keys, befores = runs
    dtypes = _kernel_dtypes(keys, window, q.dtype)
    inputs = zip(
        _by_run(q, queries, dtypes), *(_by_run(x, keys, dtypes) for x in (k, v)), befores, strict=True
    )
    parts = zip(*(_attend(_kernel, window, *each) for each in inputs), strict=True)
    out, lse = (tokens_first(each).to(at_least_float32(q.dtype)) for each in parts)
    return out, lse


def _gradients_over_runs(window: int | None, upstream: Tensor, saved: Saved, runs: Runs) -> Gradients:
    """Gradients of q, k and v in float32 or float64."""
    queries, keys, befores = runs
    dtypes = _kernel_dtypes(keys, window, saved.q.dtype)
    above, q, out = (_by_run(x, queries, dtypes) for x in (upstream, saved.q, saved.out))
    k, v = (_by_run(x, keys, dtypes) for x in (saved.k, saved.v))
    inputs = zip(befores, above, map(Saved, q, k, v, out, heads_first(saved.lse, queries)), strict=True)
    parts = zip(*(_gradients(window, *each) for each in inputs), strict=True)
    dq, dk, dv = (tokens_first(each).to(at_least_float32(saved.q.dtype)) for each in parts)
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.window, ends, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, ends)


def _autograd_backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, ends = ctx.saved_tensors
    return (*_backward(upstream, *saved, ctx.window, ends, ctx.causal), None, None, None, None)


document_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, limits: Limits) -> tuple[Tensor, None]:
    """Attention by `scaled_dot_product_attention` on any device, without a device synchronization."""
    grouped = k.shape[1] != q.shape[1]

    def kernel(query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> tuple[Tensor]:
        return (F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **mask),)

    return by_runs(partial(_attend, kernel, limits.window), q, k, v, bounds, limits.causal)[0], None
