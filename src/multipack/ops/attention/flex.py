"""FlexAttention with a document mask whose blocks are computed from `first_visible`.

    documents        A A A B | B B B B | B B B B      blocks   `first_visible` never decreases, so the key blocks that
    first visible    0 0 0 3 | 3 3 3 3 | 3 3 3 3      ◩ · ·    a block of queries needs are a range: from the block of
                                                      ◩ ◩ ·    its first query's first key up to its own. A block left
    ◩ partial block: pairs are masked                 ◩ ■ ◩    of the diagonal is full if it starts at or after its
    ■ full block: no pair is masked                            last query's first key.

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
from multipack.ops.attention.masks import first_visible, once_a_batch, tree_sees

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
    if batch.tree is not None:
        return _tree_mask(batch, window)
    first = first_visible(batch, window)
    slots = first.shape[0]
    blocks, last = _blocks(slots, first.device)
    first_of_first = first[blocks * BLOCK_TOKENS]
    first_of_last = first[last.clamp(max=slots - 1)]
    needed = (blocks <= blocks[:, None]) & (blocks >= first_of_first[:, None] // BLOCK_TOKENS)
    full = (blocks < blocks[:, None]) & (blocks * BLOCK_TOKENS >= first_of_last[:, None])

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[query])

    return _mask(needed, full, last, sees, slots)


def _tree_mask(batch: PackedBatch, window: int | None) -> BlockMask:
    """The mask of a pack whose documents share tokens.

    A block of keys is needed if one of them is seen from the first query or later, and full if all are seen up to the
    last query. With a window the smallest and the largest distance of two blocks decide, too.
    """
    assert batch.tree is not None
    slots = batch.input_ids.shape[0]
    blocks, last = _blocks(slots, batch.cu_seqlens.device)
    least, most = _extremes(batch.tree.ends, blocks.shape[0])
    needed = (blocks < blocks[:, None]) & (most > blocks[:, None] * BLOCK_TOKENS)
    needed |= blocks == blocks[:, None]
    full = (blocks < blocks[:, None]) & (least > last[:, None])
    if window is not None:
        shallowest, deepest = _extremes(batch.position_ids, blocks.shape[0])
        needed &= shallowest[:, None] - deepest < window
        full &= deepest[:, None] - shallowest < window
    sees = tree_sees(batch, window)
    return _mask(needed, full, last, lambda _batch, _head, query, key: sees(query, key), slots)


def _blocks(slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of the blocks of a pack, and the last slot of each (beyond the end in the last one)."""
    blocks = torch.arange((slots + BLOCK_TOKENS - 1) // BLOCK_TOKENS, device=device)
    return blocks, blocks * BLOCK_TOKENS + BLOCK_TOKENS - 1


def _extremes(x: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Least and greatest number of each block of (T,) numbers."""
    last = x[-1:].expand(blocks * BLOCK_TOKENS - x.shape[0])
    whole = torch.cat([x, last]).view(blocks, BLOCK_TOKENS)
    return whole.amin(1), whole.amax(1)


def _mask(needed: Tensor, full: Tensor, last: Tensor, sees: Callable[..., Tensor], slots: int) -> BlockMask:
    """A mask of (blocks, blocks) of queries and keys: needed ones, of which some are full, and their pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    full = full & (last[:, None] < slots)  # like torch: a block that extends past the end is never full
    partial_count, partial_indices = _indices(needed & ~full)
    full_count, full_indices = _indices(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_indices,
        full_count,
        full_indices,
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=sees,
        seq_lengths=(slots, slots),
    )


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) bool → (1, 1, rows) counts, and (1, 1, rows, columns) column indices, true ones first."""
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return blocks.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


@cache
def compiled() -> Callable[..., Any]:
    """`flex_attention`, compiled: uncompiled it materializes all T² scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
