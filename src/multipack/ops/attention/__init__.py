"""Attention inside documents: one function, and a table of the ways to compute it.

    documents    A A A B B          query 0  ■ · ·  · ·      every token sees its own document
    cu_seqlens   0     3   5              1  ■ ■ ·  · ·      up to itself, and nothing of another;
                                          2  ■ ■ ■  · ·      what lies outside the triangles is
                                          3  · · ·  ■ ·      never computed (except by `padded` and
                                          4  · · ·  ■ ■      `dense`, which are there to compare)

Adding a backend is one `Backend` entry in `BACKENDS` (table.py), placed by preference, and its function
(q, k, v, batch, window) → (T, H, D). What such a function can rely on, and must beware of:

- q, k and v have one dtype that the row names: under autocast they arrive already cast, because kernels
  behind custom operators are not in autocast's lists and would see whatever the caller left.
- `batch.cu_seqlens` repeats T at its end, so kernels must take empty documents; `batch.max_seqlen` is a
  constant of the plan, so kernels specialize once; `batch.lengths` is the same on the host, for loops without
  a device sync. Under torch.compile a number on the host that changes from pack to pack is compiled in, and
  compiled anew: a function that reads `lengths` is kept out of it by `torch.compiler.disable`.
- q, k and v may be strided views (the last dimension is contiguous), and so may be the result.
- Import the package named in `needs` inside the function: the table itself imports nothing.
- What is made from a batch's boundaries is made once for all layers by `masks.once_a_batch`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.ops.attention.loop import FLOAT32_TOKENS
from multipack.ops.attention.masks import check_window, document_mask, first_visible, mask_4d
from multipack.ops.attention.table import BACKENDS, Backend, find_backend, select, table_rows

__all__ = [
    "BACKENDS",
    "FLOAT32_TOKENS",
    "Backend",
    "attention",
    "document_mask",
    "find_backend",
    "first_visible",
    "mask_4d",
    "select",
    "table_rows",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    backend: str = "auto",
    window: int | None = None,
) -> Tensor:
    """Causal attention in which every token sees its own document only, scaled by 1/√D.

    Args:
        q: (T, H, D) queries.
        k: (T, K, D) keys; K divides H, and query head h reads key head h // (H / K).
        v: (T, K, D) values.
        batch: says where documents begin; T must be its number of slots. A batch of padded rows is one whose
            documents are equally long.
        backend: a name in `BACKENDS`, or `"auto"`: the first row that takes these tensors.
        window: tokens that each position sees, itself included; None = the whole document before it.

    Returns:
        (T, H, D), in the dtype of the inputs (in autocast's where it is on).

    Raises:
        ValueError: shapes or dtypes that do not go together; an unknown backend, or one that cannot take
            these tensors (the message names it, what stands against it, and the row that can).
    """
    q, k, v = _in_autocast_dtype(q, k, v)
    _check(q, k, v, batch)
    check_window(window)
    return select(backend, q, k, v, window).function(q, k, v, batch, window)


def _in_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        # As autocast itself does: float64 is left alone.
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _check(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"attention takes q (T, H, D) and k, v (T, K, D), got {_shapes(q, k, v)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the key heads must divide the query heads, got {_shapes(q, k, v)}")
    if q.shape[0] != batch.input_ids.shape[0]:
        raise ValueError(f"the batch has {batch.num_slots:,} slots, but {_shapes(q, k, v)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
