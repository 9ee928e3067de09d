"""Attention of queries to some of the keys that they see: results that merge, and each share's part of the gradient.

    sⱼ = q·kⱼ/√D      lse = log Σⱼ exp(sⱼ)      out = Σⱼ exp(sⱼ − lse) vⱼ

Results over disjoint keys merge by their log-sum-exp:

    lse = log(exp(lse₁) + exp(lse₂))            out = exp(lse₁ − lse) out₁ + exp(lse₂ − lse) out₂

and the gradient divides without any exchange once `out` and `lse` of all keys are known, because then every weight
pⱼ = exp(sⱼ − lse) is (Dao et al. 2022, arXiv:2205.14135, section B.2; ∂ stands for the gradient of what it is before):

    ∂vⱼ = Σ pⱼ ∂out        ∂sⱼ = pⱼ (∂out·vⱼ − ∂out·out)        ∂q = Σⱼ ∂sⱼ kⱼ/√D        ∂kⱼ = Σ ∂sⱼ q/√D

sums without an index being over queries. What a query sees is either its own document up to itself, or all keys given:

    documents (3, 2)   ■ · ·  · ·           None   ■ ■ ■ ■
                       ■ ■ ·  · ·                  ■ ■ ■ ■
                       ■ ■ ■  · ·                  ■ ■ ■ ■
                       · · ·  ■ ·
                       · · ·  ■ ■

There are three kernels: torch's own for CPUs, FlashAttention-2 as torch ships it for half precision on NVIDIA GPUs, and
plain matrix products for everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

SCORES = 2**26
"""Most scores that `PLAIN` holds at a time: 256 MiB of them in float32."""

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Documents:
    """Documents beside each other, whose tokens are both queries and keys.

    Attributes:
        lengths: tokens of each, none empty.
        cu_seqlens: (N + 1,) int32, their starts and their end, on the device of the tokens.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor


class Kernel(ABC):
    """A way to compute it. Tensors are tokens first: q (Q, H, D), k and v (S, K, D), where K divides H."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: (Q, H, D).
            k: (S, K, D).
            v: (S, K, D).
            documents: what queries see; None = all keys.

        Returns:
            out (Q, H, D) and lse (Q, H), both in float32, or in float64 for float64.
        """
        return self._forward(q, _repeat(k, q), _repeat(v, q), documents)

    def backward(
        self,
        upstream: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        documents: Documents | None,
    ) -> Gradients:
        """Gradients of q, k and v from these keys, in float32 (float64 for float64).

        Args:
            upstream: (Q, H, D) gradient of `out`.
            q: as in `forward`.
            k: as in `forward`.
            v: as in `forward`.
            out: (Q, H, D) the result over all keys that the queries see anywhere.
            lse: (Q, H) its log-sum-exp.
            documents: as in `forward`.
        """
        grads = self._backward(upstream, q, _repeat(k, q), _repeat(v, q), out, lse, documents)
        return grads[0], _sum_repeated(grads[1], k), _sum_repeated(grads[2], v)

    @abstractmethod
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None
    ) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(
        self,
        upstream: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        documents: Documents | None,
    ) -> Gradients: ...


def choose_kernel(q: Tensor) -> Kernel:
    """The kernel for these queries, (tokens, H, D)."""
    if q.device.type == "cpu":
        return CPU
    half = q.dtype in (torch.float16, torch.bfloat16)
    # FlashAttention-2 wants half precision, whole groups of 8 up to 256, and compute capability 8.0 or newer.
    if q.device.type == "cuda" and not torch.version.hip and half and q.shape[-1] in range(8, 257, 8):
        return FLASH if torch.cuda.get_device_capability(q.device)[0] >= 8 else PLAIN
    return PLAIN


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add the result over other keys to `out` (Q, H, D) and `lse` (Q, H), in place."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(more, (more_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What results are kept in until they are complete."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Looped(Kernel):
    """One call for each run of equally long documents, or for all keys, in `wide` precision.

    Args:
        attend: (q, k, v, causal) → out, lse; tensors are (documents, H, tokens, D), lse (documents, H, tokens).
        gradients: (upstream, q, k, v, out, lse, causal) → gradients of q, k and v.
    """

    def __init__(
        self,
        attend: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]],
        gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients],
    ) -> None:
        self._attend, self._gradients = attend, gradients

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        dtype = wide(q.dtype)
        out, lse = q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)
        for count, rows, columns in _runs(documents, len(q), len(k)):
            query = _heads_first(q[rows], count, dtype)
            key, value = (_heads_first(x[columns], count, dtype) for x in (k, v))
            part, sums = self._attend(query, key, value, documents is not None)
            out[rows] = part.transpose(1, 2).flatten(0, 1)
            lse[rows] = sums.transpose(1, 2).flatten(0, 1)
        return out, lse

    def _backward(
        self,
        upstream: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        documents: Documents | None,
    ) -> Gradients:
        dtype = wide(q.dtype)
        grads = [x.new_empty(x.shape, dtype=dtype) for x in (q, k, v)]
        for count, rows, columns in _runs(documents, len(q), len(k)):
            above, query, ours = (_heads_first(x[rows], count, dtype) for x in (upstream, q, out))
            key, value = (_heads_first(x[columns], count, dtype) for x in (k, v))
            sums = lse[rows].view(count, -1, lse.shape[1]).transpose(1, 2)
            parts = self._gradients(above, query, key, value, ours, sums, documents is not None)
            for grad, part, where in zip(grads, parts, (rows, columns, columns), strict=True):
                grad[where] = part.transpose(1, 2).flatten(0, 1)
        return grads[0], grads[1], grads[2]


