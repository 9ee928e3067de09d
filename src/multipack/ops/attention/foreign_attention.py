"""The attention function "multipack" of transformers: attention inside the documents of packed rows, without a T² mask.

    register(model)                                      or, before the model is built, register() and
                                                         from_pretrained(..., attn_implementation="multipack")

    a row       A A A B B     cu_seq_lens_q 0 3 5        documents start where `cu_seq_lens_q` says, else where
    position_ids 0 1 2 0 1                               `position_ids` do not count up by 1

Shapes: B rows of Q queries and S keys (T of both without a cache); heads H of queries and K of keys, which
are D wide, or V as values.

transformers makes a mask once a pass and hands it to every layer. For rows without padding, `make_mask` returns a
`RowMask` instead: where documents start, and the window. `attend` then calls this package's attention. Everything
else (padding, steps that read a cache, masks of the user) goes through transformers' own sdpa attention, with its mask;
with soft caps or sinks, which sdpa lacks, through explicit scores. An argument that none of them handles
exactly is refused by name.

The documents' bounds are read on the host once a pass; on a GPU this waits for the device.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from multipack.data.packs.batch import PackedBatch, without_tokens
from multipack.machine import import_extra
from multipack.ops.attention import attention
from multipack.ops.attention.explicit import weighted
from multipack.ops.attention.kernel import Limits
from multipack.ops.attention.masks import once_a_tensor
from multipack.ops.attention.row_mask import NAME, RowMask, make_mask, refuse
from multipack.planning.lengths import short

OLDEST = "5.2"
"""Oldest version of transformers whose tested models all pass documents to this attention. Before, GPT-2 mixes them
without an error where transformers makes no mask of them (with a cache, or with an attention_mask of ones)."""
UNSUPPORTED = ("indices", "block_indices", "sinks", "cache")
"""Arguments of some models' attention that change its result and that `attend` refuses: sparse attention, sinks that
are not scores, continuous batching."""


def register(model: nn.Module | None = None) -> None:
    """Register the attention function "multipack" in transformers; calling it again changes nothing.

    Args:
        model: a transformers model to switch to it; None = none.

    Raises:
        ImportError: transformers is not installed, or older than `OLDEST`.
        ValueError: the model does not take its attention from transformers' table of functions.
    """
    transformers = import_extra("transformers", f"attn_implementation={NAME}", "hf")
    if TorchVersion(transformers.__version__) < OLDEST:
        raise ImportError(
            f"attn_implementation={NAME} needs transformers >= {OLDEST}, whose models give it the documents, got"
            f' {transformers.__version__}: pip install -U "transformers>={OLDEST}"'
        )
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, make_mask)
    if model is not None:
        if isinstance(model, type) or not hasattr(model, "set_attn_implementation"):
            refuse(short(model), "give a model of transformers")
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        if model.config._attn_implementation != NAME:  # type: ignore[union-attr]
            kept = model.config._attn_implementation  # type: ignore[union-attr]
            refuse(f"{type(model).__name__}, whose attention is its own", f"keep attn_implementation={kept}")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    packed: PackedBatch | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, in transformers' interface of attention functions.

    query is (B, H, Q, D), key (B, K, S, D), value (B, K, S, V); attention_mask is the result of `make_mask` or the
    user's dense mask; s_aux are (H,) attention sinks; cu_seq_lens_q and _k are both the starts of the documents in the
    flattened rows, and their end; position_ids is (B, T) or (1, T); packed is the row's batch if its documents share
    tokens, and stands for the bounds. Other arguments are passed on to sdpa attention.

    Returns:
        (B, Q, H, V), and None in place of the weights.

    Raises:
        ValueError: an argument that cannot be computed exactly.
    """
    _check_arguments(others)
    limits = Limits(cap=softcap, sinks=s_aux, dropout=dropout)
    rows = attention_mask if isinstance(attention_mask, RowMask) else None
    dense = attention_mask if rows is None else None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dense is not None:
        _check_dense(dense, query, key, position_ids, sliding_window, cu_seq_lens_q)
        batch = None
    elif packed is not None:
        _check_chunks(packed, rows)
        batch = packed
    else:
        special = softcap is not None or s_aux is not None
        bounds = cu_seq_lens_q, cu_seq_lens_k
        batch = _documents(query, key, rows, bounds, position_ids, causal, special)
    if batch is not None:
        if not causal and rows is None:
            refuse("is_causal=False with documents", "only causal attention is packed")
        if others.get("position_bias") is not None:
            refuse("position_bias with documents", "use attn_implementation=eager or sdpa")
        window = _window(rows, sliding_window, batch.longest)
        return _packed(_scaled(query, scaling), key, value, batch, limits._replace(window=window)), None
    if softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # sdpa attention reads position_ids nowhere, and has the window in its mask.
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, dense, dropout, scaling, is_causal, **others
        )
        return found
    if others.get("position_bias") is not None:
        refuse("position_bias with softcap or s_aux", "use attn_implementation=eager")
    return _dense(_scaled(query, scaling), key, value, dense, causal, limits), None


