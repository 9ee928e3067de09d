"""Loss and log-probabilities where every rank has some rows of the output embedding: no rank sees whole logits.

    hidden (T/n, d) of each rank ─ all-gather ─▶ (T, d), the same on every rank
                                                   │ · W₀ᵀ    │ · W₁ᵀ    … a chunk of rows at a time
                                       rank 0: logits of words 0 … V/n   rank 1: of words V/n … 2V/n
                                                   ▼          ▼
                               m, Σ exp(logit − m), target's logit of each row ─ all-gather ─▶ (ranks, 3, chunk)
                                                   ▼
                               lse, the same on every rank ─▶ loss;  g = softmax − one-hot of the rank's own words

Contracts are those of ops/loss.py, whose formulas these are: a rank's maximum and sum of exponentials are merged as
blocks of a softmax are (Milakov and Gimelshein 2018, arXiv:1805.02867), so that one small collective a chunk is
enough. Every rank computes the merged values from the same numbers in the same order and returns the same loss; the
gradient is that of one process, and nothing is divided by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from multipack.data.batch import IGNORE
from multipack.parallel.collectives import all_gather
from multipack.parallel.rollcall import Group, place_in
from multipack.parallel.state import local


def vocabulary_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int = 1024,
    num_targets: int | None = None,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    *,
    group: Group = None,
) -> Tensor:
    """Σ cross-entropy over the targets that are not −100, each times its weight if it has one.

    What `linear_cross_entropy` of ops/loss.py gives for all ranks' tokens and words. Collectives: one all-gather of
    `hidden` (its gradient is reduce-scattered), and one of 3 numbers a row (4 with label smoothing) for every chunk.

    Args:
        hidden: (T / ranks, d) this rank's tokens; the ranks' are consecutive.
        weight: (V, d) output embedding whose rows are divided evenly: a `DTensor`, or this rank's (V / ranks, d).
        targets: (T,) int64, already shifted, the same on every rank.
        chunk_tokens: most rows whose logits exist at a time: chunk_tokens × V / ranks × 4 bytes, twice over.
        num_targets: how many targets are not −100, when the caller knows (a batch does): spares a GPU a sync.
        weights: (T,) floating point weight of each row's loss, a constant: it gets no gradient. None = all 1.
        z_loss: z, the weight of lse² of each row that has a target, which counts times the row's weight too.
        label_smoothing: ε, the share of each target's probability that is spread over the vocabulary.
        group: the ranks that divide the vocabulary and the tokens.

    Returns:
        The 0-d sum, the same on every rank; all of them must run it backward.

    Raises:
        ValueError: shapes or dtypes that do not go together; a chunk below 1; a negative z_loss, or a
            label_smoothing outside [0, 1); on the CPU also a target outside the vocabulary or a wrong
            `num_targets` (elsewhere looking would stall the device).
    """
    words = _Words.of(weight, group)
    weight = local(weight)
    _check(hidden, weight, targets, chunk_tokens, num_targets, words)
    _check_weights(targets, weights)
    _check_terms(z_loss, label_smoothing)
    rows = _rows_with_targets(targets, num_targets)
    hidden = _all_tokens(hidden, weight, group)
    if not torch.is_grad_enabled():
        # Inside the function gradient mode is always off: only here can it learn that none is wanted.
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _VocabularyCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, rows, chunk_tokens, weights, z_loss, label_smoothing, words
    )
    return loss


def vocabulary_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int = 1024,
    num_targets: int | None = None,
    *,
    group: Group = None,
) -> Tensor:
    """Log-probability of each target; 0 where the target is −100.

    What `linear_log_probabilities` of ops/loss.py gives for all ranks' tokens and words. The backward pass
    computes a chunk's logits again, and needs no collective but the one for `hidden`.

    Args:
        hidden: (T / ranks, d) this rank's tokens.
        weight: (V, d) output embedding whose rows are divided evenly: a `DTensor`, or this rank's (V / ranks, d).
        targets: (T,) int64, already shifted, the same on every rank.
        chunk_tokens: most rows whose logits exist at a time.
        num_targets: how many targets are not −100, when the caller knows.
        group: the ranks that divide the vocabulary and the tokens.

    Returns:
        (T,) float32 (float64 for float64 inputs), all tokens on every rank, the same.

    Raises:
        ValueError: as `vocabulary_cross_entropy` does.
    """
    words = _Words.of(weight, group)
    weight = local(weight)
    _check(hidden, weight, targets, chunk_tokens, num_targets, words)
    rows = _rows_with_targets(targets, num_targets)
    found: Tensor = _VocabularyLogProbabilities.apply(  # type: ignore[no-untyped-call]
        _all_tokens(hidden, weight, group), weight, targets, rows, chunk_tokens, words
    )
    return found


@dataclass(frozen=True)
class _Words:
    """Which rows of the output embedding this rank has.

    Attributes:
        group: the ranks that divide them.
        ranks: how many they are.
        first: the word of this rank's first row.
        count: rows of this rank.
    """

    group: Group
    ranks: int
    first: int
    count: int

    @classmethod
    def of(cls, weight: Tensor, group: Group) -> _Words:
        rank, ranks = place_in(group)
        count = local(weight).shape[0]
        return cls(group, ranks, rank * count, count)

    @property
    def total(self) -> int:
        return self.ranks * self.count

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these words this rank has, and their rows (0 for the others)."""
        own = (target >= self.first) & (target < self.first + self.count)
        return own, torch.where(own, target - self.first, 0)


