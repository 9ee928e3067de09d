"""Linear cross-entropy: the output projection and its loss in one function that never holds all logits.

The (T, V) logits are the largest tensor of a small model's step: T = 8,192 tokens and a vocabulary of V = 128,256 are
4.2 GB in float32, and their gradient as much again. They exist for a chunk of rows and a tile of the vocabulary at a
time:

                    vocabulary
            rank 0         rank 1
          ┌──────┬──────┬──────┬──────┐   Each tile gives three statistics per row: its log-sum-exp, the target's
    chunk │ tile │ tile │ tile │ tile │   logit and the sum of its logits. They are merged over the tiles of a
          ├──────┼──────┼──────┼──────┤   rank, then over the ranks that divide the vocabulary (one all-gather
    chunk │      │      │      │      │   per chunk): merged lse = logsumexp of the tiles' lse.
          └──────┴──────┴──────┴──────┘

They determine a row's loss and the gradient g of its logits. With label smoothing ε (Szegedy et al. 2016,
arXiv:1512.00567) and z-loss coefficient z (Chowdhery et al. 2022, arXiv:2204.02311, section 5):

    loss = (1 − ε) · (lse − logit[target]) + ε · (lse − mean logit) + z · lse²
    g    = softmax · (1 + 2 z · lse) − (1 − ε) · one-hot − ε / V

`linear_cross_entropy` computes gradients in the forward pass, while a chunk's logits exist: the loss is a sum, so the
backward pass only multiplies by the incoming scalar. With one tile nothing is computed twice; with more, logits are
computed again for the gradient. Row weights scale rows of (chunk, d), never logits. `linear_log_probabilities` needs
the incoming gradient of each row, so its backward pass computes logits again.

Where documents share tokens (`PackedBatch.tree`), a row has a target for each of its documents. Its logits are computed
once. The gradient of its logits is the sum over its targets, whose weights w scale logits here:

    g    = Σ w · (softmax · (1 + 2 z · lse) − ε / V) − (1 − ε) · Σ (w · one-hot)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from multipack.ops.autocast import at_least_float32, autocast_dtype
from multipack.ops.logits import LossOptions, chunk_rows, compiled_softmax, rank_and_size, soft_capped
from multipack.ops.target_rows import ChunkTargets, TargetRows, Targets, checked_targets

# all_gather_into_tensor warns since torch 2.13, where it is called all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LOSS_ATTRIBUTES = ("loss_function", "training_loss", "log_probabilities")
"""Attributes of models that hold a function of this module, or one with the same keyword arguments. Tiling and tensor
parallelism replace it by one that also passes `vocabulary_tiles` or `group`."""

FUSED_DEVICES = ("cuda", "meta")
"""Devices that add half-precision products to a float32 matrix in one kernel (meta: to count bytes)."""
Statistics = tuple[Tensor, Tensor]
"""Of R rows, E targets and some columns of the logits: (R, 1 or 2) log-sum-exp and, for label smoothing, the sum of the
logits; (E, 1) logit of each target, 0 if it is in other columns. `_merge` joins the statistics of parts."""
Tile = tuple[Tensor, Tensor, Tensor]
"""(R, n) log-softmax over n columns, and their statistics."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int | None = None,
    num_targets: int | None = None,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocabulary_tiles: int = 1,
    group: dist.ProcessGroup | None = None,
    compiled: bool = False,
    logit_cap: float = 0.0,
    shared: TargetRows | None = None,
) -> Tensor:
    """Sum of the cross-entropy of `hidden @ weight.T` over all targets that are not −100.

    Equals `F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum", label_smoothing=…)` or, with
    weights, `(F.cross_entropy(…, reduction="none") * weights).sum()`. Rows without a target are not projected. Matrix
    products run in the dtype of the inputs, or in autocast's where it is on; softmax, loss and the sum of the
    weight's gradient are float32 (float64 for float64 inputs).

    Args:
        hidden: (T, d) final hidden states.
        weight: (V, d) output embedding; with `group`, this rank's V / ranks consecutive rows of it.
        targets: (T,) int64, already shifted.
        chunk_tokens: rows whose logits exist at a time: about 2 × chunk_tokens × V / tiles × 4 bytes. None = 1,024; on
            a GPU, where every chunk reads and writes the weight's gradient, as many as 1 GiB holds.
        num_targets: number of targets that are not −100, if known: saves a device synchronization.
        weights: (T,) floating-point weight of each row's loss, without gradient. None = 1.
        z_loss: coefficient of lse² of each target's row (times its weight).
        label_smoothing: share of each target's probability that is spread over the vocabulary.
        vocabulary_tiles: slices of (this rank's part of) the vocabulary whose logits are computed one at a time.
        group: process group whose ranks divide the vocabulary evenly; all pass the same `hidden` and `targets`, and
            the gradient of `hidden` is the sum of the ranks' gradients. None = `weight` is whole.
        compiled: on a GPU, compile the function of a chunk's logits, unless the vocabulary is divided or
            tiled, logits have a bound, or rows have several targets.
        logit_cap: bound c of the logits x, which become c · tanh(x / c) (Gemma 2); 0 = no bound.
        shared: the rows of `targets` and `weights`, which are then (n,) lists without −100. None = target i belongs to
            row i.

    Returns:
        0-d sum, equal on all ranks of `group`; 0, still connected to `hidden` and `weight`, without targets.

    Raises:
        ValueError: mismatched shapes or dtypes, or an option out of range; on the CPU also a target outside the
            vocabulary or a wrong `num_targets` (checking on other devices would synchronize).
    """
    options = LossOptions(chunk_tokens, vocabulary_tiles, z_loss, label_smoothing, group, compiled, logit_cap)
    checked = checked_targets(hidden, weight, targets, num_targets, weights, group, shared)
    if not torch.is_grad_enabled():
        # Grad mode is always off inside an autograd.Function, so that only detached inputs skip the gradients.
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, checked, options)  # type: ignore[no-untyped-call]
    return loss


