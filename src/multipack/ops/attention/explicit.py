"""Attention with explicit scores: soft caps, sinks and dropout, which no other kernel computes, on any device.

    scores   s = c · tanh(q·k / √D / c)              c: soft cap of the scores (Gemma 2)
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
from multipack.ops.attention.kernel import Bounds, Gradients, Limits, Saved
from multipack.ops.attention.masks import tile_mask
from multipack.ops.attention.runs import by_runs, repeat_heads, tiles
from multipack.ops.autocast import at_least_float32

TILE_TOKENS = 128
"""Queries per tile."""


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, limits: Limits) -> tuple[Tensor, Tensor | None]:
    """The kernel `explicit`; see `Backend`. Results are float32 or wider; log-sum-exps are without sinks."""
    # torch.compile cannot trace code that reads lengths on the host.
    compute = torch.compiler.disable(_over_runs)  # type: ignore[no-untyped-call]
    out, lse = compute(q, k, v, bounds, limits)
    return out, lse


def backward(upstream: Tensor, saved: Saved, bounds: Bounds, limits: Limits) -> Gradients:
    """Gradients of the kernel `explicit`; see `Backend`."""
    with torch.enable_grad():
        q, k, v = (x.detach().to(at_least_float32(x.dtype)).requires_grad_() for x in saved[:3])
        out, lse = forward(q, k, v, bounds, limits)
        assert lse is not None  # of parts of a pack
        # The merged result is the sum of share · out over all parts, and ∂share/∂lse is share · (1 − share).
        share = (lse.detach() - saved.lse).exp().unsqueeze(-1) * upstream
        of_lse = (share * (out.detach() - saved.out)).sum(-1)
        dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (share, of_lse))
    return dq, dk, dv


def _over_runs(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, limits: Limits
) -> tuple[Tensor, Tensor | None]:
    """(T, H, V) results and, where they merge, (T, H) log-sum-exps, by tiles of each run of documents."""
    # Only parts of a pack merge; log-sum-exps take a fifth of the time.
    merges = not isinstance(bounds, PackedBatch)

    def attend(query: Tensor, key: Tensor, value: Tensor, before: int) -> tuple[Tensor, ...]:
        parts, key, value = [], repeat_heads(key, query), repeat_heads(value, query)
        for rows, columns in tiles(query, key, before, limits.window, TILE_TOKENS):
            seen = tile_mask(rows, columns, before, limits.window, query.device) if limits.causal else None
            tile = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            parts.append(checkpoint(weighted, *tile, seen, limits, merges, use_reentrant=False))
        return tuple(torch.cat(each, dim=2) for each in zip(*parts, strict=True))

    out, *lse = by_runs(attend, q, k, v, bounds, limits.causal)
    return out, lse[0] if lse else None


def weighted(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, limits: Limits, merges: bool = False
) -> tuple[Tensor, ...]:
    """Values weighted by the softmax of all scores.

    Args:
        q: (N, H, L, D).
        k: (N, H, S, D).
        v: (N, H, S, V).
        visible: bool or additive, broadcast to (N, H, L, S); None = every query sees every key. A query that sees no
            key has finite weights, as in transformers' eager attention.
        limits: how scores become weights; `visible` stands for its window.
        merges: whether log-sum-exps are computed too.

    Returns:
        (N, H, L, V) and, if it merges, (N, H, L) log-sum-exps of the scores, in float32 or float64.
    """
    wide, cap = at_least_float32(q.dtype), limits.cap
    with torch.autocast(q.device.type, enabled=False):
        scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if visible is not None and visible.dtype == torch.bool:
            scores = scores.masked_fill(~visible, torch.finfo(wide).min)
        elif visible is not None:
            scores = scores + visible
        if limits.sinks is None:
            weights = scores.softmax(-1)
        else:
            column = limits.sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        out = F.dropout(weights, limits.dropout) @ v.to(wide)
        return (out, scores.logsumexp(-1)) if merges else (out,)
