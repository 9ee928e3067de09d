"""The logits of a chunk of tokens, all at once or for a slice of the vocabulary at a time: losses and gradients.

    at once          (chunk, V)                     log-softmax in place, which becomes the gradient
    tiled, k = 3     ┌───┬───┬───┐
                     │ 0 │ 1 │ 2 │                  first pass: log-sum-exp over slices, each gone before the next
                     └───┴───┴───┘                  second pass: logits again, exp(logit − lse), one gradient each

In both forms a row's loss and the gradient g of its logits are, for a target t, ε of label smoothing and z of z-loss,

    loss = (1 − ε) · (lse − logit[t]) + ε · mean(lse − logit) + z · lse²
    g    = softmax · (1 + 2 z · lse) − (1 − ε) · one-hot − ε / V
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

Gradients = Iterator[tuple[slice, Tensor]]
"""Slices of the vocabulary, and the gradients of the logits in them, made when they are asked for."""


def at_once(
    chunk: Tensor, weight: Tensor, target: Tensor, z_loss: float, label_smoothing: float
) -> tuple[Tensor, Gradients]:
    """(rows, 1) losses of a chunk, and the gradient of all its logits, which exist once."""
    logits = F.linear(chunk, weight)
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=exact_dtype(weight))
    of_target = log_probabilities.gather(1, target)
    lse = logits.gather(1, target).to(of_target.dtype) - of_target if z_loss else None
    mean = log_probabilities.mean(dim=1, keepdim=True) if label_smoothing else None
    losses = _row_losses(of_target, mean, lse, z_loss, label_smoothing)

    def gradients() -> Gradients:
        nonlocal log_probabilities
        terms = (target, lse, z_loss, label_smoothing, weight.shape[0])
        gradient = gradient_of(log_probabilities.exp_(), *terms).to(weight.dtype)
        del log_probabilities  # the memory of a chunk, where that was a copy
        yield slice(None), gradient

    return losses, gradients()


def tiled(
    chunk: Tensor, weight: Tensor, target: Tensor, z_loss: float, label_smoothing: float, tiles: int
) -> tuple[Tensor, Gradients]:
    """The same, with the logits of one slice of the vocabulary at a time; they are computed again for the gradient."""
    lse, logit, mean_logit = statistics(chunk, weight, target, tiles)
    losses = _row_losses(logit - lse, mean_logit - lse, lse, z_loss, label_smoothing)

    def gradients() -> Gradients:
        for columns in slices(weight.shape[0], tiles):
            probabilities = logits_of(chunk, weight, columns).sub_(lse).exp_()
            terms = (target - columns.start, lse, z_loss, label_smoothing, weight.shape[0])
            yield columns, gradient_of(probabilities, *terms).to(weight.dtype)

    return losses, gradients()


def _row_losses(
    of_target: Tensor, mean: Tensor | None, lse: Tensor | None, z_loss: float, label_smoothing: float
) -> Tensor:
    """(rows, 1) losses, from log-probabilities of the targets and, on average, of all words."""
    losses = -of_target
    if label_smoothing:
        assert mean is not None
        losses = losses * (1.0 - label_smoothing) - label_smoothing * mean
    if z_loss:
        assert lse is not None
        losses = losses + z_loss * lse.square()
    return losses


def gradient_of(
    probabilities: Tensor,
    target: Tensor,
    lse: Tensor | None,
    z_loss: float,
    label_smoothing: float,
    vocabulary: int,
) -> Tensor:
    """The gradient of the logits in a slice of the vocabulary, in the memory of their probabilities.

    Args:
        probabilities: (rows, words of the slice).
        target: (rows, 1) counted from the first word of the slice; it may lie outside.
        lse: (rows, 1), where there is a z-loss.
        z_loss: z.
        label_smoothing: ε.
        vocabulary: V.
    """
    if z_loss:
        assert lse is not None
        probabilities *= 1.0 + 2.0 * z_loss * lse
    if label_smoothing:
        probabilities -= label_smoothing / vocabulary
    inside, column = _within(target, probabilities)
    return probabilities.scatter_add_(1, column, inside.to(probabilities.dtype) * (label_smoothing - 1.0))


def statistics(chunk: Tensor, weight: Tensor, target: Tensor, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, 1) each: log-sum-exp of the logits, logit of the target, and mean logit, slice by slice."""
    exact = exact_dtype(weight)
    highest = torch.full(target.shape, -torch.inf, dtype=exact, device=chunk.device)
    total, of_target, summed = (torch.zeros_like(highest) for _ in range(3))
    for columns in slices(weight.shape[0], tiles):
        logits = logits_of(chunk, weight, columns)
        inside, column = _within(target - columns.start, logits)
        of_target += torch.where(inside, logits.gather(1, column), 0.0)
        summed += logits.sum(1, keepdim=True)
        before, highest = highest, torch.maximum(highest, logits.amax(1, keepdim=True))
        total = total * (before - highest).exp() + logits.sub_(highest).exp_().sum(1, keepdim=True)
    return highest + total.log(), of_target, summed / weight.shape[0]


def logits_of(chunk: Tensor, weight: Tensor, columns: slice) -> Tensor:
    """(rows, words of the slice), as wide as sums."""
    return F.linear(chunk, weight[columns]).to(exact_dtype(weight))


def _within(target: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each target is among the columns of a slice, and a column to look at in any case."""
    return (target >= 0) & (target < like.shape[1]), target.clamp(0, like.shape[1] - 1)


def slices(size: int, tiles: int) -> Iterator[slice]:
    """So many slices of a size, as even as may be; none is empty."""
    tiles = min(tiles, size)
    return (slice(size * n // tiles, size * (n + 1) // tiles) for n in range(tiles))


def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `out`, which may be wider than what is multiplied: the product is rounded, the sum is not."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        out += left @ right


def exact_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of softmax and of sums."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
