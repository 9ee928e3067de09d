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

Where documents share tokens (`PackedBatch.tree`), `rows` names the row of each target, and a row may have several. Its
logits are computed once. Their gradient is the sum over the row's targets, whose weights w scale logits here:

    g    = Σ w · (softmax · (1 + 2 z · lse) − ε / V) − (1 − ε) · Σ (w · one-hot)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from multipack.data.views.documents import IGNORE
from multipack.ops.autocast import at_least_float32, autocast_dtype
from multipack.ops.logits import LossOptions, chunk_rows, compiled_softmax, rank_and_size, soft_capped

# all_gather_into_tensor warns since torch 2.13, where it is called all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

FUSED_DEVICES = ("cuda", "meta")
"""Devices that add half-precision products to a float32 matrix in one kernel (meta: to count bytes)."""
Totals = tuple[Tensor | None, Tensor | None]
"""Gradients of the hidden states and of the weight; None = not wanted."""
Statistics = tuple[Tensor, Tensor]
"""Of some columns of the logits: (R, 1 or 2) log-sum-exp and, for label smoothing, sum of each row; (E, 1) logit of
each target, 0 if it is in other columns."""
Tile = tuple[Tensor, Statistics]
"""(R, n) log-softmax over n columns of the logits, and their statistics."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    num_targets: int | None = None,
    weights: Tensor | None = None,
    rows: Tensor | None = None,
    **options: Any,
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
        num_targets: number of targets that are not −100, if known: saves a device synchronization.
        weights: (T,) floating-point weight of each row's loss, without gradient. None = 1.
        rows: (n,) int64 row of each target; `targets` and `weights` are then (n,) lists without −100. A row is
            projected once, however many targets it has. None = target i belongs to row i.
        **options: fields of `multipack.ops.logits.LossOptions`.

    Returns:
        0-d sum, equal on all ranks of `group`; 0, still connected to `hidden` and `weight`, without targets.

    Raises:
        ValueError: mismatched shapes or dtypes, or an option out of range; on the CPU also a target outside the
            vocabulary or a wrong `num_targets` (checking on other devices would synchronize).
    """
    chosen = LossOptions(**options)
    checked = _checked_targets(hidden, weight, targets, num_targets, weights, rows, chosen.group)
    if not torch.is_grad_enabled():
        # Grad mode is always off inside an autograd.Function, so that only detached inputs skip the gradients.
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, checked, chosen)  # type: ignore[no-untyped-call]
    return loss


