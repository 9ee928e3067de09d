"""Reference backends for comparison and tests: padded rows, and a dense mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.ops.attention.masks import document_mask


def padded(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """Every document padded to the longest one of the pack."""
    lengths = torch.tensor([length for length in batch.lengths if length])
    rows, longest = len(lengths), int(lengths.max())
    real = torch.arange(longest) < lengths[:, None]
    slots = real.flatten().nonzero().squeeze(1).to(q.device, non_blocking=True)

    def spread(x: Tensor) -> Tensor:
        if rows * longest == len(x):  # no padding is needed, or the batch is padded already
            wide = x
        else:
            wide = x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, slots, x)
        return wide.view(rows, longest, *x.shape[1:]).transpose(1, 2)

    mask = None
    if window is not None and window < longest:
        positions = torch.arange(longest, device=q.device)
        distance = positions[:, None] - positions
        mask = (distance >= 0) & (distance < window)
    grouped = k.shape[1] != q.shape[1]
    query, key, value = (spread(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)[slots]


def dense(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """All pairs of tokens of the pack, most of them masked."""
    grouped = k.shape[1] != q.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    mask = document_mask(batch, window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)
