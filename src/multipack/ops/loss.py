"""The last projection and the cross-entropy in one, chunk by chunk, so that logits never dominate memory.

Logits of T tokens over V words are the largest tensor of a small model's step: T = 8,192 and V = 128,256
are 4.2 GB in float32, and their gradient as much again. Here a chunk's logits become its loss and its
gradients at once and are gone before the next chunk's exist:

    rows with a target     logits             loss and gradients (all in the forward pass)
    ┌──────────┐
    │ chunk 0  │ · Wᵀ → (chunk, V) float32 → Σ (lse − logit[target]);  g = softmax − one-hot
    ├──────────┤                             hidden.grad[chunk] = g · W;  W.grad += gᵀ · chunk
    │ chunk 1  │ · Wᵀ → …
    └──────────┘

Nothing is computed twice: since the loss is a sum, its gradient only has to be multiplied by the number that
comes back from above. Where targets have weights, rows of (chunk, d) are scaled by them, never logits: in
g · W what comes out, in gᵀ · chunk what goes in.

Training may add two terms, which change the loss and g of the same pass: label smoothing ε spreads that share of
each target's probability over the vocabulary (Szegedy et al. 2016, arXiv:1512.00567), and the z-loss adds
z · lse² for each target, which keeps logits from drifting (Chowdhery et al. 2022, arXiv:2204.02311, section 5):

    loss = (1 − ε) · (lse − logit[target]) + ε · mean(lse − logit) + z · lse²
    g    = softmax · (1 + 2 z · lse) − (1 − ε) · one-hot − ε / V

Where even a chunk's logits do not fit, they exist for a slice of the vocabulary at a time (`vocabulary_tiles`). The
log-sum-exp is then gathered over the slices (each new maximum rescales what was summed: Milakov and Gimelshein 2018,
arXiv:1805.02867), and logits are computed once more for the gradient.

Preferences need the log-probability of every target by itself. Its gradient is known only when the loss is, so
`linear_log_probabilities` computes a chunk's logits again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from multipack.data.batch import IGNORE
from multipack.ops.vocabulary import (
    add_product,
    at_once,
    exact_dtype,
    gradient_of,
    logits_of,
    slices,
    statistics,
    tiled,
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int = 1024,
    num_targets: int | None = None,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocabulary_tiles: int = 1,
) -> Tensor:
    """Σ cross-entropy of `hidden @ weight.T` over the targets that are not −100, each times its weight if it has one.

    Equals `F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum", label_smoothing=…)` or, with
    weights, `(F.cross_entropy(…, reduction="none") * weights).sum()`; rows without a target are never projected. Matrix
    products run in the dtype of the inputs, or in autocast's where it is on; softmax, loss and the sum of the
    weight's gradient are float32 (float64 for float64 inputs).

    Args:
        hidden: (T, d) what the last norm gives.
        weight: (V, d) output embedding.
        targets: (T,) int64, already shifted.
        chunk_tokens: most rows whose logits exist at a time: chunk_tokens × V × 4 bytes, three times over.
        num_targets: how many targets are not −100, when the caller knows (a batch does): spares a GPU a sync.
        weights: (T,) floating point weight of each row's loss, a constant: it gets no gradient. None = all 1.
        z_loss: z, the weight of lse² of each row that has a target, which counts times the row's weight too.
        label_smoothing: ε, the share of each target's probability that is spread over the vocabulary.
        vocabulary_tiles: slices of the vocabulary, of which one chunk's logits exist at a time; with several, logits
            are computed once more for the gradient.

    Returns:
        The 0-d sum; 0, still connected to `hidden` and `weight`, when there is no target.

    Raises:
        ValueError: shapes or dtypes that do not go together; fewer chunk_tokens or vocabulary_tiles than 1; a negative
            z_loss, or a label_smoothing outside [0, 1); on the CPU also a target outside the vocabulary or a wrong
            `num_targets` (elsewhere looking would stall the device).
    """
    _check(hidden, weight, targets, chunk_tokens, num_targets, vocabulary_tiles)
    _check_weights(hidden, weights)
    _check_terms(z_loss, label_smoothing)
    rows = _rows_with_targets(targets, num_targets)
    if not torch.is_grad_enabled():
        # Inside the function gradient mode is always off: only here can it learn that none is wanted.
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, rows, chunk_tokens, weights, z_loss, label_smoothing, vocabulary_tiles
    )
    return loss


def training_loss(z_loss: float = 0.0, label_smoothing: float = 0.0) -> Callable[..., Tensor]:
    """`linear_cross_entropy` with the terms that only training adds; without any, the function itself.

    Raises:
        ValueError: a negative z_loss, or a label_smoothing outside [0, 1).
    """
    _check_terms(z_loss, label_smoothing)
    if not z_loss and not label_smoothing:
        return linear_cross_entropy
    return partial(linear_cross_entropy, z_loss=z_loss, label_smoothing=label_smoothing)


def linear_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int = 1024,
    num_targets: int | None = None,
    vocabulary_tiles: int = 1,
) -> Tensor:
    """Log-probability of each target under `softmax(hidden @ weight.T)`; 0 where the target is −100.

    Differentiable, in the memory of one chunk's logits: the backward pass computes them again. Dtypes, autocast and
    `num_targets` are as in `linear_cross_entropy`.

    Args:
        hidden: (T, d) what the last norm gives.
        weight: (V, d) output embedding.
        targets: (T,) int64, already shifted.
        chunk_tokens: most rows whose logits exist at a time.
        num_targets: how many targets are not −100, when the caller knows.
        vocabulary_tiles: slices of the vocabulary, of which one chunk's logits exist at a time.

    Returns:
        (T,) float32 (float64 for float64 inputs).

    Raises:
        ValueError: as `linear_cross_entropy` does.
    """
    _check(hidden, weight, targets, chunk_tokens, num_targets, vocabulary_tiles)
    rows = _rows_with_targets(targets, num_targets)
    found: Tensor = _LinearLogProbabilities.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, rows, chunk_tokens, vocabulary_tiles
    )
    return found


def _rows_with_targets(targets: Tensor, num_targets: int | None) -> Tensor:
    counted = targets != IGNORE
    if num_targets is None or targets.device.type == "cpu":
        return counted.nonzero().flatten()
    return torch.nonzero_static(counted, size=num_targets).flatten()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor,
        chunk_tokens: int,
        weights: Tensor | None,
        z_loss: float,
        label_smoothing: float,
        vocabulary_tiles: int,
    ) -> Tensor:
        device, dtype = hidden.device.type, _product_dtype(hidden, weight)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        with torch.autocast(device, enabled=False):
            loss, hidden_grad, weight_grad = _chunks(
                hidden.index_select(0, rows).to(dtype),
                weight.detach().to(dtype),
                targets.index_select(0, rows),
                None if weights is None else weights.index_select(0, rows),
                chunk_tokens,
                z_loss,
                label_smoothing,
                vocabulary_tiles,
                wants_hidden,
                wants_weight,
            )
        ctx.save_for_backward(rows, hidden_grad, weight_grad)
        ctx.hidden_like = (hidden.shape, hidden.dtype)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad = _scattered(ctx.hidden_like, rows, hidden_grad * upstream)
        if weight_grad is not None:
            weight_grad = (weight_grad * upstream).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, *(None,) * 7


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    chunk_tokens: int,
    z_loss: float,
    label_smoothing: float,
    vocabulary_tiles: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss and gradients of (N, d) rows that all have a target and, if any has, a weight."""
    exact = exact_dtype(weight)
    loss = torch.zeros((), dtype=exact, device=hidden.device)
    hidden_grad = torch.empty_like(hidden) if wants_hidden else None
    weight_grad = torch.zeros_like(weight, dtype=exact) if wants_weight else None
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        chunk, target = hidden[rows], targets[rows, None]
        scale = None if weights is None else weights[rows, None].to(exact)
        if vocabulary_tiles == 1:
            losses, gradients = at_once(chunk, weight, target, z_loss, label_smoothing)
        else:
            losses, gradients = tiled(chunk, weight, target, z_loss, label_smoothing, vocabulary_tiles)
        loss += losses.sum() if scale is None else (losses * scale).sum()
        if hidden_grad is None and weight_grad is None:
            continue
        of_chunk = torch.zeros_like(chunk, dtype=exact)
        into_weight = chunk if scale is None else (chunk * scale).to(weight.dtype)
        for columns, gradient in gradients:
            if hidden_grad is not None:
                add_product(of_chunk, gradient, weight[columns])
            if weight_grad is not None:  # rounded once per chunk; the sum over chunks stays exact
                add_product(weight_grad[columns], gradient.t(), into_weight)
        if hidden_grad is not None:
            hidden_grad[rows] = of_chunk if scale is None else of_chunk * scale
    return loss, hidden_grad, weight_grad


