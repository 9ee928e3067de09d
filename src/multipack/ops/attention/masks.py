"""Masks, and the kernel `dense` that uses one. All are computed from the slot up to which each slot is seen.

    documents        A A A B B          cu_seqlens 0 3 5
    ends             3 3 3 5 5          slot i is seen from i … ends[i] − 1

    nodes            p p p a a b        documents p p p a a and p p p b, which share tokens
    ends             6 6 6 5 5 6        (`PackedTree.ends`)

These T numbers determine the dense mask, 4-D masks for other models, and the blocks of FlexAttention. They are
computed on the device of `cu_seqlens`, without a synchronization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention.kernel import Limits

Made = TypeVar("Made")


def seen_until(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """For each slot: the end of the slots that see it, and its position, from which windows count.

    Returns:
        Two (T,) tensors on the device of `cu_seqlens`; positions are comparable inside a document.
    """
    if batch.tree is not None:
        return batch.tree.ends, batch.position_ids
    documents, slots = _documents(batch)
    return batch.cu_seqlens[documents + 1], slots


def pairs_of(batch: PackedBatch, window: int | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of slots of queries and slots of keys: whether a query sees a key, as bool."""
    if (
        batch.tree is None
    ):  # a query sees a range, which holds the window too: compiled code is that of any window
        documents, slots = _documents(batch)
        starts = batch.cu_seqlens[documents]
        first = starts if window is None else torch.maximum(starts, slots - (window - 1))
        return lambda query, key: (key <= query) & (key >= first[query])
    ends, depths = batch.tree.ends, batch.position_ids

    def sees(query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < ends[key])
        return seen if window is None else seen & (depths[query] - depths[key] < window)

    return sees


def _documents(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """(T,) number of each slot's document, and (T,) numbers of the slots."""
    starts = batch.cu_seqlens
    slots = torch.arange(batch.input_ids.shape[0], device=starts.device, dtype=starts.dtype)
    # T, at the end of cu_seqlens, is greater than every slot: bucketize finds the end of a document.
    return torch.bucketize(slots, starts, right=True) - 1, slots


def document_mask(batch: PackedBatch, window: int | None = None, causal: bool = True) -> Tensor:
    """The dense block-diagonal mask; without `causal` all tokens of a document see each other.

    Returns:
        (T, T) bool on the batch's device: row i, column j is True where token i sees token j. T² bytes, 1 GiB
        at T = 32,768: for tests and comparison.
    """
    slots = torch.arange(batch.input_ids.shape[0], device=batch.cu_seqlens.device)
    seen = pairs_of(batch, window)(slots[:, None], slots)
    return seen if causal else seen | seen.t()


def mask_4d(batch: PackedBatch, dtype: torch.dtype | None = None, window: int | None = None) -> Tensor:
    """`document_mask` for models that take an attention mask and no document bounds.

    A model that is given such a mask builds no mask of its own, not even for layers with a sliding window: pass these
    layers a mask with their `window`. Padding attends to itself, so that no row is empty and every softmax is defined.

    Args:
        batch: the pack, with the bounds of its documents.
        dtype: None = boolean, True for visible tokens; a floating dtype = additive: 0 for visible tokens, the most
            negative number of the dtype for others.
        window: tokens that each position sees, itself included; None = its whole document up to itself.

    Returns:
        (1, 1, T, T) on the batch's device: T² elements.

    Raises:
        ValueError: a dtype that is not floating, or a window below 1.
    """
    check_window(window)
    visible = document_mask(batch, window)[None, None]
    if dtype is None:
        return visible
    if not dtype.is_floating_point:
        raise ValueError(f"a mask is boolean (dtype=None) or additive, in a floating dtype; got {dtype}")
    least = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, least)


def tile_mask(rows: slice, columns: slice, before: int, window: int | None, device: torch.device) -> Tensor:
    """(queries, keys) bool: which keys of a tile (runs.py) each of its queries sees.

    Both slices count from the first of their run; query 0 has the position of key `before`.
    """
    queries, keys = (torch.arange(x.start, x.stop, device=device) for x in (rows, columns))
    distance = queries[:, None] + before - keys
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def check_window(window: int | None) -> None:
    """Check a window.

    Raises:
        ValueError: it is below 1.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, or None for no window, got {window}")


_CACHE: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tensor → {(*key, version of the tensor): result of `make`}; see `once_a_tensor`."""


def once_a_batch(batch: PackedBatch, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """The result of `make()`, cached per batch and `key`, so that all layers share it; see `once_a_tensor`."""
    return once_a_tensor(batch.cu_seqlens, key, make)


def once_a_tensor(tensor: Tensor, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """The result of `make()`, cached per tensor object and `key`.

    The cache entry lives as long as the tensor, which the result must not refer to, and becomes invalid when the
    tensor is written to. `key` holds everything else that the result depends on.
    """
    if tensor not in _CACHE:
        _CACHE[tensor] = {}
    cached = _CACHE[tensor]
    key = (*key, 0 if tensor.is_inference() else tensor._version)
    if key not in cached:
        cached[key] = make()
    result: Made = cached[key]
    return result


def dense(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, limits: Limits) -> tuple[Tensor, None]:
    """The kernel `dense`: all pairs of tokens of the pack, most of them masked."""
    grouped = k.shape[1] != q.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    mask = document_mask(batch, limits.window, limits.causal)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1), None