def linear_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int | None = None,
    num_targets: int | None = None,
    vocabulary_tiles: int = 1,
    group: dist.ProcessGroup | None = None,
    logit_cap: float = 0.0,
    shared: TargetRows | None = None,
) -> Tensor:
    """Log-probability of each target under `softmax(hidden @ weight.T)`, differentiable.

    Arguments and dtypes as in `linear_cross_entropy`; the backward pass computes logits again and needs no
    collective.

    Returns:
        (T,) float32 (float64 for float64 inputs), 0 where the target is −100; equal on all ranks of `group`. With
        `shared` (n,), in the order of the targets.

    Raises:
        ValueError: as `linear_cross_entropy`.
    """
    options = LossOptions(chunk_tokens, vocabulary_tiles, group=group, logit_cap=logit_cap)
    checked = checked_targets(hidden, weight, targets, num_targets, None, group, shared)
    logs: Tensor = _LinearLogProbabilities.apply(hidden, weight, checked, options)  # type: ignore[no-untyped-call]
    return logs


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Targets, options: LossOptions) -> Tensor:
        head = _Head(weight, autocast_dtype(weight), options)
        losses, _, *gradients = head.compute(hidden, targets, None, ctx.needs_input_grad)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype
        return (losses if targets.weights is None else losses * targets.weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            None if gradient is None else (gradient * upstream).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None


class _LinearLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Targets, options: LossOptions) -> Tensor:
        ctx.options, ctx.dtype, ctx.targets = options, autocast_dtype(weight), targets
        losses, lse, *_ = _Head(weight, ctx.dtype, options).compute(hidden, targets, None, (False, False))
        ctx.save_for_backward(hidden, weight, lse)
        return losses.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, lse = ctx.saved_tensors
        head, targets = _Head(weight, ctx.dtype, ctx.options), ctx.targets._replace(weights=-upstream)
        *_, hidden_grad, weight_grad = head.compute(hidden, targets, lse, ctx.needs_input_grad)
        hidden_grad = None if hidden_grad is None else hidden_grad.to(hidden.dtype)
        weight_grad = None if weight_grad is None else weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None