class _LinearLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor,
        chunk_tokens: int,
        vocabulary_tiles: int,
    ) -> Tensor:
        dtype = _product_dtype(hidden, weight)
        out = torch.zeros(hidden.shape[0], 1, dtype=exact_dtype(weight), device=hidden.device)
        sums = torch.zeros_like(out)
        with torch.autocast(hidden.device.type, enabled=False):
            projection = weight.detach().to(dtype)
            for part in _pieces(rows, chunk_tokens):
                chunk = hidden.index_select(0, part).to(dtype)
                lse, logit, _ = statistics(chunk, projection, targets[part, None], vocabulary_tiles)
                out.index_copy_(0, part, logit - lse)
                sums.index_copy_(0, part, lse)
        ctx.save_for_backward(hidden, weight, targets, rows, sums)
        ctx.chunk_tokens, ctx.vocabulary_tiles, ctx.dtype = chunk_tokens, vocabulary_tiles, dtype
        return out.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, rows, sums = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact = exact_dtype(weight)
        hidden_grad = torch.zeros_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            projection = weight.to(ctx.dtype)
            for part in _pieces(rows, ctx.chunk_tokens):
                chunk = hidden.index_select(0, part).to(ctx.dtype)
                of_chunk = torch.zeros_like(chunk, dtype=exact)
                for columns in slices(weight.shape[0], ctx.vocabulary_tiles):
                    probabilities = logits_of(chunk, projection, columns).sub_(sums[part]).exp_()
                    target = targets[part, None] - columns.start
                    gradient = gradient_of(probabilities, target, None, 0.0, 0.0, weight.shape[0])
                    gradient = (gradient * -upstream[part, None]).to(ctx.dtype)
                    if hidden_grad is not None:
                        add_product(of_chunk, gradient, projection[columns])
                    if weight_grad is not None:
                        add_product(weight_grad[columns], gradient.t(), chunk)
                if hidden_grad is not None:
                    hidden_grad.index_copy_(0, part, of_chunk.to(hidden_grad.dtype))
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), *(None,) * 4


