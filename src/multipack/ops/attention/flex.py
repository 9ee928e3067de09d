"""FlexAttention with a document mask whose blocks are computed from `seen_until`.

    documents     A A A B | B B B B | B B B B      blocks   A block of keys is needed if one of them is seen from the
    seen until    3 3 3 c | c c c c | c c c c      ◩ · ·    first query of a block or later, and full if all are seen
                  (c = 12)                         ◩ ◩ ·    up to the last query. With a window the smallest and the
    ◩ partial block: pairs are masked              ◩ ■ ◩    largest distance of two blocks decide, too.
    ■ full block: no pair is masked

torch's `create_block_mask` evaluates all T² pairs of tokens instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention.kernel import Limits
from multipack.ops.attention.masks import once_a_batch, pairs_of, seen_until

if TYPE_CHECKING:  # torch >= 2.5; hosts import this module with torch 2.4
    from torch.nn.attention.flex_attention import BlockMask

BLOCK_TOKENS = 128
"""Queries and keys per block, the default of torch's kernels."""


def flex(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, limits: Limits) -> tuple[Tensor, None]:
    """The kernel `flex`: torch's FlexAttention, compiled when first used."""
    from torch.nn.attention.flex_attention import flex_attention

    grouped, window = k.shape[1] != q.shape[1], limits.window
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if torch.compiler.is_compiling():  # the mask becomes part of the compiled graph
        mask, attend = block_mask(batch, window), flex_attention
    else:
        mask = once_a_batch(batch, ("flex", window), lambda: block_mask(batch, window))
        attend = compiled()
    # Torch's default chooses a decoding kernel for short packs: other numbers, and another compilation.
    out: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=grouped, kernel_options={"BACKEND": "TRITON"})
    return out.squeeze(0).transpose(0, 1), None


def block_mask(batch: PackedBatch, window: int | None = None) -> BlockMask:
    """`document_mask(batch, window)` as a mask of blocks, without T² operations.

    Returns:
        A mask for (1, heads, T, D) queries and keys, on the batch's device, made without a synchronization.
    """
    from torch.nn.attention.flex_attention import BlockMask

    ends, places = seen_until(batch)
    slots = ends.shape[0]
    blocks = torch.arange((slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS, device=ends.device)
    queries, before = blocks[:, None], blocks < blocks[:, None]
    last = queries * BLOCK_TOKENS + BLOCK_TOKENS - 1
    least, most = _extremes(ends, blocks.shape[0])
    needed = before & (most > queries * BLOCK_TOKENS)
    full = (
        before & (least > last) & (last < slots)
    )  # like torch: a block that extends past the end is never full
    if window is not None:
        shallowest, deepest = _extremes(places, blocks.shape[0])
        needed &= shallowest[:, None] - deepest < window
        full &= deepest[:, None] - shallowest < window
    sees = pairs_of(batch, window)
    return BlockMask.from_kv_blocks(
        *_indices((needed | (blocks == queries)) & ~full),
        *_indices(full),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=lambda _batch, _head, query, key: sees(query, key),
        seq_lengths=(slots, slots),
    )


def _extremes(x: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Least and greatest number of each block of (T,) numbers."""
    last = x[-1:].expand(blocks * BLOCK_TOKENS - x.shape[0])
    whole = torch.cat([x, last]).view(blocks, BLOCK_TOKENS)
    return whole.amin(1), whole.amax(1)


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) bool → (1, 1, rows) counts, and (1, 1, rows, columns) column indices, true ones first."""
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return blocks.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


@cache
def compiled() -> Callable[..., Any]:
    """`flex_attention`, compiled: uncompiled it materializes all T² scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
