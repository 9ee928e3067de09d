"""Liger's Triton kernels in place of torch's operations (Hsu et al. 2024, arXiv:2410.10989): `model.kernels`.

    operation              Liger's function                          not used
    RMSNorm                LigerRMSNormFunction                      LayerNorm, tensor parallelism, compiled blocks
    SwiGLU                 LigerSiLUMulFunction                      other activations, compiled blocks
    RoPE                   LigerRopeFunction, in place               learned positions, partial rotary, compiled blocks,
                                                                     selective checkpointing, which keeps its inputs
    linear cross-entropy   LigerFusedLinearCrossEntropyFunction      weighted targets, tiles, soft caps,
                                                                     tensor parallelism

In models of transformers only the last is used. The gradient of the output matrix is summed in float32 and
rounded to the dtype of products, once; ours is not rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from multipack.data.views.documents import IGNORE
from multipack.models.decoder import Decoder
from multipack.models.layers import Attention, FeedForward
from multipack.models.rotary import Rotation
from multipack.ops.autocast import in_autocast_dtype
from multipack.ops.logits import LossOptions
from multipack.ops.loss import linear_cross_entropy
from multipack.ops.norm import OffsetRMSNorm, RMSNorm
from multipack.shapes import ModelShape

Kernel = Literal["RMSNorm", "SwiGLU", "RoPE", "linear cross-entropy"]
MODULE = "liger_kernel.ops"
"""Module with the functions of the table, from version 0.8.5 on."""


def problems(shape: ModelShape, settings: Mapping[str, Any]) -> dict[Kernel, str]:
    """Why torch computes an operation of a decoder and not Liger's kernel; empty = Liger's can.

    Args:
        shape: of the decoder.
        settings: values of train.compile, train.recompute, train.tiles, train.loss_weighting, data.weight_field
            and parallel.tensor.
    """
    given = {**settings, **{f"model.{name}": value for name, value in shape.to_dict().items()}}

    def first(*refused: tuple[str, bool]) -> str:
        return next((f"{name}={given[name]}" for name, is_refused in refused if is_refused), "")

    divided = "parallel.tensor", given["parallel.tensor"] > 1
    compiled = "train.compile", given["train.compile"] == "true"
    foreign = "model.architecture", bool(shape.architecture)  # transformers' modules
    return {
        "RMSNorm": first(foreign, ("model.norm", shape.norm == "layernorm"), divided, compiled),
        "SwiGLU": first(foreign, ("model.activation", shape.activation != "swiglu"), compiled),
        "RoPE": first(
            foreign,
            ("model.positions", shape.positions != "rope"),
            ("model.rope_width", shape.rotary_width != shape.head_width),
            ("train.recompute", given["train.recompute"] == "selective"),
            compiled,
        ),
        "linear cross-entropy": first(
            ("model.logit_cap", shape.logit_cap > 0),
            ("train.loss_weighting", given["train.loss_weighting"] != "token"),
            ("data.weight_field", given["data.weight_field"] != ""),
            ("train.tiles", given["train.tiles"] > 1),
            divided,
        ),
    }


def use_liger(model: Decoder, kernels: Collection[Kernel], liger: Any) -> None:
    """Let a decoder compute these operations with Liger's kernels, in place; names of modules and parameters stay.

    Args:
        model: not yet tiled, checkpointed or compiled.
        kernels: operations without a problem.
        liger: the module `MODULE`.
    """
    for module in model.modules():
        if "RMSNorm" in kernels and isinstance(module, RMSNorm):
            module.function = partial(_rms_norm, liger, 1.0 if isinstance(module, OffsetRMSNorm) else 0.0)
        elif "SwiGLU" in kernels and isinstance(module, FeedForward):
            module.swiglu = liger.LigerSiLUMulFunction.apply
        elif "RoPE" in kernels and isinstance(module, Attention):
            module.rotate = partial(_rotate, liger)
    if "linear cross-entropy" in kernels and model.loss_function is linear_cross_entropy:
        model.loss_function = partial(_cross_entropy, liger)


def _rms_norm(liger: Any, offset: float, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """As `rms_norm`, computed in float32 and rounded once; incoming gradients are not overwritten."""
    found: Tensor = liger.LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma", False)
    return found


def _rotate(liger: Any, query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Rotate (T, heads, D) queries and keys; the kernel takes (1, heads, T, D) and writes over both."""
    cosine, sine = (each.squeeze(1) for each in rotation)
    batched = (each.transpose(0, 1).unsqueeze(0) for each in (query, key))
    turned = liger.LigerRopeFunction.apply(*batched, cosine, sine, None, 1, query.shape[-1])
    first, second = (each.squeeze(0).transpose(0, 1) for each in turned)
    return first, second


def _cross_entropy(
    liger: Any,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    num_targets: int | None = None,
    rows: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """As `linear_cross_entropy`; rows without a target are projected, too."""
    if rows is not None:  # the kernel has one target in a row
        return linear_cross_entropy(hidden, weight, targets, num_targets=num_targets, rows=rows, **options)
    chosen = LossOptions(**options)
    if not torch.is_grad_enabled():  # the kernel computes gradients wherever inputs have them
        hidden, weight = hidden.detach(), weight.detach()
    products = in_autocast_dtype(hidden), in_autocast_dtype(weight)
    terms = (chosen.z_loss, chosen.label_smoothing)
    given = (None, None, IGNORE, *terms, "sum", None, False, torch.float32)
    loss: Tensor = liger.LigerFusedLinearCrossEntropyFunction.apply(*products, targets, *given)[0]
    return loss
