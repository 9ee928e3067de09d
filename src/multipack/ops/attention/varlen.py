"""Kernels that take `cu_seqlens`: FlashAttention as torch calls it, and xFormers.

All run on GPUs, in half precision, and skip masked pairs. Where queries and keys have different bounds, as nodes and
their paths do, all align the last query with the last key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention.kernel import Bounds, Gradients, Limits, Saved
from multipack.ops.attention.masks import once_a_batch
from multipack.ops.attention.runs import gathered, repeat_heads


def flash(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, limits: Limits) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (Dao 2023, arXiv:2307.08691), or the version that torch activated in its place."""
    import torch.nn.attention.varlen  # registers its operators

    # The operator under `varlen_attn`, which in torch 2.11 refuses fewer key heads.
    out, lse, _state = torch.ops.torch_attn._varlen_attn(
        q, *gathered(k, v, bounds), *_bounds(bounds, q, k), **_causal(limits)
    )
    return out, lse.transpose(0, 1)


def flash_backward(upstream: Tensor, saved: Saved, bounds: Bounds, limits: Limits) -> Gradients:
    """Gradients of `flash`, where no tokens are shared."""
    q, k, v, out, lse = saved
    of_out, output = (x.to(q.dtype).contiguous() for x in (upstream, out))
    tensors = of_out, q, k, v, output, lse.transpose(0, 1).contiguous()
    dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of its generator: there is none
    dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
        *tensors, *_bounds(bounds, q, k), **_causal(limits), rng_state=dropout
    )
    return dq.float(), dk.float(), dv.float()


def xformers(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, limits: Limits) -> tuple[Tensor, None]:
    """Memory-efficient attention of xFormers with a block-diagonal mask, whose window includes the query."""
    from xformers.ops import memory_efficient_attention

    window = limits.window
    bias = once_a_batch(batch, ("xformers", window), lambda: xformers_mask(batch, window, q.device))
    keys, values = gathered(k, v, batch)
    query, key, value = (x.unsqueeze(0) for x in (q, repeat_heads(keys, q), repeat_heads(values, q)))
    result: Tensor = memory_efficient_attention(query, key, value, attn_bias=bias)
    return result.squeeze(0), None


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


def _bounds(bounds: Bounds, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Starts of queries and of their keys, and the most tokens of each in a document."""
    if bounds is None:  # [0, n], made on the device without a synchronization
        starts = [torch.arange(0, n + 1, n, dtype=torch.int32, device=q.device) for n in (len(q), len(k))]
        return starts[0], starts[1], len(q), len(k)
    if bounds.tree is None:
        return bounds.cu_seqlens, bounds.cu_seqlens, bounds.max_seqlen, bounds.max_seqlen
    return bounds.cu_seqlens, bounds.tree.cu_seqlens_k, bounds.max_seqlen, bounds.tree.max_seqlen_k


def _causal(limits: Limits) -> dict[str, Any]:
    """Arguments of torch's operators. Their windows count the tokens before and after a query; −1 = all."""
    before = -1 if limits.window is None else limits.window - 1
    # As `varlen_attn` calls them: a causal window has no separate flag.
    is_causal = limits.causal and limits.window is None
    return {"is_causal": is_causal, "window_size": [before, 0 if limits.causal else -1]}