def _scaled(query: Tensor, scaling: float | None) -> Tensor:
    """Queries times scaling · √D, because kernels multiply by 1 / √D; None = that is the scale."""
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    return query if math.isclose(factor, 1.0, rel_tol=1e-9) else query * factor


def _check_arguments(others: dict[str, Any]) -> None:
    """Refuse arguments that would be ignored."""
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            refuse(name, "use attn_implementation=eager or sdpa for this model")
    if others.get("output_attentions"):
        refuse("output_attentions=True", "attention weights need attn_implementation=eager")


def _check_dense(
    mask: Tensor,
    query: Tensor,
    key: Tensor,
    position_ids: Tensor | None,
    window: int | None,
    cu_seq_lens: Tensor | None,
) -> None:
    """Refuse a dense mask that mixes documents or lacks the layer's window."""
    if cu_seq_lens is not None:
        refuse("attention_mask together with cu_seq_lens_q", "pass a packed row without attention_mask")
    slots = query.shape[2]
    if mask.dim() != 4 or slots == 1 or not slots == key.shape[2] == mask.shape[-1] == mask.shape[-2]:
        return

    def check() -> None:
        visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2

        def seen(distance: int) -> Tensor:
            return visible.diagonal(-distance, -2, -1)

        if position_ids is not None and position_ids.dim() == 2:
            # Rows of padding see documents, but not themselves.
            jumps = (position_ids.diff(dim=-1) != 1) & seen(1) & seen(0)[:, 1:]
            if jumps.any():
                refuse(
                    "attention_mask of a packed row whose documents see each other",
                    "pass cu_seq_lens_q or position_ids without attention_mask",
                )
        if window is not None and slots > window and seen(window).any() and not seen(-1).any():
            refuse(
                f"attention_mask that is wider than sliding_window={window}",
                "pass cu_seq_lens_q or position_ids without attention_mask",
            )

    once_a_tensor(mask, ("checked", window, slots), check)


def _documents(
    query: Tensor,
    key: Tensor,
    mask: RowMask | None,
    bounds: tuple[Tensor | None, Tensor | None],
    position_ids: Tensor | None,
    causal: bool,
    special: bool,
) -> PackedBatch | None:
    """The documents of the rows; None where there are none to keep apart, or keys are in a cache.

    With `special` (a soft cap or sinks, which sdpa attention lacks), rows of one document each are documents,
    too.
    """
    rows, slots = query.shape[0], query.shape[2]
    given, keys = bounds
    if given is not None:
        if key.shape[2] != slots:
            refuse(
                f"cu_seq_lens_q with a cache: {slots:,} queries for {key.shape[2]:,} keys",
                "pass use_cache=False, or generate without cu_seq_lens_q",
            )
    elif mask is not None and (tuple(mask.shape[::2]) != (rows, slots) or key.shape[2] != slots):
        refuse(f"a cache of {key.shape[2]:,} keys for {slots:,} queries and their mask", "use sdpa or eager")
    elif mask is None and (key.shape[2] != slots or slots == 1 or not causal):
        return None
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != slots):
        position_ids = None
    carrier = next((x for x in (given, position_ids) if x is not None), query)
    whole = tuple(range(0, rows * slots, slots))
    limits = None if mask is None else (mask.starts, mask.window)

    def make() -> PackedBatch | None:
        if given is not None:
            starts = _given_starts(given, keys, rows * slots)
        elif position_ids is not None:
            starts = _position_starts(position_ids.expand(rows, -1))
        else:
            starts = whole if mask is None else mask.starts
        if mask is None and given is None and not special and starts == whole:
            return None
        return without_tokens((*_with_chunks(starts, mask, rows * slots), rows * slots), query.device)

    return once_a_tensor(carrier, ("documents", rows, slots, special, limits), make)