class _VocabularyCrossEntropy(torch.autograd.Function):
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
        words: _Words,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact = _exact_dtype(weight)
        ctx.weight_dtype, ctx.hidden_shape = weight.dtype, hidden.shape
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_grad = hidden.new_empty(rows.numel(), hidden.shape[1]) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            weight = weight.detach().to(hidden.dtype)
            for start in range(0, rows.numel(), chunk_tokens):
                part = rows[start : start + chunk_tokens]
                chunk, target = hidden.index_select(0, part), targets[part, None]
                scale = None if weights is None else weights[part, None].to(exact)
                losses, gradient = _chunk(chunk, weight, target, z_loss, label_smoothing, words, exact)
                loss += losses.sum() if scale is None else (losses * scale).sum()
                if hidden_grad is not None:
                    product = gradient @ weight
                    hidden_grad[start : start + chunk_tokens] = product if scale is None else product * scale
                if weight_grad is not None:
                    scaled = chunk if scale is None else (chunk * scale).to(weight.dtype)
                    _add_product(weight_grad, gradient, scaled)
        ctx.save_for_backward(rows, hidden_grad, weight_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            values = (hidden_grad * upstream).to(hidden_grad.dtype)
            hidden_grad = values.new_zeros(ctx.hidden_shape).index_copy_(0, rows, values)
        if weight_grad is not None:
            weight_grad = (weight_grad * upstream).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, *(None,) * 7


def _chunk(
    chunk: Tensor,
    weight: Tensor,
    target: Tensor,
    z_loss: float,
    label_smoothing: float,
    words: _Words,
    exact: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(rows, 1) losses of a chunk, and their gradient with respect to this rank's logits, (rows, V / ranks)."""
    exponentials, shift, lse, of_target, mean = _softmax_parts(
        chunk, weight, target, words, exact, bool(label_smoothing)
    )
    losses = (lse - of_target) * (1.0 - label_smoothing)
    factor = (shift - lse).exp_()
    if label_smoothing:
        losses += label_smoothing * (lse - mean)
    if z_loss:
        losses += z_loss * lse.square()
        factor *= 1.0 + 2.0 * z_loss * lse
    gradient = exponentials.mul_(factor)
    if label_smoothing:
        gradient -= label_smoothing / words.total
    own, place = words.find(target)
    gradient.scatter_add_(1, place, (label_smoothing - 1.0) * own.to(exact))
    return losses, gradient.to(weight.dtype)


def _softmax_parts(
    chunk: Tensor, weight: Tensor, target: Tensor, words: _Words, exact: torch.dtype, with_mean: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """This rank's exponentials of a chunk's logits, and what the ranks know together. One collective.

    Returns:
        (rows, V / ranks) exp(logit − shift), and as (rows, 1) each: shift, this rank's largest logit; the log of the
        sum of all ranks' exponentials; the target's logit; the mean of all logits (0 unless `with_mean`).
    """
    logits = F.linear(chunk, weight).to(exact)
    own, place = words.find(target)
    shift = logits.amax(dim=1, keepdim=True)
    of_target = logits.gather(1, place).masked_fill_(~own, 0.0)
    sums = [logits.sum(dim=1, keepdim=True)] if with_mean else []
    exponentials = logits.sub_(shift).exp_()
    told = torch.stack([shift, exponentials.sum(dim=1, keepdim=True), of_target, *sums])
    shifts, totals, of_target, *sums = all_gather(told[None], group=words.group).unbind(
        1
    )  # each (ranks, rows, 1)
    largest = shifts.amax(dim=0)
    lse = largest + (totals * (shifts - largest).exp_()).sum(dim=0).log_()
    mean = sums[0].sum(dim=0) / words.total if sums else torch.zeros_like(lse)
    return exponentials, shift, lse, of_target.sum(dim=0), mean


class _VocabularyLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor,
        chunk_tokens: int,
        words: _Words,
    ) -> Tensor:
        exact = _exact_dtype(weight)
        out = torch.zeros(hidden.shape[0], dtype=exact, device=hidden.device)
        normalizers = torch.zeros_like(out)
        with torch.autocast(hidden.device.type, enabled=False):
            projection = weight.detach().to(hidden.dtype)
            for part in _pieces(rows, chunk_tokens):
                chunk = hidden.index_select(0, part)
                _, _, lse, of_target, _ = _softmax_parts(chunk, projection, targets[part, None], words, exact)
                out.index_copy_(0, part, (of_target - lse).squeeze(1))
                normalizers.index_copy_(0, part, lse.squeeze(1))
        ctx.save_for_backward(hidden, weight, targets, rows, normalizers)
        ctx.chunk_tokens, ctx.words = chunk_tokens, words
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, rows, normalizers = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact = normalizers.dtype
        hidden_grad = torch.zeros_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            projection = weight.to(hidden.dtype)
            for part in _pieces(rows, ctx.chunk_tokens):
                chunk, (own, place) = hidden.index_select(0, part), ctx.words.find(targets[part, None])
                logits = F.linear(chunk, projection).to(exact)
                gradient = logits.sub_(normalizers[part, None]).exp_().neg_()
                gradient.scatter_add_(1, place, own.to(exact))
                gradient = (gradient * upstream[part, None]).to(hidden.dtype)
                if hidden_grad is not None:
                    hidden_grad.index_copy_(0, part, gradient @ projection)
                if weight_grad is not None:
                    _add_product(weight_grad, gradient, chunk)
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), *(None,) * 4


def _add_product(weight_grad: Tensor, gradient: Tensor, chunk: Tensor) -> None:
    """weight_grad += gradientᵀ · chunk: the product is rounded once per chunk, the sum over chunks stays exact."""
    if chunk.dtype == weight_grad.dtype:
        weight_grad.addmm_(gradient.t(), chunk)
    else:
        weight_grad += gradient.t() @ chunk


def _all_tokens(hidden: Tensor, weight: Tensor, group: Group) -> Tensor:
    """(T, d) all ranks' tokens in the dtype of matrix products: autocast's where it is on."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return all_gather(hidden.to(torch.get_autocast_dtype(device) if autocast else weight.dtype), group=group)


def _rows_with_targets(targets: Tensor, num_targets: int | None) -> Tensor:
    counted = targets != IGNORE
    if num_targets is None or targets.device.type == "cpu":
        return counted.nonzero().flatten()
    return torch.nonzero_static(counted, size=num_targets).flatten()


def _pieces(rows: Tensor, chunk_tokens: int) -> Iterator[Tensor]:
    return (rows[start : start + chunk_tokens] for start in range(0, rows.numel(), chunk_tokens))


def _exact_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of softmax and of sums."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int,
    num_targets: int | None,
    words: _Words,
) -> None:
    """Refuse what does not go together, on all ranks alike where their arguments are alike."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"a vocabulary divided among {words.ranks} ranks takes hidden (T / {words.ranks}, d) and weight"
            f" (V / {words.ranks}, d), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    tokens = words.ranks * hidden.shape[0]
    if targets.shape != (tokens,):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} is one of {words.ranks} ranks' share of the tokens and needs targets"
            f" ({tokens},) of all of them, got {tuple(targets.shape)}"
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}: use one, or autocast")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if targets.device.type != "cpu" or not targets.numel():
        return
    wrong = ((targets >= words.total) | (targets < 0)) & (targets != IGNORE)
    if wrong.any():
        worst = int(targets[wrong][0])
        raise ValueError(f"target {worst} is outside the vocabulary of {words.total:,} (and is not {IGNORE})")
    counted = int((targets != IGNORE).sum())
    if num_targets is not None and num_targets != counted:
        raise ValueError(f"num_targets={num_targets}, but {counted} targets are not {IGNORE}")


def _check_weights(targets: Tensor, weights: Tensor | None) -> None:
    if weights is None:
        return
    if weights.shape != targets.shape or not weights.is_floating_point():
        raise ValueError(
            f"targets {tuple(targets.shape)} need floating point weights of the same shape,"
            f" got {weights.dtype} of shape {tuple(weights.shape)}"
        )
    if weights.requires_grad:
        raise ValueError("weights get no gradient here: hand in weights.detach()")


def _check_terms(z_loss: float, label_smoothing: float) -> None:
    if z_loss < 0:
        raise ValueError(f"z_loss must not be negative, got {z_loss}; 0 leaves it out")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}; 0 leaves it out")
