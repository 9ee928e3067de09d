"""The backend `loop`: torch's own kernels, called once per run of equally long documents.

On a CPU it is one operator, `multipack::document_attention`, whose only input that changes from pack to pack is the
tensor `cu_seqlens`, so torch.compile compiles once for all layouts of documents. It calls the kernels behind
`scaled_dot_product_attention` directly, forward and backward: results are bit for bit those of a loop over that
function, without an autograd node per document.

    window=3      keys    a b c d e f g          A document longer than the window is cut into tiles of
    queries a b c       ■ ■ ■                    queries, each with the keys that any of them sees: work
            d e f         ■ ■ ■ ■ ■              grows with length · window, not with length².
            g                   ■ ■ ■

On other devices it calls `scaled_dot_product_attention` in a loop over `batch.lengths`, which is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.ops.attention.runs import repeat_heads, runs
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


def loop(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """The backend `loop`: (T, H, D); arguments are those of `attention`."""
    if q.device.type != "cpu":
        return _by_sdpa(q, k, v, batch, window)
    if k.shape[1] != q.shape[1] and not GROUPED_KERNELS:
        k, v = repeat_heads(k, q), repeat_heads(v, q)
    out: Tensor = document_attention(q, k, v, batch.cu_seqlens, window)[0]
    return out.to(q.dtype)


def _tiles(length: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Tiles of a document: slices of its queries, and of the keys that any of them sees."""
    if window is None or window >= length:
        yield slice(0, length), slice(0, length)
        return
    size = max(window, TILE_TOKENS)
    for start in range(0, length, size):
        stop = min(start + size, length)
        yield slice(start, stop), slice(max(0, start - window + 1), stop)


def _band(queries: slice, keys: slice, window: int | None, like: Tensor) -> Tensor | None:
    """(queries, keys) additive mask of a tile: 0 or −∞; None if plain causal attention is equivalent."""
    if window is None or queries.stop <= window:
        return None
    rows, columns = (torch.arange(x.start, x.stop, device=like.device) for x in (queries, keys))
    distance = rows[:, None] - columns
    unseen = (distance < 0) | (distance >= window)
    return like.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)


def _lengths(cu_seqlens: Tensor, slots: int) -> list[int]:
    """Slots of each document."""
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != slots:
        raise ValueError(
            f"cu_seqlens must go from 0 to {slots:,}, the tokens of q; got {starts[0]} … {starts[-1]}"
        )
    return [stop - start for start, stop in pairwise(starts)]


def _kernel_dtype(keys: slice, dtype: torch.dtype) -> torch.dtype:
    return at_least_float32(dtype) if keys.stop - keys.start <= FLOAT32_TOKENS else dtype


@torch.library.custom_op("multipack::document_attention", mutates_args=(), device_types="cpu")
def document_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention inside each document on a CPU, and its log-sum-exp.

    Args:
        q: (T, H, D).
        k: (T, K, D), where K divides H; K < H needs `GROUPED_KERNELS`.
        v: (T, K, D).
        cu_seqlens: (N + 1,) starts of the documents and T; empty documents are skipped.
        window: as for `attention`.

    Returns:
        (T, H, D) and (T, H) in float32, or float64 for float64: in half precision the backward pass reads the
        unrounded result.
    """
    out = q.new_empty(q.shape, dtype=at_least_float32(q.dtype))
    lse = q.new_empty(q.shape[:2], dtype=out.dtype)
    for run in runs(_lengths(cu_seqlens, len(q))):
        for queries, keys in _tiles(run.length, window):
            dtype = _kernel_dtype(keys, q.dtype)
            query = run.heads_first(q, dtype, queries)
            key, value = (run.heads_first(x, dtype, keys) for x in (k, v))
            band = _band(queries, keys, window, query)
            part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, band is None, attn_mask=band
            )
            run.view(out, queries).copy_(part_out.transpose(1, 2))
            run.view(lse, queries).copy_(part_lse.transpose(1, 2))
    return out, lse


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    dtype = at_least_float32(q.dtype)
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)


@torch.library.custom_op("multipack::document_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    # Tiles of a window have keys in common, whose gradients are summed.
    make, write = (torch.empty_like, Tensor.copy_) if window is None else (torch.zeros_like, Tensor.add_)
    grads = torch.empty_like(q), make(k), make(v)
    for run in runs(_lengths(cu_seqlens, len(q))):
        for queries, keys in _tiles(run.length, window):
            dtype = _kernel_dtype(keys, q.dtype)
            out_grad, query, output = (run.heads_first(x, dtype, queries) for x in (upstream, q, out))
            key, value = (run.heads_first(x, dtype, keys) for x in (k, v))
            band = _band(queries, keys, window, query)
            part_lse = run.lse_heads_first(lse, queries)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                out_grad, query, key, value, output, part_lse, 0.0, band is None, attn_mask=band
            )
            run.view(grads[0], queries).copy_(parts[0].transpose(1, 2))
            for grad, part in zip(grads[1:], parts[1:], strict=True):
                write(run.view(grad, keys), part.transpose(1, 2))
    return grads


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
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _autograd_backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(upstream, *ctx.saved_tensors, ctx.window), None, None)


document_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """Attention by `scaled_dot_product_attention` on any device, without a device synchronization."""
    grouped = k.shape[1] != q.shape[1]
    documents: list[Tensor] = []
    for run in runs(batch.lengths):
        parts = []
        for queries, keys in _tiles(run.length, window):
            query = run.heads_first(q, q.dtype, queries)
            key, value = (run.heads_first(x, q.dtype, keys) for x in (k, v))
            band = _band(queries, keys, window, query)
            parts.append(
                F.scaled_dot_product_attention(
                    query, key, value, attn_mask=band, is_causal=band is None, enable_gqa=grouped
                )
            )
        documents.append(torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1))
    return torch.cat(documents)
