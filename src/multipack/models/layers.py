"""Layers of the decoder: blocks, attention, feed-forward, rotary positions.

    x ─┬─ norm ─ attention ─ + ─┬─ norm ─ feed-forward ─ + ─▶
       └─────────────────────┘  └────────────────────────┘

Tensors have no batch dimension: their first dimension is the T tokens of a pack.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multipack.data.batch import PackedBatch
from multipack.ops.attention import attention
from multipack.ops.autocast import in_autocast_dtype
from multipack.ops.norm import RMSNorm
from multipack.shapes import LLAMA3_SCALING, ModelShape

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotation angles, two (T, 1, D/2) tensors."""
Attend = Callable[..., Tensor]
"""A function with the signature of `attention`."""


class Block(nn.Module):
    """Attention and feed-forward, each applied to the normalized residual stream and added to it.

    Attributes:
        around: if set, training calls around(compute, x, batch, rotation) instead of compute(x, batch, rotation): the
            hook for activation checkpointing, inside the block so that wrappers (FSDP, torch.compile) stay outside.
        tiles: chunks of the tokens on which the feed-forward runs, each recomputed in the backward pass; 1 = no
            chunks.
    """

    def __init__(self, shape: ModelShape, attention: str) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, attention)
        self.feed_forward_norm = make_norm(shape)
        self.feed_forward = FeedForward(shape)
        self.around: Callable[..., Tensor] | None = None
        self.tiles = 1

    def forward(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, attend: Attend | None = None
    ) -> Tensor:
        """(T, d) → (T, d); `attend` is that of `Attention.forward`."""
        if self.around is not None and self.training and attend is None:
            return self.around(self.compute, x, batch, rotation)
        return self.compute(x, batch, rotation, attend)

    def compute(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, attend: Attend | None = None
    ) -> Tensor:
        """`forward` without the hook."""
        branch = self.attention(self.attention_norm(x), batch, rotation, attend)
        x = x + F.dropout(branch, self.dropout, self.training)
        branch = self._feed_forward(self.feed_forward_norm(x))
        return x + F.dropout(branch, self.dropout, self.training)

    def unsaved_matrices(self) -> set[tuple[int, int]]:
        """(inputs, outputs) of the matrices whose products selective checkpointing does not keep.

        These are the block's last product, which the backward pass does not read unless dropout follows; with tiles,
        all products of the feed-forward, whose chunks are recomputed.
        """
        matrices = self.feed_forward.matrices()
        if self.tiles > 1:
            return set(matrices)
        return set() if self.dropout else set(matrices[-1:])

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.tiles == 1:
            return cast(Tensor, self.feed_forward(x))
        parts = [part for part in x.tensor_split(self.tiles) if len(part)]
        return torch.cat([checkpoint(self.feed_forward, part, use_reentrant=False) for part in parts])


class Attention(nn.Module):
    """Query, key and value projections, attention, and the output projection.

    The number of heads follows from the weights, which are a part of the whole under tensor parallelism.

    Attributes:
        attend: the attention function; context parallelism replaces it by ring attention.
    """

    def __init__(self, shape: ModelShape, backend: str) -> None:
        super().__init__()
        width = shape.head_width
        self.head_width, self.backend, self.window = width, backend, shape.window or None
        bias = shape.bias or shape.qkv_bias
        self.query = nn.Linear(shape.d_model, shape.heads * width, bias=bias)
        self.key = nn.Linear(shape.d_model, shape.kv_heads * width, bias=bias)
        self.value = nn.Linear(shape.d_model, shape.kv_heads * width, bias=bias)
        self.output = nn.Linear(shape.heads * width, shape.d_model, bias=shape.bias)
        self.attend: Attend = attention

    def forward(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, attend: Attend | None = None
    ) -> Tensor:
        """(T, d) → (T, d); `attend`, a key-value cache's function, replaces `self.attend` in this call."""
        x = in_autocast_dtype(x)  # once: otherwise each projection makes its own copy
        heads = (-1, self.head_width)
        query = self.query(x).unflatten(-1, heads)
        key = self.key(x).unflatten(-1, heads)
        value = self.value(x).unflatten(-1, heads)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        values = (attend or self.attend)(query, key, value, batch, self.backend, self.window)
        out: Tensor = self.output(values.flatten(1))
        return out