class _Head:
    """The output embedding of one rank, (V / ranks, d), in the dtype of matrix products, and its loss.

    `exact` is the dtype of softmax, losses and sums.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, options: LossOptions) -> None:
        self.weight, self.options = weight.detach().to(dtype), options
        self.exact = at_least_float32(weight.dtype)
        rank, ranks = rank_and_size(options.group)
        self.first, self.vocabulary = rank * len(weight), ranks * len(weight)
        tiles = min(options.vocabulary_tiles, len(weight))
        bounds = [len(weight) * n // tiles for n in range(tiles + 1)]
        self.slices = [slice(*ends) for ends in pairwise(bounds)]

    def compute(
        self, hidden: Tensor, targets: Targets, lse: Tensor | None, wanted: Sequence[bool]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Losses and gradients, chunk by chunk of the rows with a target.

        Gradients are computed if `wanted` for `hidden` and for `weight`, and weighted as `targets` are; losses are not.
        With `lse`, the result of an earlier call, losses are not computed again.

        Returns:
            (n,) losses, (T,) log-sum-exp (0 in other rows), and the gradients of `hidden` and `weight` or None.
        """
        losses = torch.zeros(len(targets.targets), dtype=self.exact, device=hidden.device)
        is_known, lse = lse is not None, losses.new_zeros(len(hidden)) if lse is None else lse
        hidden_grad = torch.zeros_like(hidden, dtype=self.weight.dtype) if wanted[0] else None
        weight_grad = torch.zeros_like(self.weight, dtype=self.exact) if wanted[1] else None
        columns = -(-len(self.weight) // len(self.slices))
        size = self.options.chunk_tokens or chunk_rows(columns, hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, target, weights in targets.chunks(size, self.exact):
                chunk = hidden[rows].to(self.weight.dtype)
                if is_known:
                    gradients = self._tiles(chunk, target, lse[rows, None], None)
                else:
                    found, lse[rows], gradients = self._losses(chunk, target, any(wanted[:2]))
                    if target.held is None:
                        losses[rows] = found
                    else:
                        losses = torch.where(target.held, found, losses)
                if any(wanted[:2]):
                    product = self._products(chunk, gradients, weights, weight_grad)
                    if hidden_grad is not None:
                        hidden_grad[rows] = product.to(hidden_grad.dtype)
                del gradients  # with the logits that it holds, before the next ones are made
        return losses, lse, hidden_grad, weight_grad

    def _losses(
        self, chunk: Tensor, target: ChunkTargets, compiles: bool
    ) -> tuple[Tensor, Tensor, Iterator[Tensor]]:
        """(E,) losses, (R,) log-sum-exp over the whole vocabulary, and the gradients of `_tiles`.

        With `compiles`, a compiled function computes all three if the options allow it.
        """
        smoothing, z_loss, group = self.options.label_smoothing, self.options.z_loss, self.options.group
        whole = len(self.slices) == 1 and group is None and not self.options.logit_cap and target.rows is None
        # torch.compile would make other code for one row.
        if (
            compiles
            and self.options.compiled
            and chunk.device.type in FUSED_DEVICES
            and whole
            and len(chunk) > 1
        ):
            logits = F.linear(chunk, self.weight)
            losses, lse, gradient, own = compiled_softmax()(logits, target.columns, smoothing, z_loss)
            return losses, lse, iter([gradient.scatter_(1, target.columns, own)])
        found, tile = list[Statistics](), None
        for columns in self.slices:
            tile = None  # frees the last tile before the next one is made
            tile = self._tile(chunk, target, columns)
            found.append(tile[1:])
        of_rows, logit = _merge(found)
        if group is not None:
            sizes = [of_rows.numel(), logit.numel()]
            merged, ranks = torch.cat([of_rows.flatten(), logit.flatten()]), dist.get_world_size(group)
            gathered = merged.new_empty(ranks * len(merged))
            _all_gather(gathered, merged, group=group)
            each = (torch.split(part, sizes) for part in gathered.chunk(ranks))
            of_rows, logit = _merge([(a.view_as(of_rows), b.view_as(logit)) for a, b in each])
        lse = of_rows[:, 0]
        own, *total = (each if target.rows is None else each[target.rows] for each in of_rows.unbind(1))
        losses = (own - logit[:, 0]) * (1.0 - smoothing)
        if smoothing:
            losses += smoothing * (own - total[0] / self.vocabulary)
        if z_loss:
            losses += z_loss * own.square()
        return losses, lse, self._tiles(chunk, target, lse[:, None], tile if len(self.slices) == 1 else None)

    def _tiles(self, chunk: Tensor, target: ChunkTargets, lse: Tensor, tile: Tile | None) -> Iterator[Tensor]:
        """(R, n) gradients of the logits, tile by tile; a given `tile` is the only one, and is overwritten.

        `lse` is (R, 1), over the whole vocabulary; the one in `statistics` is over the tile's columns.
        """
        smoothing, z_loss, cap = self.options.label_smoothing, self.options.z_loss, self.options.logit_cap
        for columns in self.slices:
            logs, statistics, _ = tile or self._tile(chunk, target, columns)
            tile = None
            # The derivative of y = c · tanh(x / c) is 1 − (y / c)²; y = log-softmax + log-sum-exp.
            slope = 1.0 - ((logs + statistics[:, :1]) / cap).square_() if cap else None
            gradient = logs.exp_()  # of the logits, in their memory
            if z_loss or gradient.shape[1] != self.vocabulary:
                gradient *= (statistics[:, :1] - lse).exp_() * (1.0 + 2.0 * z_loss * lse)
            if smoothing:
                gradient -= smoothing / self.vocabulary
            column, is_inside = self._column(target, columns)
            target.add(gradient, column, (smoothing - 1.0) * is_inside.to(self.exact))
            gradient = gradient if slope is None else gradient.mul_(slope)
            gradient = gradient.to(self.weight.dtype)
            del logs
            yield gradient

    def _products(
        self, chunk: Tensor, gradients: Iterable[Tensor], scale: Tensor | None, weight_grad: Tensor | None
    ) -> Tensor:
        """(R, d) gradient of a chunk's hidden states from the gradients of its logits; adds to `weight_grad`.

        `scale` has the (R, 1) weights of rows.
        """
        product = torch.zeros_like(chunk, dtype=self.exact)
        scaled = chunk if scale is None else (chunk * scale).to(chunk.dtype)
        for columns, gradient in zip(self.slices, gradients, strict=True):
            _add_product(product, gradient, self.weight[columns])
            if weight_grad is not None:
                _add_product(weight_grad[columns], gradient.t(), scaled)
            del gradient
        return product if scale is None else product * scale

    def _tile(self, chunk: Tensor, target: ChunkTargets, columns: slice) -> Tile:
        """The `Tile` of some columns of the logits."""
        logits = soft_capped(F.linear(chunk, self.weight[columns]), self.options.logit_cap)
        logs = F.log_softmax(logits, dim=1, dtype=self.exact)
        column, is_inside = self._column(target, columns)
        logit = target.pick(logits, column).to(self.exact)
        # lse = logit − log-softmax, at any column: no second pass over the logits.
        lse = (
            logit - logs.gather(1, column)
            if target.rows is None
            else logits[:, :1].to(self.exact) - logs[:, :1]
        )
        if self.options.label_smoothing:
            lse = torch.cat([lse, logs.sum(1, keepdim=True) + logs.shape[1] * lse], dim=1)
        return logs, lse, logit.masked_fill(~is_inside, 0.0)

    def _column(self, target: ChunkTargets, columns: slice) -> tuple[Tensor, Tensor]:
        """(E, 1) column of each target in a tile, and whether the target is in it; if not, an arbitrary column."""
        column, width = target.columns - self.first - columns.start, columns.stop - columns.start
        is_inside = (column >= 0) & (column < width)
        if target.held is not None:
            is_inside &= target.held[:, None]
        return column.clamp(0, width - 1), is_inside


def _merge(found: Sequence[Statistics]) -> Statistics:
    """Statistics of the whole vocabulary from its parts: log-sum-exps are merged, all others summed."""
    if len(found) == 1:
        return found[0]
    of_rows, logits = (torch.stack(each) for each in zip(*found, strict=True))
    merged = torch.cat([of_rows[..., :1].logsumexp(0), of_rows[..., 1:].sum(0)], dim=1)
    return merged, logits.sum(0)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `out`; if `out` is of a wider dtype, the product is rounded on CPUs, but not the sum."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    elif out.device.type in FUSED_DEVICES:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        out += left @ right