def linear_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    num_targets: int | None = None,
    rows: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Log-probability of each target under `softmax(hidden @ weight.T)`, differentiable.

    Arguments and dtypes as in `linear_cross_entropy`, without z-loss and smoothing; the backward pass computes logits
    again and needs no collective.

    Returns:
        (T,) float32 (float64 for float64 inputs), 0 where the target is −100; equal on all ranks of `group`. With
        `rows` (n,), in the order of the targets.

    Raises:
        ValueError: as `linear_cross_entropy`; also for z-loss and smoothing, with which these were no
            log-probabilities.
    """
    chosen = LossOptions(**options)
    if chosen.z_loss or chosen.label_smoothing:
        raise ValueError("log-probabilities have no z_loss and no label_smoothing: leave both out")
    checked = _checked_targets(hidden, weight, targets, num_targets, None, rows, chosen.group)
    logs: Tensor = _LinearLogProbabilities.apply(hidden, weight, checked, chosen)  # type: ignore[no-untyped-call]
    return logs


class _Targets(NamedTuple):
    """n targets, and the R rows of hidden states that are projected for them.

    Attributes:
        columns: (n,) the targets, as numbers of tokens.
        weights: (n,) of their losses; None = 1.
        rows: (R,) int64 numbers of the rows, each once.
        places: (n,) int64 index in `rows` of each target's row; None = target i belongs to row i, n is T, and targets
            of other rows do not count.
    """

    columns: Tensor
    weights: Tensor | None
    rows: Tensor
    places: Tensor | None = None

    @classmethod
    def of(cls, columns: Tensor, weights: Tensor | None, rows: Tensor, tokens: int) -> _Targets:
        """Targets whose `rows`, of so many tokens, are given, without a wait for the device.

        On a GPU the number of different rows is not known: rows without a target fill up to the most there can be.
        """
        has_targets = torch.zeros(tokens, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
        count = int(has_targets.sum()) if rows.device.type == "cpu" else min(len(rows), tokens)
        numbers = has_targets.to(torch.uint8).argsort(descending=True, stable=True)[:count]
        return cls(columns, weights, numbers, (has_targets.cumsum(0) - 1)[rows])


class _Chunk(NamedTuple):
    """R rows and their E targets; where a row may have several, E are all targets of the pack.

    Then only those that are `held` are in the chunk, and others have no effect: so shapes do not depend on values,
    which would have to be read from the device.

    Attributes:
        rows: (R,) int64 numbers of the rows.
        hidden: (R, d) hidden states.
        columns: (E, 1) the targets, as numbers of tokens.
        weights: (E, 1) factors of the gradients, 0 if a target is not held; None = 1.
        places: (E,) row of each target in the chunk, arbitrary if it is not held; None = E is R, and target i belongs
            to row i.
        held: (E,) whether the target's row is in the chunk.
        totals: (R, 1) sums of the factors of each row.
    """

    rows: Tensor
    hidden: Tensor
    columns: Tensor
    weights: Tensor | None
    places: Tensor | None = None
    held: Tensor | None = None
    totals: Tensor | None = None

    def add_own(self, gradient: Tensor, column: Tensor, values: Tensor) -> None:
        """Add (E, 1) values to (R, n) gradients, at a column in the row of each target, in place.

        Where rows may have several targets, gradients are first multiplied by `totals`, and values by `weights`.
        """
        if self.places is None or self.weights is None or self.totals is None:
            gradient.scatter_add_(1, column, values)
            return
        gradient *= self.totals
        gradient.index_put_((self.places, column[:, 0]), (values * self.weights)[:, 0], accumulate=True)


def _checked_targets(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    num_targets: int | None,
    weights: Tensor | None,
    rows: Tensor | None,
    group: dist.ProcessGroup | None,
) -> _Targets:
    """The targets, after a check of these arguments of `linear_cross_entropy`."""
    shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (T, d) and weight (V, d), got {shapes}")
    expected = hidden.shape[:1] if rows is None else rows.shape
    if targets.shape != expected:
        raise ValueError(f"{shapes} need targets {tuple(expected)}, got {tuple(targets.shape)}")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}: use one dtype, or autocast")
    if weights is not None and (weights.shape != targets.shape or not weights.is_floating_point()):
        raise ValueError(
            f"expected floating-point weights ({len(targets)},), got {weights.dtype} {tuple(weights.shape)}"
        )
    if weights is not None and weights.requires_grad:
        raise ValueError("weights get no gradient: pass weights.detach()")
    counted = targets != IGNORE
    if targets.device.type == "cpu":  # on other devices the checks would wait for the device
        vocabulary, count = len(weight) * rank_and_size(group)[1], int(counted.sum())
        wrong = counted & ((targets < 0) | (targets >= vocabulary))
        if wrong.any():
            raise ValueError(
                f"target {int(targets[wrong][0])} is outside the vocabulary of {vocabulary:,} (and is not {IGNORE})"
            )
        if num_targets not in (None, count):
            raise ValueError(f"num_targets={num_targets}, but {count} targets are not {IGNORE}")
        if rows is not None and count < len(targets):
            raise ValueError(f"a list of targets with the row of each has no {IGNORE}")
    if rows is not None:
        return _Targets.of(targets, weights, rows, len(hidden))
    if num_targets is None:
        return _Targets(targets, weights, counted.nonzero().flatten())
    return _Targets(targets, weights, torch.nonzero_static(counted, size=num_targets).flatten())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: _Targets, options: LossOptions) -> Tensor:
        head = _Head(weight, autocast_dtype(weight), options)
        losses, _, gradients = head.losses(hidden, targets, ctx.needs_input_grad)
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
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: _Targets, options: LossOptions) -> Tensor:
        ctx.options, ctx.dtype, ctx.targets = options, autocast_dtype(weight), targets
        losses, lse, _ = _Head(weight, ctx.dtype, options).losses(hidden, targets, (False, False))
        ctx.save_for_backward(hidden, weight, lse)
        return losses.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, lse = ctx.saved_tensors
        head, targets = _Head(weight, ctx.dtype, ctx.options), ctx.targets._replace(weights=-upstream)
        gradients = head.gradients(hidden, targets, lse, ctx.needs_input_grad)
        dtypes = hidden.dtype, weight.dtype
        found = [None if x is None else x.to(dtype) for x, dtype in zip(gradients, dtypes, strict=True)]
        return *found, None, None


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

    def losses(
        self, hidden: Tensor, targets: _Targets, wanted: Sequence[bool]
    ) -> tuple[Tensor, Tensor, Totals]:
        """(n,) losses and (T,) log-sum-exp (0 where no target counts), and the gradients that are wanted.

        Gradients are weighted as `targets` are; losses are not.
        """
        losses = torch.zeros(len(targets.columns), dtype=self.exact, device=hidden.device)
        lse, totals = losses.new_zeros(len(hidden)), self._totals(hidden, wanted)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in self._chunks(hidden, targets):
                found, lse[chunk.rows], tiles = self._losses(chunk, any(wanted[:2]))
                if chunk.held is None:
                    losses[chunk.rows] = found
                else:
                    losses = torch.where(chunk.held, found, losses)
                if any(wanted[:2]):
                    self._add(totals, chunk, tiles)
                del tiles  # with the logits that it holds, before the next ones are made
        return losses, lse, totals

    def gradients(self, hidden: Tensor, targets: _Targets, lse: Tensor, wanted: Sequence[bool]) -> Totals:
        """The gradients that are wanted, from the log-sum-exp of an earlier call of `losses`."""
        totals = self._totals(hidden, wanted)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in self._chunks(hidden, targets):
                self._add(totals, chunk, self._tiles(chunk, lse[chunk.rows, None], None))
        return totals

    def _totals(self, hidden: Tensor, wanted: Sequence[bool]) -> Totals:
        """Zeros for the gradients that are wanted."""
        return (
            torch.zeros_like(hidden, dtype=self.weight.dtype) if wanted[0] else None,
            torch.zeros_like(self.weight, dtype=self.exact) if wanted[1] else None,
        )

    def _chunks(self, hidden: Tensor, targets: _Targets) -> Iterator[_Chunk]:
        """The rows with targets, as many at a time as logits may exist."""
        columns = -(-len(self.weight) // len(self.slices))
        size = self.options.chunk_tokens or chunk_rows(columns, hidden.device)
        for first in range(0, len(targets.rows), size):
            rows = targets.rows[first : first + size]
            of_rows = hidden[rows].to(self.weight.dtype)
            if targets.places is None:
                weights = None if targets.weights is None else targets.weights[rows, None].to(self.exact)
                yield _Chunk(rows, of_rows, targets.columns[rows, None], weights)
                continue
            places = targets.places - first
            held = (places >= 0) & (places < len(rows))
            places = places.clamp(0, len(rows) - 1)
            weights = held.to(self.exact)
            if targets.weights is not None:
                weights = torch.where(held, targets.weights.to(self.exact), 0.0)
            totals = weights.new_zeros(len(rows)).index_add_(0, places, weights)
            own = targets.columns[:, None], weights[:, None], places, held, totals[:, None]
            yield _Chunk(rows, of_rows, *own)

    def _losses(self, chunk: _Chunk, compiles: bool) -> tuple[Tensor, Tensor, Iterator[Tensor]]:
        """(E,) losses, (R,) log-sum-exp over the whole vocabulary, and the gradients of `_tiles`.

        With `compiles`, a compiled function computes all three if the options allow it.
        """
        smoothing, z_loss, group = self.options.label_smoothing, self.options.z_loss, self.options.group
        whole = (
            len(self.slices) == 1 and group is None and not self.options.logit_cap and chunk.places is None
        )
        compiles = compiles and self.options.compiled and chunk.hidden.device.type in FUSED_DEVICES
        if whole and compiles and len(chunk.hidden) > 1:  # torch.compile would make other code for one row
            logits = F.linear(chunk.hidden, self.weight)
            losses, lse, gradient, own = compiled_softmax()(logits, chunk.columns, smoothing, z_loss)
            return losses, lse, iter([gradient.scatter_(1, chunk.columns, own)])
        found, tile = list[Statistics](), None
        for columns in self.slices:
            tile = None  # frees the last tile before the next one is made
            tile = self._tile(chunk, columns)
            found.append(tile[1])
        of_rows, logit = _merge(found)
        if group is not None:
            sizes = [of_rows.numel(), logit.numel()]
            merged, ranks = torch.cat([of_rows.flatten(), logit.flatten()]), dist.get_world_size(group)
            gathered = merged.new_empty(ranks * len(merged))
            _all_gather(gathered, merged, group=group)
            each = (torch.split(part, sizes) for part in gathered.chunk(ranks))
            of_rows, logit = _merge([(a.view_as(of_rows), b.view_as(logit)) for a, b in each])
        lse = of_rows[:, 0]
        own, *total = (of_rows if chunk.places is None else of_rows[chunk.places]).unbind(1)
        losses = (own - logit[:, 0]) * (1.0 - smoothing)
        if smoothing:
            losses += smoothing * (own - total[0] / self.vocabulary)
        if z_loss:
            losses += z_loss * own.square()
        return losses, lse, self._tiles(chunk, lse[:, None], tile if len(self.slices) == 1 else None)

    def _tiles(self, chunk: _Chunk, lse: Tensor, tile: Tile | None) -> Iterator[Tensor]:
        """(R, n) gradients of the logits, tile by tile; a given `tile` is the only one, and is overwritten.

        `lse` is (R, 1), over the whole vocabulary; the one of a tile is over the tile's columns.
        """
        smoothing, z_loss, cap = self.options.label_smoothing, self.options.z_loss, self.options.logit_cap
        for columns in self.slices:
            logs, (of_rows, _) = tile or self._tile(chunk, columns)
            tile = None
            # The derivative of y = c · tanh(x / c) is 1 − (y / c)²; y = log-softmax + log-sum-exp.
            slope = 1.0 - ((logs + of_rows[:, :1]) / cap).square_() if cap else None
            gradient = logs.exp_()  # of the logits, in their memory
            if z_loss or gradient.shape[1] != self.vocabulary:
                gradient *= (of_rows[:, :1] - lse).exp_() * (1.0 + 2.0 * z_loss * lse)
            if smoothing:
                gradient -= smoothing / self.vocabulary
            column, is_inside = self._column(chunk, columns)
            chunk.add_own(gradient, column, (smoothing - 1.0) * is_inside.to(self.exact))
            gradient = gradient if slope is None else gradient.mul_(slope)
            gradient = gradient.to(self.weight.dtype)
            del logs
            yield gradient

    def _add(self, totals: Totals, chunk: _Chunk, gradients: Iterable[Tensor]) -> None:
        """Add the gradients of a chunk to `totals`, from the gradients of its logits."""
        of_hidden, of_weight = totals
        product = torch.zeros_like(chunk.hidden, dtype=self.exact)
        weights = (
            chunk.weights if chunk.places is None else None
        )  # else the gradients of the logits have them
        scaled = chunk.hidden if weights is None else (chunk.hidden * weights).to(chunk.hidden.dtype)
        for columns, gradient in zip(self.slices, gradients, strict=True):
            _add_product(product, gradient, self.weight[columns])
            if of_weight is not None:
                _add_product(of_weight[columns], gradient.t(), scaled)
            del gradient
        if of_hidden is not None:
            product = product if weights is None else product * weights
            of_hidden[chunk.rows] = product.to(of_hidden.dtype)

    def _tile(self, chunk: _Chunk, columns: slice) -> Tile:
        """The `Tile` of some columns of the logits."""
        logits = soft_capped(F.linear(chunk.hidden, self.weight[columns]), self.options.logit_cap)
        logs = F.log_softmax(logits, dim=1, dtype=self.exact)
        column, is_inside = self._column(chunk, columns)
        # lse = logit − log-softmax, at any column: no second pass over the logits.
        if chunk.places is None:
            logit = logits.gather(1, column).to(self.exact)
            lse = logit - logs.gather(1, column)
        else:
            logit = logits[chunk.places[:, None], column].to(self.exact)
            lse = logits[:, :1].to(self.exact) - logs[:, :1]
        of_rows = lse
        if self.options.label_smoothing:
            of_rows = torch.cat([lse, logs.sum(1, keepdim=True) + logs.shape[1] * lse], dim=1)
        return logs, (of_rows, logit.masked_fill(~is_inside, 0.0))

    def _column(self, chunk: _Chunk, columns: slice) -> tuple[Tensor, Tensor]:
        """(E, 1) column of each target in a tile, and whether the target is in it; if not, an arbitrary column."""
        column, width = chunk.columns - self.first - columns.start, columns.stop - columns.start
        is_inside = (column >= 0) & (column < width)
        if chunk.held is not None:
            is_inside &= chunk.held[:, None]
        return column.clamp(0, width - 1), is_inside


def _merge(found: Sequence[Statistics]) -> Statistics:
    """Statistics of the whole vocabulary from its parts: log-sum-exps are merged, all others summed."""
    if len(found) == 1:
        return found[0]
    of_rows, logits = (torch.stack(each) for each in zip(*found, strict=True))
    return torch.cat([of_rows[..., :1].logsumexp(0), of_rows[..., 1:].sum(0)], dim=1), logits.sum(0)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `out`; if `out` is of a wider dtype, the product is rounded on CPUs, but not the sum."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    elif out.device.type in FUSED_DEVICES:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        out += left @ right