def _given_starts(bounds: Tensor, keys: Tensor | None, slots: int) -> tuple[int, ...]:
    """Starts of documents in `cu_seq_lens_q`, checked."""
    found: list[int] = bounds.tolist()
    if not found or found[0] != 0 or found[-1] != slots or any(a > b for a, b in pairwise(found)):
        shown = f"{found[0]} … {found[-1]}" if found else "nothing"
        refuse(f"cu_seq_lens_q={shown}", f"it rises from 0 to {slots:,}, the number of tokens")
    if keys is not None and keys is not bounds and keys.tolist() != found:
        refuse("cu_seq_lens_k that differs from cu_seq_lens_q", "pass the same bounds for both")
    return tuple(start for start, stop in pairwise(found) if start < stop)


def _position_starts(position_ids: Tensor) -> tuple[int, ...]:
    """Slots of the flattened rows at which positions do not continue, as transformers' masks divide rows."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=-1) != 1
    return tuple(begins.flatten().nonzero().flatten().tolist())


def _with_chunks(starts: tuple[int, ...], mask: RowMask | None, slots: int) -> tuple[int, ...]:
    """Starts of documents and, in chunked attention, of their chunks, whose length is the mask's window."""
    if mask is None or mask.window is None or set(mask.starts) <= set(starts):
        return starts
    stops = (*starts[1:], slots)
    chunks = {at for start, stop in zip(starts, stops, strict=True) for at in range(start, stop, mask.window)}
    if chunks != set(mask.starts):
        refuse(
            f"chunks of {mask.window} tokens that do not start with the documents",
            "pass position_ids that start anew at every document, use_cache=False and no attention_mask",
        )
    return mask.starts


def _check_chunks(packed: PackedBatch, mask: RowMask | None) -> None:
    """Refuse chunks of documents that share tokens."""
    starts = tuple(accumulate(packed.lengths[:-1], initial=0))
    if _with_chunks(starts, mask, packed.num_slots) != starts:
        refuse("chunked attention of documents that share tokens", "use data.share_prefixes=off")


def _window(mask: RowMask | None, given: int | None, longest: int) -> int | None:
    """The window of the mask, which must be the layer's where it has an effect."""
    window = None if mask is None else mask.window
    if window is not None and window < 1:
        refuse(f"a mask with the window {window}", "set sliding_window of the model's configuration")
    if given is not None and given != window and given < longest:
        refuse(f"sliding_window={given} of a layer whose mask has the window {window}", "use sdpa or eager")
    return window


def _packed(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch, limits: Limits) -> Tensor:
    """Attention inside documents: (B, T, H, V)."""
    rows, slots = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    width = max(q.shape[-1], v.shape[-1])
    if q.shape[-1] < width:
        q = q * math.sqrt(width / q.shape[-1])
    # Zeros change no score, and the values' are cut off again. F.pad copies without padding, too.
    q, k, padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    out = attention(q, k, padded, batch, **limits._asdict())
    out = out if v.shape[-1] == width else out[..., : v.shape[-1]]
    return torch.unflatten(out, 0, (rows, slots))


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, limits: Limits
) -> Tensor:
    """Attention with all scores, for padding and caches with soft caps or sinks: (B, Q, H, V)."""
    queries, keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if mask is None and causal and queries > 1:  # like sdpa: the first query sees the first key
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = weighted(query, key, value, mask, limits)[0].to(query.dtype)
    return out.transpose(1, 2).contiguous()
