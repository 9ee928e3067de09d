"""Preference optimization on packs: both answers of every pair in one forward pass.

    hidden ─ head ─▶ log-probability of each target (T,) ─ sum per document ─▶ (pairs, 2) ─ loss ─▶ Σ over pairs
                         │ c c c c │ r r r │ c c │ r r r r │                 with the reference's

preference_losses.py has the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from multipack.data.batch import IGNORE, PackedBatch
from multipack.data.collate import PreferenceBatch
from multipack.models.decoder import Decoder
from multipack.models.preference_losses import LOSSES, Scores, rewards
from multipack.ops.autocast import at_least_float32
from multipack.ops.loss import linear_log_probabilities
from multipack.shapes import ModelShape


class PreferenceDecoder(Decoder):
    """A decoder with the loss of preference pairs; names of parameters are those of `Decoder`.

    Args:
        shape: as for `Decoder`.
        attention: as for `Decoder`.
        beta: factor of rewards; the larger, the closer the model stays to the reference.
        label_smoothing: assumed share of wrong preferences, of losses that have one.
        loss: a row of `LOSSES`.
        margin: difference of rewards that SimPO asks for.
        sft: weight of the chosen answer's negative log-probability per token, which is added to the loss.
        uses_reference: whether the loss reads reference values.
        log_probabilities: (hidden, weight, targets, num_targets=…) → (T,).

    Raises:
        ValueError: as `Decoder` does.
    """

    def __init__(
        self,
        shape: ModelShape,
        attention: str = "auto",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        loss: str = "sigmoid",
        margin: float = 0.0,
        sft: float = 0.0,
        uses_reference: bool = True,
        log_probabilities: Callable[..., Tensor] = linear_log_probabilities,
    ) -> None:
        super().__init__(shape, attention)
        self.beta, self.label_smoothing, self.margin, self.sft = beta, label_smoothing, margin, sft
        self.loss, self.uses_reference = LOSSES[loss], uses_reference
        self.log_probabilities = log_probabilities
        self._tallies: dict[bool, Tensor | None] = {True: None, False: None}

    def forward(self, batch: PackedBatch, x: Tensor | None = None) -> Tensor:
        """Sum of the loss over the batch's pairs: 0-d float32 (float64 for float64 weights).

        In evaluation mode, for a batch without the reference values that the loss needs, (pairs, 2) log-probabilities
        of the chosen and rejected answers instead: the reference values if this model is the reference.

        Raises:
            ValueError: a batch without pairs; in training mode, one without reference values.
        """
        if not isinstance(batch, PreferenceBatch):
            raise ValueError(
                "a preference decoder takes pairs: collate the documents with PreferenceCollator"
            )
        if x is not None or not self.part.is_last:
            raise ValueError("a preference decoder cannot be a part of a pipeline")
        policy = self.pair_log_probabilities(batch)
        if batch.reference is None and self.uses_reference:
            if self.training:
                raise ValueError("this batch has no reference values, which the loss needs")
            return policy
        reference = batch.reference if self.uses_reference else None
        counts = self._per_pair(batch.targets != IGNORE, batch).clamp(min=1.0)
        scores = Scores(policy, reference, counts, self.beta, self.label_smoothing, self.margin)
        losses = self.loss(scores)
        if self.sft:
            losses = losses - self.sft * scores.means[:, 0]
        self._count(rewards(scores).detach())
        return losses.sum().to(at_least_float32(self.output_weight.dtype))

    def pair_log_probabilities(self, batch: PreferenceBatch) -> Tensor:
        """(pairs, 2) float64 log-probabilities of the chosen and rejected answers, summed over their targets."""
        of_tokens = self.log_probabilities(
            self.hidden(batch), self.output_weight, batch.targets, num_targets=batch.num_target_tokens
        )
        return self._per_pair(of_tokens, batch)

    @staticmethod
    def _per_pair(of_tokens: Tensor, batch: PackedBatch) -> Tensor:
        """(T,) → (pairs, 2) float64 sums over each answer; the sum of padding is dropped."""
        of_documents = torch.segment_reduce(of_tokens.double(), "sum", offsets=batch.cu_seqlens.long())
        return of_documents[: batch.num_documents].view(-1, 2)

    def take_tally(self, training: bool = True) -> list[float]:
        """Statistics of the pairs seen in training (or evaluation) mode since the last call.

        Returns:
            Number of pairs, of pairs whose chosen answer has the higher reward, and the sums of margins, of chosen and
            of rejected rewards. Sum them over ranks for `preference_metrics`.
        """
        found = self._tallies[training]
        self._tallies[training] = None
        return [0.0] * 5 if found is None else cast(list[float], found.tolist())

    def _count(self, rewards: Tensor) -> None:
        margins = rewards[:, 0] - rewards[:, 1]
        accurate = (margins > 0).sum(dtype=margins.dtype)
        sums = [accurate, *(values.sum() for values in (margins, *rewards.unbind(1)))]
        seen = torch.stack([torch.full_like(accurate, len(margins)), *sums])
        before = self._tallies[self.training]
        self._tallies[self.training] = seen if before is None else before + seen


def preference_metrics(tally: list[float], prefix: str = "") -> dict[str, float]:
    """Means over pairs by name of the metric, from the sums of `take_tally`; empty without pairs."""
    pairs, *sums = tally
    if not pairs:
        return {}
    names = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")
    return {f"{prefix}{name}": total / pairs for name, total in zip(names, sums, strict=True)}
