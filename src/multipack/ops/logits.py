"""Logits: how many exist at a time, soft caps, and their losses and gradient in one function for torch.compile.

torch.compile fuses `softmax_of_logits` into two reads and one write of the logits. Without it ops/loss.py is faster,
with torch's own kernel of log-softmax, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.data.batch import IGNORE
from multipack.ops.autocast import at_least_float32

CHUNK_TOKENS = 1024
"""Rows of a chunk, on a GPU the minimum: on a CPU larger ones only take more memory."""
CHUNK_BYTES = 2**30
"""Bytes of a chunk's logits in float32 on a GPU: 2,000 rows for a vocabulary of 128,000."""


def chunk_rows(columns: int, device: torch.device) -> int:
    """Rows of logits that exist at a time, for a number of columns."""
    return max(CHUNK_TOKENS, 0 if device.type == "cpu" else CHUNK_BYTES // (4 * columns))


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """`cap` · tanh(logits / `cap`), in at least float32; the logits themselves if `cap` is 0."""
    if not cap:
        return logits
    return (logits.to(at_least_float32(logits.dtype)) / cap).tanh_().mul_(cap)


def softmax_of_logits(
    logits: Tensor, target: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and gradient of logits in one pass over them, if compiled.

    Args:
        logits: (R, V).
        target: (R, 1) columns of the targets.
        label_smoothing: see `linear_cross_entropy`.
        z_loss: see there.

    Returns:
        (R,) losses and (R,) log-sum-exp, float32 or wider; the (R, V) gradient in the dtype of the logits without the
        term of the target; and (R, 1) what it is at the target, with this term.
    """
    wide = logits.to(at_least_float32(logits.dtype))
    lse = wide.logsumexp(1, keepdim=True)
    logit = wide.gather(1, target)
    losses = (1.0 - label_smoothing) * (lse - logit)
    if label_smoothing:
        losses = losses + label_smoothing * (lse - wide.mean(1, keepdim=True))
    if z_loss:
        losses = losses + z_loss * lse.square()
    factor, spread = 1.0 + 2.0 * z_loss * lse, label_smoothing / logits.shape[1]
    gradient = (wide - lse).exp() * factor - spread
    own = (logit - lse).exp() * factor - spread - (1.0 - label_smoothing)
    return losses.squeeze(1), lse.squeeze(1), gradient.to(logits.dtype), own.to(logits.dtype)


@cache
def compiled_softmax() -> Callable[..., Any]:
    """`softmax_of_logits`, compiled once for all numbers of rows."""
    return torch.compile(softmax_of_logits, dynamic=True)


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank in a group, and the group's size; None is a group of one."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def check_rows(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    num_targets: int | None,
    weights: Tensor | None,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Check the arguments; return the int64 indices of rows with a target."""
    shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (T, d) and weight (V, d), got {shapes}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"{shapes} need targets ({len(hidden)},), got {tuple(targets.shape)}")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}: use one dtype, or autocast")
    if weights is not None and (weights.shape != targets.shape or not weights.is_floating_point()):
        raise ValueError(
            f"expected floating-point weights ({len(targets)},), got {weights.dtype} {tuple(weights.shape)}"
        )
    if weights is not None and weights.requires_grad:
        raise ValueError("weights get no gradient: pass weights.detach()")
    counted = targets != IGNORE
    if num_targets is not None and targets.device.type != "cpu":
        return torch.nonzero_static(counted, size=num_targets).flatten()
    rows = counted.nonzero().flatten()
    if targets.device.type == "cpu":
        vocabulary = len(weight) * rank_and_size(group)[1]
        wrong = counted & ((targets < 0) | (targets >= vocabulary))
        if wrong.any():
            raise ValueError(
                f"target {int(targets[wrong][0])} is outside the vocabulary of {vocabulary:,} (and is not {IGNORE})"
            )
        if num_targets is not None and num_targets != len(rows):
            raise ValueError(f"num_targets={num_targets}, but {len(rows)} targets are not {IGNORE}")
    return rows
