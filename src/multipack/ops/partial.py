"""Attention to part of the keys, for context parallelism: results that can be merged, and each part's gradients.

    sⱼ = q·kⱼ/√D      lse = log Σⱼ exp(sⱼ)      out = Σⱼ exp(sⱼ − lse) vⱼ

Results over disjoint keys merge by their log-sum-exp:

    lse = log(exp(lse₁) + exp(lse₂))            out = exp(lse₁ − lse) out₁ + exp(lse₂ − lse) out₂

Given `out` and `lse` over all keys, a key's probability is pⱼ = exp(sⱼ − lse), so each part of the keys contributes to
the gradient independently (Dao et al. 2022, arXiv:2205.14135, section B.2; ∂x is the gradient with respect to x):

    ∂vⱼ = Σ pⱼ ∂out        ∂sⱼ = pⱼ (∂out·vⱼ − ∂out·out)        ∂q = Σⱼ ∂sⱼ kⱼ/√D        ∂kⱼ = Σ ∂sⱼ q/√D

(sums without an index run over queries). A query sees either its own document up to itself, or all given keys:

    documents (3, 2)   ■ · ·  · ·           None   ■ ■ ■ ■
                       ■ ■ ·  · ·                  ■ ■ ■ ■
                       ■ ■ ■  · ·                  ■ ■ ■ ■
                       · · ·  ■ ·
                       · · ·  ■ ■
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multipack.ops.attention.masks import tile_mask
from multipack.ops.attention.runs import Run, heads_first, repeat_heads, runs, tiles, tokens_first
from multipack.ops.attention.table import Request, find_backend
from multipack.ops.autocast import at_least_float32

SCORES = 2**26
"""Maximum number of scores that `PLAIN` holds at a time: 256 MiB in float32."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


@dataclass(frozen=True)
class Bounds:
    """Boundaries of N consecutive documents whose tokens are both queries and keys.

    Attributes:
        lengths: number of tokens of each document, at least 1.
        cu_seqlens: (N + 1,) int32 cumulative lengths, from 0, on the device of the tokens.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention of (Q, H, D) queries to (S, K, D) keys and values, where K divides H.

    With `documents` it is causal attention inside these documents, where Q = S; with None every query sees all keys.
    Results are float32, or float64 for float64 inputs.

    Attributes:
        attend: the function behind `forward`, which gets keys and values repeated to H heads.
        gradients: the function behind `backward`; it returns gradients of the repeated keys and values.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Bounds | None], tuple[Tensor, Tensor]]
    gradients: Callable[..., Gradients]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Bounds | None) -> tuple[Tensor, Tensor]:
        """(Q, H, D) results and (Q, H) log-sum-exps over these keys."""
        return self.attend(q, repeat_heads(k, q), repeat_heads(v, q), documents)

    def backward(
        self,
        upstream: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        documents: Bounds | None,
    ) -> Gradients:
        """Gradients of q, k and v by these keys.

        `out`, `lse` and `upstream`, the gradient of `out`, belong to the merged result over all keys.
        """
        keys, values = repeat_heads(k, q), repeat_heads(v, q)
        dq, dk, dv = self.gradients(upstream, q, keys, values, out, lse, documents)
        return dq, _sum_repeated(dk, k), _sum_repeated(dv, v)


def choose_kernel(q: Tensor) -> Kernel:
    """The kernel for (tokens, H, D) queries: torch's CPU kernel, FlashAttention-2, or plain matrix products."""
    if q.device.type == "cpu":
        return CPU
    heads, width = q.shape[1:]
    call = Request(q.device, q.dtype, heads, heads, width, window=None, backward=True)
    runs_flash = not torch.version.hip and not find_backend("varlen").obstacle(call)
    return FLASH if runs_flash else PLAIN


def _sum_repeated(grad: Tensor, x: Tensor) -> Tensor:
    """(S, H, D) → (S, K, D): sum over the query heads that read a key head."""
    groups = grad.shape[1] // x.shape[1]
    return grad if groups == 1 else grad.view(len(x), -1, groups, grad.shape[2]).sum(2)


