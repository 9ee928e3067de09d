"""Backends whose kernels take `cu_seqlens`: FlashAttention-3, torch's own and xFormers.

All run on GPUs, in half precision, and skip masked pairs. Arguments are those of `attention`. The windows of
FlashAttention-3 and torch count the tokens before the query; `window` also counts the query. With other bounds of keys
than of queries, the bounds of paths, all align the last query with the last key.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention.masks import once_a_batch
from multipack.ops.attention.runs import gathered, repeat_heads


def flash3(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608)."""
    from flash_attn_interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        q, *gathered(k, v, batch), *_bounds(batch), causal=True, window_size=_left_and_right(window)
    )
    # Some versions also return the log-sum-exp.
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def varlen(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """FlashAttention-2 (Dao 2023, arXiv:2307.08691) as torch ships it; (n, 0) as its window makes it causal."""
    from torch.nn.attention.varlen import varlen_attn

    inputs, window_size = (q, *gathered(k, v, batch), *_bounds(batch)), _left_and_right(window)
    if "enable_gqa" not in (varlen_attn.__kwdefaults__ or {}):  # torch 2.11, whose function refuses K < H
        operator = torch.ops.torch_attn._varlen_attn
        causal = window is None
        found = operator(*inputs, is_causal=causal, window_size=list(window_size))
        return cast("Tensor", found[0])
    grouped = k.shape[1] != q.shape[1]
    result = varlen_attn(*inputs, window_size=window_size, enable_gqa=grouped)
    return cast("Tensor", result)


def xformers(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None) -> Tensor:
    """Memory-efficient attention of xFormers with a block-diagonal mask, whose window includes the query."""
    from xformers.ops import memory_efficient_attention

    bias = once_a_batch(batch, ("xformers", window), lambda: xformers_mask(batch, window, q.device))
    keys, values = gathered(k, v, batch)
    query, key, value = (x.unsqueeze(0) for x in (q, repeat_heads(keys, q), repeat_heads(values, q)))
    result: Tensor = memory_efficient_attention(query, key, value, attn_bias=bias)
    return result.squeeze(0)


def xformers_mask(batch: PackedBatch, window: int | None, device: torch.device) -> object:
    """A mask of xFormers, made from lengths on the host; it does not allow empty documents."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, BlockDiagonalMask

    lengths = [length for length in batch.lengths if length]
    if batch.tree is None:
        mask = BlockDiagonalCausalMask.from_seqlens(lengths, device=device)
        return mask if window is None else mask.make_local_attention(window)
    paths = [length for length in batch.tree.lengths_k if length]
    blocks = BlockDiagonalMask.from_seqlens(lengths, paths, device=device)
    if window is None:
        return blocks.make_causal_from_bottomright()
    return blocks.make_local_attention_from_bottomright(window)


def _bounds(batch: PackedBatch) -> tuple[Tensor, Tensor, int, int]:
    """Bounds of queries and of their keys, and the longest document, node or path of each."""
    if batch.tree is None:
        return batch.cu_seqlens, batch.cu_seqlens, batch.max_seqlen, batch.max_seqlen
    return batch.cu_seqlens, batch.tree.cu_seqlens_k, batch.max_seqlen, batch.tree.max_seqlen_k


def _left_and_right(window: int | None) -> tuple[int, int]:
    """Number of tokens that a query sees before and after itself; −1 = all."""
    return (-1 if window is None else window - 1), 0