class Flash(Kernel):
    """FlashAttention-2 (Dao 2023, arXiv:2307.08691) as torch ships it: all documents in one call."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        causal = documents is not None
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_bounds(documents, q, k), 0.0, causal, False
        )
        # Heads come first. A copy: `merge` writes to it, and activation checkpointing may keep the kernel's own.
        return out.float(), lse.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def _backward(
        self,
        upstream: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        documents: Documents | None,
    ) -> Gradients:
        causal = documents is not None
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        above, ours = (x.to(q.dtype).contiguous() for x in (upstream, out))
        bounds, sums = _bounds(documents, q, k), lse.transpose(0, 1).contiguous()
        grads = torch.ops.aten._flash_attention_backward(
            above, q, k, v, ours, sums, *bounds, 0.0, causal, state, state.new_empty(0)
        )
        return grads[0].float(), grads[1].float(), grads[2].float()


def _bounds(documents: Documents | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Starts of queries' and of keys' documents, and the most tokens of one."""
    if documents is not None:
        longest = max(documents.lengths)
        return documents.cu_seqlens, documents.cu_seqlens, longest, longest
    # [0, n] that is made on the device, which nothing has to wait for
    starts = [torch.arange(0, n + 1, n, dtype=torch.int32, device=q.device) for n in (len(q), len(k))]
    return starts[0], starts[1], len(q), len(k)


def _runs(documents: Documents | None, rows: int, columns: int) -> Iterator[tuple[int, slice, slice]]:
    """Equally long documents beside each other: how many, their queries and their keys."""
    if documents is None:
        yield 1, slice(0, rows), slice(0, columns)
        return
    first = 0
    for length, equal in groupby(documents.lengths):
        count = len(list(equal))
        tokens = slice(first, first + count * length)
        yield count, tokens, tokens
        first = tokens.stop


def _heads_first(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(count · l, H, D) → (count, H, l, D)."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2).to(dtype)


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """(S, K, D) → (S, H, D): each key head once for every query head that reads it."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_repeated(grad: Tensor, x: Tensor) -> Tensor:
    """(S, H, D) → (S, K, D): what all query heads that read a key head add to its gradient."""
    if grad.shape == x.shape:
        return grad
    groups = grad.shape[1] // x.shape[1]
    return grad.reshape(len(x), x.shape[1], groups, x.shape[2]).sum(2)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    # The sums go back as the kernel wrote them, (B, H, l) stored as (B, l, H): torch 2.13 reads their strides, other
    # versions are not known to, and would give wrong gradients without an error.
    sums = lse.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream, q, k, v, out, sums, 0.0, causal
    )
    return dq, dk, dv


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for rows, columns in _tiles(q, k, causal):
        scores = _scores(q, k, rows, columns, causal)
        lse[..., rows] = sums = scores.logsumexp(-1)
        out[..., rows, :] = (scores - sums.unsqueeze(-1)).exp_() @ v[..., columns, :]
    return out, lse


def _plain_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    shift = (upstream * out).sum(-1, keepdim=True)
    for rows, columns in _tiles(q, k, causal):
        above = upstream[..., rows, :]
        weights = (_scores(q, k, rows, columns, causal) - lse[..., rows, None]).exp_()
        dv[..., columns, :] += weights.mT @ above
        scores = weights * (above @ v[..., columns, :].mT - shift[..., rows, :]) * q.shape[-1] ** -0.5
        dq[..., rows, :] = scores @ k[..., columns, :]
        dk[..., columns, :] += scores.mT @ q[..., rows, :]
    return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Queries whose scores fit into memory, and the keys that any of them sees."""
    documents, heads, rows, columns = *q.shape[:3], k.shape[2]
    size = max(1, SCORES // (documents * heads * columns))
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        yield slice(start, stop), slice(0, stop if causal else columns)


def _scores(q: Tensor, k: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    """(B, H, rows, columns) scores of a tile; −∞ where a query does not see a key."""
    scores: Tensor = q[..., rows, :] @ k[..., columns, :].mT * q.shape[-1] ** -0.5
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(rows.start + 1)
        scores.masked_fill_(unseen, -torch.inf)
    return scores


CPU = Looped(_cpu_forward, _cpu_backward)
PLAIN = Looped(_plain_forward, _plain_backward)
FLASH = Flash()
