"""The mask function "multipack" of transformers: the mask of rows without padding, without its T² elements.

transformers describes a mask by a function of the indices of a query and a key. For the masks of causal decoders its
values at O(T) pairs are enough: neighbors show where documents and chunks begin, and the pairs at the first key that
each query sees show that nothing else is masked.

    query  0 1 2 3 4 5 6       documents A A A B B B B, window 3
    first  0 0 0 3 3 3 4       the first key that a query sees; it sees all from there up to itself
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

NAME = "multipack"


def refuse(what: str, instead: str) -> NoReturn:
    """Raise the error of something that the attention function does not do exactly."""
    raise ValueError(f"attn_implementation={NAME} does not support {what}: {instead}")


def makes_document_masks() -> bool:
    """Whether transformers makes masks of documents from `position_ids`, and knows the windows of layers (≥ 4.53)."""
    return importlib.util.find_spec("transformers.masking_utils") is not None


class RowMask(Tensor):
    """The mask of rows without padding: causal inside documents, in a window. It is (B, 1, T, T), without elements.

    transformers hands masks with four dimensions on to the layers as they are. Models that compute with theirs are
    refused.

    Attributes:
        starts: slots of the B · T flattened ones at which documents, or chunks of chunked attention, begin.
        window: tokens that each position sees, itself included; None = no limit.
    """

    starts: tuple[int, ...]
    window: int | None

    @staticmethod
    def __new__(
        cls, rows: int, slots: int, starts: tuple[int, ...], window: int | None, device: torch.device
    ) -> RowMask:
        """The mask of `rows` rows of `slots` tokens."""
        shape = rows, 1, slots, slots
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.starts, mask.window = starts, window
        return mask

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowMask(starts={self.starts}, window={self.window})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("to", "contiguous", "detach", "clone"):
            return args[0]
        if name in ("__get__", "__set__", "dim", "size", "is_inference", "__repr__"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return refuse(
            f"models that compute with their mask ({name})", "use attn_implementation=sdpa or eager"
        )

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        refuse(f"models that compute with their mask ({function})", "use attn_implementation=sdpa or eager")


def make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> RowMask | Tensor | None:
    """The mask of a pass, in transformers' interface of mask functions.

    Returns:
        None for plain causal attention, a `RowMask` for rows without padding, else the dense mask of sdpa.
    """
    from transformers.masking_utils import sdpa_mask

    positions = others.get("cache_position")  # transformers < 5 has it in place of q_length and q_offset
    length = len(positions) if positions is not None else q_length
    offset = positions[0].item() if positions is not None else q_offset
    whole = length == kv_length and isinstance(offset, int) and offset == 0 and kv_offset == 0
    unpadded = attention_mask is None or (
        attention_mask.shape[-1] == kv_length and bool(attention_mask.all())
    )
    plain = allow_is_causal_skip and (local_size is None or kv_length <= local_size)
    # Qwen2-MoE without windows, whose layers do not use this mask.
    if local_size is not None and local_size < 1:
        return RowMask(batch_size, kv_length, (0,), local_size, torch.device(device))
    if whole and unpadded and not plain and not use_vmap and kv_length > 1:
        found = _row_mask(mask_function, batch_size, kv_length, local_size, torch.device(device))
        if found is not None:
            _check_chunks(found, getattr(others.get("config"), "attention_chunk_size", None))
            return found
    if positions is None:
        others |= {"q_length": q_length, "q_offset": q_offset, "use_vmap": use_vmap, "device": device}
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **others,
    )
    return mask


def _check_chunks(mask: RowMask, chunk: int | None) -> None:
    """Refuse the chunks of earlier transformers, which start along a packed row and not inside its documents."""
    rows, slots = mask.shape[::2]
    if chunk is None or mask.window != chunk:
        return
    along = {row * slots + at for row in range(rows) for at in range(0, slots, chunk)}
    if along < set(mask.starts):
        refuse(f"chunks of {chunk} tokens that are counted along a packed row", "update transformers")


def _row_mask(
    mask_function: Callable[..., Tensor], rows: int, slots: int, window: int | None, device: torch.device
) -> RowMask | None:
    """The `RowMask` that equals a mask function; None if it is another kind of mask.

    It reads the function at O(T) pairs: neighbors, and both sides of the first key that each query sees.
    """
    index = torch.arange(slots, device=device).expand(rows, slots)
    row, head = torch.arange(rows, device=device)[:, None], torch.zeros(1, 1, dtype=torch.long, device=device)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return mask_function(row, head, query, key).expand(query.shape)

    begins = torch.ones(rows, slots, dtype=torch.bool, device=device)
    begins[:, 1:] = ~sees(index[:, 1:], index[:, :-1])
    first = torch.where(begins, index, 0).cummax(1).values
    if window is not None:
        first = torch.maximum(first, index - (window - 1))
    before = (first - 1).clamp(min=0)
    right = sees(index, first) & (~sees(index, before) | (first == 0))
    right[:, :-1] &= ~sees(index[:, :-1], index[:, 1:])
    if not right.all():
        return None
    starts = tuple(begins.flatten().nonzero().flatten().tolist())
    return RowMask(rows, slots, starts, window, device)
