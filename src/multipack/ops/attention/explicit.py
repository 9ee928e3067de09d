"""Attention with explicit scores: soft caps, sinks and dropout, which the kernels of the table do not compute.

    scores   s = c · tanh(q·k · scale / c)           c: soft cap of the scores (Gemma 2)
    weights  exp(s) / (Σ exp(s) + exp(sink))         sink: a learned score per head without a value (gpt-oss)

A document is divided into tiles of queries, whose scores are computed again in the backward pass: memory grows with
tile · length, not with length². Scores are computed in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention.masks import tile_mask
from multipack.ops.attention.runs import gathered, heads_first, path_runs, repeat_heads, tiles, tokens_first
from multipack.ops.autocast import at_least_float32, in_autocast_dtype

TILE_TOKENS = 128
"""Queries per tile."""


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    window: int | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention inside each document, on any device; q, k, v, batch and window as for `attention`.

    Args:
        q: (T, H, D) queries.
        k: (T, K, D) keys.
        v: (T, K, V) values; V may differ from D.
        batch: holds the documents' bounds.
        window: tokens that each position sees, itself included.
        scale: factor of the scores.
        softcap: bound of the scores' absolute values; None = no bound.
        sinks: (H,) scores that take part in the softmax of every query; None = none.
        dropout: probability of dropping a weight.

    Returns:
        (T, H, V), in the dtype of the inputs (in autocast's where it is on).
    """
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    k, v = gathered(k, v, batch)
    found, paths = path_runs(batch.lengths, batch.lengths if batch.tree is None else batch.tree.lengths_k)
    keys, values = (heads_first(repeat_heads(x, q), paths) for x in (k, v))
    parts = []
    for query, key, value in zip(heads_first(q, found), keys, values, strict=True):
        outs, before = [], key.shape[2] - query.shape[2]
        for rows, columns in tiles(query, key, before, window, TILE_TOKENS):
            seen = tile_mask(rows, columns, before, window, query.device)
            tile = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            outs.append(
                checkpoint(weighted, *tile, seen, scale, softcap, sinks, dropout, use_reentrant=False)
            )
        parts.append(torch.cat(outs, dim=2))
    return tokens_first(parts)


def capped_attention(
    cap: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    backend: str = "auto",
    window: int | None = None,
) -> Tensor:
    """`attention` with the soft cap `cap` of its scores, which no backend computes; `backend` is not used."""
    # torch.compile cannot trace code that reads lengths on the host.
    compute = torch.compiler.disable(explicit)  # type: ignore[no-untyped-call]
    out: Tensor = compute(q, k, v, batch, window, scale=q.shape[-1] ** -0.5, softcap=cap)
    return out


def weighted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Values weighted by the softmax of all scores; the arguments are those of `explicit`.

    Args:
        q: (N, H, L, D).
        k: (N, H, S, D).
        v: (N, H, S, V).
        visible: bool or additive, broadcast to (N, H, L, S); None = every query sees every key. A query that sees no
            key has finite weights, as in transformers' eager attention.
        scale: factor of the scores.
        softcap: bound of the scores.
        sinks: (H,).
        dropout: probability of dropping a weight.

    Returns:
        (N, H, L, V), in the dtype of q.
    """
    wide = at_least_float32(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if visible is not None and visible.dtype == torch.bool:
            scores = scores.masked_fill(~visible, torch.finfo(wide).min)
        elif visible is not None:
            scores = scores + visible
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        return (F.dropout(weights, dropout) @ v.to(wide)).to(q.dtype)
