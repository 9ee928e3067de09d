"""Attention inside documents: one function over a table of kernels.

    documents    A A A B B          query 0  ■ · ·  · ·      Every token sees its own document up to itself,
    cu_seqlens   0     3   5              1  ■ ■ ·  · ·      and no other document. Pairs outside the
                                          2  ■ ■ ■  · ·      triangles are not computed (except for parts of
                                          3  · · ·  ■ ·      blocks), unlike in `dense`, the reference of the
                                          4  · · ·  ■ ■      tests.

To add a kernel, add a `Backend` to `BACKENDS` (table.py), in order of preference, and its functions;
kernel.py has their arguments. Every kernel supports windows, and packs whose documents share tokens. The row
says whether it also supports explicit scores (soft caps, sinks, dropout), attention that is not causal, and
results that merge (for context ranks).

- q, k and v have one of the dtypes in the row. They may be strided views with a contiguous last dimension, and so may
  the result.
- `bounds.cu_seqlens` and `bounds.max_seqlen` are bounds of this pack, so that kernels launch what it needs.
  Compiled code gets both as symbols: a function must not branch on them. `bounds.lengths` has the documents'
  lengths on the host, for loops without a device synchronization. torch.compile treats lengths as constants
  and compiles again when they change: the row's `compiles` must exclude devices on which a function reads
  them.
- `operators` names (by prefixes) the torch operators whose outputs selective activation checkpointing keeps.
- Import the package named in `needs` inside the function: the table itself imports nothing.
- Compute tensors that depend only on a batch's bounds once for all layers, by `masks.once_a_batch`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention import table
from multipack.ops.attention.kernel import Limits
from multipack.ops.attention.masks import check_window
from multipack.ops.attention.table import Backend
from multipack.ops.autocast import in_autocast_dtype


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    backend: str = "auto",
    window: int | None = None,
    cap: float | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention inside each document, with scores scaled by 1/√D.

    Args:
        q: (T, H, D) queries.
        k: (T, K, D) keys; K divides H, and query head h reads key head h // (H / K).
        v: (T, K, D) values.
        batch: holds the documents' bounds; T must be its number of slots. Padded rows are a batch of equally long
            documents.
        backend: a name in `BACKENDS`, or `"auto"`: the first that supports these arguments.
        window: tokens that each position sees, itself included; None = its whole document up to itself.
        cap: c of scores s, which become c · tanh(s / c); None = no bound.
        causal: whether no position sees a later one.
        sinks: (H,) scores without a value that take part in the softmax of every query; None = none.
        dropout: probability of dropping a weight of a key.

    Returns:
        (T, H, D), in the dtype of the inputs (in autocast's where it is on).

    Raises:
        ValueError: mismatched shapes or dtypes; an unknown backend, or one that does not support these arguments (the
            message says why, and which one does); a window, or documents that share tokens, without `causal`.
    """
    # Autocast does not cast the inputs of custom operators.
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    check_heads(q, k, v)
    if q.shape[0] != batch.input_ids.shape[0]:
        raise ValueError(f"the batch has {batch.num_slots:,} slots, but q is {tuple(q.shape)}")
    check_window(window)
    if not causal and (window is not None or batch.tree is not None):
        raise ValueError("attention that is not causal has no window, and no documents that share tokens")
    limits = Limits(window, cap, causal, sinks, dropout)
    return select(backend, q, limits).forward(q, k, v, batch, limits)[0].to(q.dtype)


def select(backend: str, q: Tensor, limits: Limits = Limits(), merges: bool = False) -> Backend:  # noqa: B008
    """The kernel that `attention` uses for these queries, with the same arguments.

    With `merges`, only kernels count whose results over parts of the keys merge.

    Raises:
        ValueError: an unknown backend, or one that does not support these arguments.
    """
    properties = q.device, q.dtype, q.shape[2], limits.explicit, limits.causal, merges
    if torch.compiler.is_compiling():
        from multipack.ops.attention import compiling

        return table.BACKENDS[compiling.activated_index(backend, *properties, True)]
    return table.BACKENDS[table.activated_index(backend, *properties, False)]


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q is (T, H, D) and k and v are (T, K, D), where K divides H, all in one dtype.

    Raises:
        ValueError: they are not.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"attention takes q (T, H, D) and k, v (T, K, D), got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the number of key heads must divide that of query heads, got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