def _flash_bounds(documents: Bounds | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens of queries and of keys, and the number of tokens of the longest document of each."""
    if documents is not None:
        longest = max(documents.lengths)
        return documents.cu_seqlens, documents.cu_seqlens, longest, longest
    # [0, n], made on the device without a synchronization.
    starts = [torch.arange(0, n + 1, n, dtype=torch.int32, device=q.device) for n in (len(q), len(k))]
    return starts[0], starts[1], len(q), len(k)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, documents: Bounds | None) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (Dao 2023, arXiv:2307.08691) as built into torch: all documents in one call."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_flash_bounds(documents, q, k), 0.0, documents is not None, False
    )
    # The kernel returns lse as (H, Q). Copied, because `merge` writes to it while activation checkpointing may keep the
    # kernel's tensor.
    return out.float(), lse.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _flash_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Bounds | None
) -> Gradients:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    out_grad, output = (x.to(q.dtype).contiguous() for x in (upstream, out))
    bounds, lse = _flash_bounds(documents, q, k), lse.transpose(0, 1).contiguous()
    causal = documents is not None
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        out_grad, q, k, v, output, lse, *bounds, 0.0, causal, state, state.new_empty(0)
    )
    return dq.float(), dk.float(), dv.float()


def _divided(x: Tensor, documents: Bounds | None) -> list[Tensor]:
    """(T, H, …) → (documents, H, l, …) of each run in float32 or float64; without documents, all tokens are one run."""
    found = [Run(1, len(x))] if documents is None else list(runs(documents.lengths))
    return heads_first(x.to(at_least_float32(x.dtype)), found)


def _looped(attend: Callable[..., tuple[Any, ...]], gradients: Callable[..., Gradients]) -> Kernel:
    """A kernel that calls batched functions once per run of equally long documents, or once for all keys.

    Args:
        attend: (q, k, v, 0.0, causal) → out, lse, …; tensors are (documents, H, l, D) in float32 or float64, lse
            (documents, H, l). 0.0 is the probability of dropout in torch's functions.
        gradients: (gradient of out, q, k, v, out, lse, 0.0, causal) → gradients of q, k and v.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, documents: Bounds | None) -> tuple[Tensor, Tensor]:
        inputs = (_divided(x, documents) for x in (q, k, v))
        parts = [attend(*each, 0.0, documents is not None)[:2] for each in zip(*inputs, strict=True)]
        out, lse = (tokens_first(each) for each in zip(*parts, strict=True))
        return out, lse

    def backward(
        upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Bounds | None
    ) -> Gradients:
        inputs = (_divided(x, documents) for x in (upstream, q, k, v, out, lse.contiguous()))
        parts = [gradients(*each, 0.0, documents is not None) for each in zip(*inputs, strict=True)]
        dq, dk, dv = (tokens_first(each) for each in zip(*parts, strict=True))
        return dq, dk, dv

    return Kernel(forward, backward)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, _dropout: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for rows, columns in _tiles(q, k, causal):
        scores = _scores(q, k, rows, columns, causal)
        lse[..., rows] = scores.logsumexp(-1)
        out[..., rows, :] = (scores - lse[..., rows, None]).exp_() @ v[..., columns, :]
    return out, lse


def _plain_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _dropout: float, causal: bool
) -> Gradients:
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    shift = (upstream * out).sum(-1, keepdim=True)
    for rows, columns in _tiles(q, k, causal):
        out_grad = upstream[..., rows, :]
        probabilities = (_scores(q, k, rows, columns, causal) - lse[..., rows, None]).exp_()
        dv[..., columns, :] += probabilities.mT @ out_grad
        products = out_grad @ v[..., columns, :].mT
        score_grad = probabilities * (products - shift[..., rows, :]) * q.shape[-1] ** -0.5
        dq[..., rows, :] = score_grad @ k[..., columns, :]
        dk[..., columns, :] += score_grad.mT @ q[..., rows, :]
    return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Slices of queries with at most `SCORES` scores (at least one query), and of the keys that any of them sees."""
    documents, heads, keys = q.shape[0], q.shape[1], k.shape[2]
    size = max(1, SCORES // (documents * heads * keys))
    return tiles(q, k, 0 if causal else keys, None, size)


def _scores(q: Tensor, k: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    """(B, H, rows, columns) scores of a tile; −∞ where a query does not see a key."""
    scores: Tensor = q[..., rows, :] @ k[..., columns, :].mT * q.shape[-1] ** -0.5
    if causal:
        scores.masked_fill_(~tile_mask(rows, columns, 0, None, q.device), -torch.inf)
    return scores


CPU = _looped(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
PLAIN = _looped(_plain_forward, _plain_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
