"""Rotary positions (RoPE: Su et al. 2021, arXiv:2104.09864) and the scalings of their frequencies.

Element i of a head's first half and element i of its second half rotate together by the angle position · θ^(−2i/D).
Scalings extend the context of a trained model; low frequencies turn slowly:

    linear     all frequencies are divided by a factor (Chen et al. 2023, arXiv:2306.15595)
    dynamic    θ grows with documents that are longer than the trained context
    llama3     low frequencies are divided, high ones kept, others interpolated (Llama 3.1)
    yarn       the same with other bounds, and a factor of cosines and sines (Peng et al. 2023, arXiv:2309.00071)
    longrope   a divisor for each frequency, another one in documents that are longer than the trained context, and a
               factor of cosines and sines (Ding et al. 2024, arXiv:2402.13753)

Where the length counts (dynamic, longrope) it is the length of each document, as in a batch of that document alone:
packs and batches have no influence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from multipack.shapes import ModelShape
from multipack.shapes.rotation import LLAMA3_SCALING, YARN_TURNS

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotation angles, two (T, 1, D/2) tensors; D is the width of the rotated elements."""


def rotary_tables(
    position_ids: Tensor,
    shape: ModelShape,
    dtype: torch.dtype,
    windowed: bool = False,
    document_slots: Tensor | None = None,
) -> Rotation:
    """Cosines and sines of the angles of every token.

    Args:
        position_ids: (T,) positions, which restart at every document.
        shape: of the decoder.
        dtype: float32 or wider; bfloat16 has 8 significant bits, too few to distinguish neighboring positions.
        windowed: whether for layers with a window, if they have frequencies of their own.
        document_slots: (T,) slots of each token's document, for `dynamic` and `longrope`; None = no document is longer
            than the limit (`ModelShape.rotation_limit`).

    Returns:
        Two (T, 1, D/2) tensors of `dtype`, ready to broadcast over heads.
    """
    own = windowed and shape.window_theta > 0
    theta: float | Tensor = shape.window_theta if own else shape.rope_theta
    if shape.rope_type == "dynamic" and not own and document_slots is not None:
        theta = _dynamic_theta(shape, document_slots.to(dtype))[:, None, None]
    exponents = torch.arange(0, shape.rotary_width, 2, dtype=dtype, device=position_ids.device)
    frequencies = 1.0 / theta ** (exponents / shape.rotary_width)
    factor = 1.0
    if shape.rope_factor != 1.0 and not own:
        if shape.rope_type == "longrope":
            frequencies = frequencies / _divisors(shape, frequencies, document_slots)
            factor = 1.0 + math.log(shape.rope_factor) / math.log(shape.rope_context)
            factor = shape.rope_attention or math.sqrt(factor)
        else:
            frequencies = _scaled(frequencies, shape)
        if shape.rope_type == "yarn":
            factor = shape.rope_attention or 0.1 * math.log(shape.rope_factor) + 1.0
    angles = position_ids.to(dtype)[:, None, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return (cosine, sine) if factor == 1.0 else (cosine * factor, sine * factor)


def _scaled(frequencies: Tensor, shape: ModelShape) -> Tensor:
    """(…, D/2) scaled frequencies."""
    if shape.rope_type == "dynamic":
        return frequencies
    if shape.rope_type == "linear":
        return frequencies / shape.rope_factor
    if shape.rope_type == "llama3":
        turns = frequencies * (shape.rope_context / (2 * math.pi))
        low, high = LLAMA3_SCALING["low_freq_factor"], LLAMA3_SCALING["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    else:
        width, theta = shape.rotary_width, shape.rope_theta
        # Elements whose frequencies make YARN_TURNS turns in the trained context.
        first, last = (
            width * math.log(shape.rope_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in YARN_TURNS
        )
        low, high = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        elements = torch.arange(width // 2, dtype=frequencies.dtype, device=frequencies.device)
        kept = 1.0 - ((elements - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / shape.rope_factor)


def _divisors(shape: ModelShape, like: Tensor, slots: Tensor | None) -> Tensor:
    """(D/2,) divisors of longrope's frequencies, or (T, 1, D/2) where documents differ in them."""
    short, long = torch.tensor(shape.rope_factors, dtype=like.dtype, device=like.device).chunk(2)
    return short if slots is None else torch.where(slots[:, None, None] > shape.rope_context, long, short)


def _dynamic_theta(shape: ModelShape, slots: Tensor) -> Tensor:
    """(T,) base of the frequencies of each token's document."""
    longer = slots.clamp(min=shape.context) / shape.context
    growth = shape.rope_factor * longer - (shape.rope_factor - 1.0)
    return shape.rope_theta * growth ** (shape.rotary_width / (shape.rotary_width - 2))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of the first D elements by its position's angle.

    Args:
        x: (T, heads, E) with E ≥ D; further elements are kept.
        cosine: (T, 1, D/2) float32 or wider.
        sine: as `cosine`.

    Returns:
        (T, heads, E) in x's dtype, computed in the dtype of `cosine` and rounded once.
    """
    width = 2 * cosine.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cosine, sine), x[..., width:]], dim=-1)
    if torch.compiler.is_compiling():  # which fuses arithmetic and cannot trace `_Rotate`'s writes into views
        first, second = x.to(cosine.dtype).chunk(2, dim=-1)
        halves = first * cosine - second * sine, second * cosine + first * sine
        return torch.cat(halves, dim=-1).to(x.dtype)
    out: Tensor = _Rotate.apply(x, cosine, sine)  # type: ignore[no-untyped-call]
    return out


def rotate_both(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """`rotate` queries and keys."""
    return rotate(query, *rotation), rotate(key, *rotation)


class _Rotate(torch.autograd.Function):
    """Rotation whose backward pass is the inverse rotation: it saves only the tables, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        first, second = x.to(cosine.dtype).chunk(2, dim=-1)
        out = torch.empty(x.shape, dtype=cosine.dtype, device=x.device)
        out_first, out_second = out.chunk(2, dim=-1)
        torch.mul(first, cosine, out=out_first).addcmul_(second, sine, value=-1)
        torch.mul(second, cosine, out=out_second).addcmul_(first, sine)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return rotate(upstream, cosine, -sine), None, None
