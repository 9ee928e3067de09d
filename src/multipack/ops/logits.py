"""Logits: options of their losses, how many exist at a time, soft caps, and one function for torch.compile.

torch.compile fuses `softmax_of_logits` into two reads and one write of the logits. Uncompiled, ops/loss.py is
faster: it computes in place with torch's kernel of log-softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.ops.autocast import at_least_float32

CHUNK_TOKENS = 1024
"""Rows of a chunk, on a GPU the minimum: on a CPU larger ones only take more memory."""
CHUNK_BYTES = 2**30
"""Bytes of a chunk's logits in float32 on a GPU: 2,000 rows for a vocabulary of 128,000. Every chunk reads and writes
the weight's gradient; with 1,024 rows that moved 21 GB for a pack of 8,192 tokens."""


@dataclass(frozen=True)
class LossOptions:
    """Options of the losses of ops/loss.py, checked.

    Attributes:
        chunk_tokens: rows whose logits exist at a time: about 2 × chunk_tokens × V / tiles × 4 bytes. None = 1,024; on
            a GPU, where every chunk reads and writes the weight's gradient, as many as 1 GiB holds.
        vocabulary_tiles: slices of (this rank's part of) the vocabulary whose logits are computed one at a time.
        z_loss: coefficient of lse² of each target's row (times its weight).
        label_smoothing: share of each target's probability that is spread over the vocabulary.
        group: process group whose ranks divide the vocabulary evenly; all pass the same hidden states and targets, and
            the gradient of the hidden states is the sum of the ranks' gradients. None = the weight is whole.
        compiled: on a GPU, compile the function of a chunk's logits, unless the vocabulary is divided or tiled,
            logits have a bound, or rows have several targets.
        logit_cap: bound c of the logits x, which become c · tanh(x / c) (Gemma 2); 0 = no bound.
    """

    chunk_tokens: int | None = None
    vocabulary_tiles: int = 1
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    group: dist.ProcessGroup | None = None
    compiled: bool = False
    logit_cap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "vocabulary_tiles"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.z_loss < 0:
            raise ValueError(f"z_loss must not be negative, got {self.z_loss}; 0 turns it off")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}; 0 turns it off")


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
        term of the target; and the (R, 1) gradient at the target, with this term.
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