class FeedForward(nn.Module):
    """Feed-forward with GELU (GPT-2's tanh approximation) or SwiGLU (Shazeer 2020, arXiv:2002.05202).

    A class that replaces it must define `forward` and `matrices`.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gated = shape.gated
        if shape.gated:
            self.gate = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, d)."""
        x = in_autocast_dtype(x)  # once: otherwise each projection makes its own copy
        if self.gated:
            inner = F.silu(self.gate(x)) * self.up(x)
        else:
            inner = F.gelu(self.up(x), approximate="tanh")
        out: Tensor = self.down(inner)
        return out

    def matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each matrix (of this rank's part of it), in the order of their use."""
        weights: list[Any] = [layer.weight for layer in self.children()]
        pieces = [each.to_local() if hasattr(each, "to_local") else each for each in weights]
        return [(each.shape[1], each.shape[0]) for each in pieces]


def rotary_tables(
    position_ids: Tensor, width: int, theta: float, dtype: torch.dtype, factor: float = 1.0
) -> Rotation:
    """Cosines and sines of position · θ^(−2i/D) for i < D/2 (RoPE: Su et al. 2021, arXiv:2104.09864).

    Args:
        position_ids: (T,) positions, which restart at every document.
        width: D, the width of one head; even.
        theta: base of the frequencies.
        dtype: float32 or wider; bfloat16 has 8 significant bits, too few to distinguish neighboring positions.
        factor: Llama 3's scaling: frequencies of less than 1 turn in 8,192 positions are divided by it, those of more
            than 4 are kept, and those between are interpolated; 1 = none.

    Returns:
        Two (T, 1, D/2) tensors of `dtype`, ready to broadcast over heads.
    """
    exponents = torch.arange(0, width, 2, dtype=dtype, device=position_ids.device) / width
    frequencies = 1.0 / theta**exponents
    if factor != 1.0:
        turns = frequencies * (LLAMA3_SCALING["original_max_position_embeddings"] / (2 * math.pi))
        low, high = LLAMA3_SCALING["low_freq_factor"], LLAMA3_SCALING["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / factor)
    angles = position_ids.to(dtype)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle.

    Args:
        x: (T, heads, D).
        cosine: (T, 1, D/2) float32 or wider.
        sine: as `cosine`.

    Returns:
        (T, heads, D) in x's dtype, computed in the dtype of `cosine` and rounded once.
    """
    if torch.compiler.is_compiling():  # which fuses arithmetic and cannot trace `_Rotate`'s writes into views
        first, second = x.to(cosine.dtype).chunk(2, dim=-1)
        halves = first * cosine - second * sine, second * cosine + first * sine
        return torch.cat(halves, dim=-1).to(x.dtype)
    rotated: Tensor = _Rotate.apply(x, cosine, sine)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """Rotation whose backward pass is the inverse rotation: it saves only the tables, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        first, second = x.to(cosine.dtype).chunk(2, dim=-1)
        out = torch.empty(x.shape, dtype=cosine.dtype, device=x.device)
        out_first, out_second = out.chunk(2, dim=-1)
        torch.mul(first, cosine, out=out_first).addcmul_(second, sine, value=-1)
        torch.mul(second, cosine, out=out_second).addcmul_(first, sine)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return rotate(upstream, cosine, -sine), None, None


def make_norm(shape: ModelShape) -> nn.Module:
    """The normalization layer of a shape, over d elements."""
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.d_model, eps=shape.norm_eps, bias=shape.bias)
    return RMSNorm(shape.d_model, eps=shape.norm_eps)
