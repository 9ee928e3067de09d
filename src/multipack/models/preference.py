"""Preference optimization on packs: both answers of every item in one forward pass.

    hidden ─ head ─▶ log-probability of each target      ─ sum per document ─▶ (items, 2) ─ loss ─▶ Σ over items
                         │ c c c c │ r r r │ c c │ r r r r │                 with the reference's

models/objectives has the losses.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.data.packs.collate import PreferenceBatch
from multipack.data.views.documents import IGNORE
from multipack.models.decoder import Decoder
from multipack.models.objectives import find_loss
from multipack.models.objectives.scores import Scores
from multipack.ops.autocast import at_least_float32
from multipack.ops.loss import linear_log_probabilities
from multipack.shapes import ModelShape


class PreferenceDecoder(Decoder):
    """A decoder with the loss of an objective on pairs or labeled answers; parameters have the names of `Decoder`'s.

    Args:
        shape: as for `Decoder`.
        attention: as for `Decoder`.
        loss: name of the objective, see `models/objectives`.
        **options: settings of the objective, instead of its defaults.

    Attributes:
        loss: the objective.
        options: its settings by name.
        last: metric that the loss reads → its value in the last global step.
        loss_function: (hidden, weight, targets, …) → log-probability of each target.

    Raises:
        ValueError: as `Decoder` does, there is no such objective, or it needs another head (`shape.scores`).
    """

    def __init__(
        self,
        shape: ModelShape,
        attention: str = "auto",
        loss: str = "sigmoid",
        **options: float,
    ) -> None:
        super().__init__(shape, attention)
        self.loss = find_loss(loss)
        if shape.scores != int(self.loss.reads_values):
            raise ValueError(
                f"preference.loss={self.loss.name} needs model.scores={int(self.loss.reads_values)}, got {shape.scores}"
            )
        self.options = {**self.loss.options, **options}
        self.last = dict.fromkeys(self.loss.reads_last, 0.0)
        self.loss_function = linear_log_probabilities
        self._tallies: dict[bool, Tensor | None] = {True: None, False: None}

    def forward(self, batch: PackedBatch, x: Tensor | None = None) -> Tensor:
        """Weighted sum of the loss over the batch's items: 0-d float32 (float64 for float64 weights).

        In evaluation mode, for a batch without the reference values that the loss needs, (items, 2) log-probabilities
        of both answers instead: the reference values if this model is the reference.

        Raises:
            ValueError: a batch without pairs; in training mode, one without reference values.
        """
        if not isinstance(batch, PreferenceBatch):
            raise ValueError(
                "a preference decoder takes pairs: collate the documents with PreferenceCollator"
            )
        if x is not None or not self.part.is_last:
            raise ValueError("a preference decoder cannot be a part of a pipeline")
        policy = self.values(batch) if self.loss.reads_values else self.pair_log_probabilities(batch)
        if batch.reference is None and self.loss.uses_reference:
            if self.training:
                raise ValueError("this batch has no reference values, which the loss needs")
            return policy
        reference = batch.reference if self.loss.uses_reference else None
        counts = self._per_pair(batch.targets != IGNORE, batch).clamp(min=1.0)
        weights = torch.ones_like(policy[:, 0]) if batch.item_weights is None else batch.item_weights
        desirable = torch.ones_like(weights, dtype=torch.bool) if batch.desirable is None else batch.desirable
        scores = Scores(policy, reference, counts, desirable, self.options, self.last)
        losses = self.loss.losses(scores)
        if sft := self.options.get("sft", 0.0):
            losses = losses - sft * scores.means[:, 0]
        self._count(self.loss.metrics(scores))
        return (losses * weights).sum().to(at_least_float32(self.output_weight.dtype))

    def pair_log_probabilities(self, batch: PreferenceBatch) -> Tensor:
        """(items, 2) float64 log-probabilities of both answers, summed over their targets."""
        return self._per_pair(self.head_loss(batch, self.hidden(batch)), batch)

    def values(self, batch: PreferenceBatch) -> Tensor:
        """(items, 2) float64 values at the last tokens of both answers."""
        slots = batch.cu_seqlens[1 : batch.num_documents + 1].long() - 1
        last = self.hidden(batch)[slots if batch.tree is None else batch.tree.last_slots]
        return F.linear(last.double(), self.output_weight.double()).view(-1, 2)

    @staticmethod
    def _per_pair(of_tokens: Tensor, batch: PackedBatch) -> Tensor:
        """A value for each target → (items, 2) float64 sums over each answer; the sum of padding is dropped."""
        bounds = batch.cu_seqlens.long() if batch.tree is None else batch.tree.target_bounds
        of_documents = torch.segment_reduce(of_tokens.double(), "sum", offsets=bounds)
        return of_documents[: batch.num_documents].view(-1, 2)

    def take_tally(self, training: bool = True) -> list[float]:
        """Statistics of the items seen in training (or evaluation) mode since the last call.

        Returns:
            Sum and number of values of each metric. Sum them over ranks for `PreferenceLoss.means`.
        """
        found = self._tallies[training]
        self._tallies[training] = None
        return [0.0] * (2 * len(self.loss.legend)) if found is None else cast(list[float], found.tolist())

    def _count(self, metrics: dict[str, Tensor]) -> None:
        each = [metrics[name].detach().double() for name in self.loss.legend]
        seen = torch.stack([torch.stack([one.sum(), one.new_tensor(len(one))]) for one in each]).flatten()
        before = self._tallies[self.training]
        self._tallies[self.training] = seen if before is None else before + seen
