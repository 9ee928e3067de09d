"""Rows of hidden states with a target: one target each or, where documents share tokens, one for each document.

documents   p p a a,  p p b       rows      p p a b → 0 1 2        slots whose next token is a target
targets     p a a  p b            places    0 1 2 0 1              logits of a row are computed once
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.data.views.documents import IGNORE
from multipack.ops.logits import rank_and_size


class TargetRows(NamedTuple):
    """The rows of n targets; where documents share tokens, a row has a target for each of its documents.

    Attributes:
        rows: (R,) int64 numbers of the rows with a target, each once.
        places: (n,) int64 index in `rows` of each target's row.
    """

    rows: Tensor
    places: Tensor


@dataclass(frozen=True)
class ChunkTargets:
    """The targets of a chunk of R rows: one for each or, where tokens are shared, all E of the pack.

    Where tokens are shared, only the targets that are `held` are in the chunk, and others have no effect. So
    shapes do not depend on values, which would have to be read from the device.

    Attributes:
        columns: (E, 1) the targets, as numbers of tokens.
        rows: (E,) row of each target, arbitrary if it is not held; None = E is R, and target i belongs to row i.
        held: (E,) whether the target's row is in the chunk.
        weights: (E, 1) factors of the gradients; 0 if it is not held.
        totals: (R, 1) sums of the factors of each row.
    """

    columns: Tensor
    rows: Tensor | None = None
    held: Tensor | None = None
    weights: Tensor | None = None
    totals: Tensor | None = None

    @classmethod
    def of(
        cls, targets: Tensor, places: Tensor, size: int, scale: Tensor | None, dtype: torch.dtype
    ) -> ChunkTargets:
        """The targets whose `places` are in a chunk of `size` rows, computed without a wait for the device."""
        rows, held = places.clamp(0, size - 1), (places >= 0) & (places < size)
        weights = held.to(dtype) if scale is None else torch.where(held, scale.to(dtype), 0.0)
        totals = weights.new_zeros(size).index_add_(0, rows, weights)
        return cls(targets[:, None], rows, held, weights[:, None], totals[:, None])

    def pick(self, values: Tensor, column: Tensor) -> Tensor:
        """(E, 1) values of (R, n) at a column in the row of each target."""
        return values.gather(1, column) if self.rows is None else values[self.rows[:, None], column]

    def add(self, gradient: Tensor, column: Tensor, values: Tensor) -> None:
        """Add (E, 1) values to (R, n) gradients, at a column in the row of each target, in place.

        Where tokens are shared, gradients are first multiplied by `totals`, and values by `weights`.
        """
        if self.rows is None or self.weights is None or self.totals is None:
            gradient.scatter_add_(1, column, values)
            return
        gradient *= self.totals
        places = self.rows, column[:, 0]
        gradient.index_put_(places, (values * self.weights)[:, 0], accumulate=True)


class Targets(NamedTuple):
    """n targets, and the R rows of hidden states that have any.

    Attributes:
        targets: (n,) int64.
        weights: (n,) of their losses; None = 1.
        rows: (R,) int64 numbers of the rows.
        places: (n,) int64 index in `rows` of each target's row; None = target i belongs to row i, n is T, and targets
            of other rows do not count.
    """

    targets: Tensor
    weights: Tensor | None
    rows: Tensor
    places: Tensor | None

    def chunks(self, size: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, ChunkTargets, Tensor | None]]:
        """Chunks of `size` rows: their numbers, targets, and (R, 1) weights if `ChunkTargets` have none."""
        for number, rows in enumerate(torch.split(self.rows, size) if len(self.rows) else ()):
            if self.places is None:
                weights = None if self.weights is None else self.weights[rows, None].to(dtype)
                yield rows, ChunkTargets(self.targets[rows, None]), weights
            else:
                places = self.places - number * size
                yield rows, ChunkTargets.of(self.targets, places, len(rows), self.weights, dtype), None


def checked_targets(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    num_targets: int | None,
    weights: Tensor | None,
    group: dist.ProcessGroup | None,
    shared: TargetRows | None,
) -> Targets:
    """The targets, after a check of these arguments of `linear_cross_entropy`."""
    shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (T, d) and weight (V, d), got {shapes}")
    expected = hidden.shape[:1] if shared is None else shared.places.shape
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
        if shared is not None and count < len(targets):
            raise ValueError(f"a list of targets with the rows of each has no {IGNORE}")
    if shared is not None:
        return Targets(targets, weights, *shared)
    if num_targets is None:
        return Targets(targets, weights, counted.nonzero().flatten(), None)
    return Targets(targets, weights, torch.nonzero_static(counted, size=num_targets).flatten(), None)
