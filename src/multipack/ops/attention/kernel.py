"""Arguments and results of attention kernels, and how results over parts of the keys merge.

    sⱼ = q·kⱼ/√D      lse = log Σⱼ exp(sⱼ)      out = Σⱼ exp(sⱼ − lse) vⱼ

Results over disjoint keys merge by their log-sum-exps:

    lse = log(exp(lse₁) + exp(lse₂))            out = exp(lse₁ − lse) out₁ + exp(lse₂ − lse) out₂

Given `out` and `lse` over all keys, a key's probability is pⱼ = exp(sⱼ − lse), so each part of the keys contributes to
the gradient independently (Dao et al. 2022, arXiv:2205.14135, section B.2; ∂x is the gradient with respect to x):

    ∂vⱼ = Σ pⱼ ∂out        ∂sⱼ = pⱼ (∂out·vⱼ − ∂out·out)        ∂q = Σⱼ ∂sⱼ kⱼ/√D        ∂kⱼ = Σ ∂sⱼ q/√D

(sums without an index run over queries). Nodes of trees merge so with the nodes before them, and context ranks merge
their keys with the keys of other ranks: a `KeyBlock` has queries and earlier keys that they see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from multipack.data.packs.batch import Movable, PackedBatch

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


class Limits(NamedTuple):
    """The keys that a query sees, and how its scores become weights.

    Attributes:
        window: tokens that each position sees, itself included; None = its whole document.
        cap: c of the scores s, which become c · tanh(s / c); None = no bound.
        causal: whether no query sees a key behind it.
        sinks: (H,) scores without a value that take part in the softmax of every query; None = none.
        dropout: probability of dropping a weight.
    """

    window: int | None = None
    cap: float | None = None
    causal: bool = True
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def explicit(self) -> str:
        """What takes explicit scores, for a message; empty if weights are the softmax of scaled products."""
        if self.cap is not None:
            return f"a soft cap of scores (cap={self.cap:g})"
        if self.sinks is not None:
            return "attention sinks"
        return "dropout of weights" if self.dropout else ""


@dataclass(frozen=True)
class Pieces(Movable):
    """Documents that are bounds alone, under the names of `PackedBatch`."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    max_seqlen: int
    tree: None = None


Bounds = PackedBatch | Pieces | None
"""Documents; None = every query belongs to every key."""


class KeyBlock(NamedTuple):
    """Queries, and keys that they see.

    Attributes:
        rows: slots of the queries.
        columns: places of the keys.
        before: positions from the first key to the first query.
    """

    rows: slice
    columns: slice
    before: int


class Saved(NamedTuple):
    """Tensors that a backward pass reads: inputs of the forward pass, and results merged over all keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def of(self, block: KeyBlock) -> Saved:
        """The part of a block."""
        rows, columns, _ = block
        return Saved(self.q[rows], self.k[columns], self.v[columns], self.out[rows], self.lse[rows])


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the result over other keys into `out` (Q, H, D) and `lse` (Q, H), in place."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(other, (other_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def merge_blocks(
    forward: Callable[..., tuple[Tensor, Tensor]], blocks: Iterable[KeyBlock], saved: Saved
) -> None:
    """Merge the results of blocks of `saved` into its `out` and `lse`; forward(q, k, v, before) → out, lse."""
    for block in blocks:
        q, k, v, out, lse = saved.of(block)
        merge(out, lse, *forward(q, k, v, block.before))


def add_gradients(
    backward: Callable[..., Gradients],
    blocks: Iterable[KeyBlock],
    upstream: Tensor,
    saved: Saved,
    totals: Gradients,
) -> None:
    """Add the gradients of blocks to `totals`; backward(gradient of out, saved, before) → gradients."""
    for block in blocks:
        more = backward(upstream[block.rows], saved.of(block), block.before)
        places = block.rows, block.columns, block.columns
        for total, place, gradient in zip(totals, places, more, strict=True):
            total[place] += gradient