def _pieces(rows: Tensor, chunk_tokens: int) -> Iterator[Tensor]:
    return (rows[start : start + chunk_tokens] for start in range(0, rows.numel(), chunk_tokens))


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else weight.dtype


def _scattered(like: tuple[torch.Size, torch.dtype], rows: Tensor, values: Tensor) -> Tensor:
    """Zeros of that shape and dtype, but for `rows`."""
    shape, dtype = like
    return torch.zeros(shape, dtype=dtype, device=values.device).index_copy_(0, rows, values.to(dtype))


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int,
    num_targets: int | None,
    vocabulary_tiles: int,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "linear_cross_entropy takes hidden (T, d) and weight (V, d),"
            f" got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} needs targets ({hidden.shape[0]},), got {tuple(targets.shape)}"
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}: use one, or autocast")
    if chunk_tokens < 1 or vocabulary_tiles < 1:
        name, value = (
            ("chunk_tokens", chunk_tokens) if chunk_tokens < 1 else ("vocabulary_tiles", vocabulary_tiles)
        )
        raise ValueError(f"{name} must be at least 1, got {value}")
    if targets.device.type != "cpu" or not targets.numel():
        return
    wrong = ((targets >= weight.shape[0]) | (targets < 0)) & (targets != IGNORE)
    if wrong.any():
        worst = int(targets[wrong][0])
        raise ValueError(
            f"target {worst} is outside the vocabulary of {weight.shape[0]:,} (and is not {IGNORE})"
        )
    counted = int((targets != IGNORE).sum())
    if num_targets is not None and num_targets != counted:
        raise ValueError(f"num_targets={num_targets}, but {counted} targets are not {IGNORE}")


def _check_weights(hidden: Tensor, weights: Tensor | None) -> None:
    if weights is None:
        return
    if weights.shape != hidden.shape[:1] or not weights.is_floating_point():
        raise ValueError(
            f"hidden {tuple(hidden.shape)} needs floating point weights ({hidden.shape[0]},),"
            f" got {weights.dtype} of shape {tuple(weights.shape)}"
        )
    if weights.requires_grad:
        raise ValueError("weights get no gradient here: hand in weights.detach()")


def _check_terms(z_loss: float, label_smoothing: float) -> None:
    if z_loss < 0:
        raise ValueError(f"z_loss must not be negative, got {z_loss}; 0 leaves it out")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}; 0 leaves it out")
