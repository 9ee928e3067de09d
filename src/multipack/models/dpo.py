"""Direct preference optimization (DPO) on packs: both answers of every pair in one forward pass.

    hidden ─ head ─▶ log-probability of each target (T,) ─ sum per document ─▶ (pairs, 2)
                         │ c c c c │ r r r │ c c │ r r r r │                 minus the reference's
    loss = Σ −log σ(β · ((π_chosen − π_rejected) − (ρ_chosen − ρ_rejected)))

π and ρ are log-probabilities of an answer, summed over its tokens, under the model and the reference (Rafailov et al.
2023, arXiv:2305.18290, equation 7). With a share ε of wrong preferences (Mitchell 2023, "cDPO"):
loss = −(1 − ε) log σ(x) − ε log σ(−x).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.data.collate import PreferenceBatch
from multipack.models.decoder import Decoder
from multipack.ops.autocast import at_least_float32
from multipack.ops.loss import linear_log_probabilities
from multipack.shapes import ModelShape


class PreferenceDecoder(Decoder):
    """A decoder with the loss of preference pairs; names of parameters are those of `Decoder`.

    Args:
        shape: as for `Decoder`.
        attention: as for `Decoder`.
        beta: factor of rewards (β above); the larger, the closer the model stays to the reference.
        label_smoothing: assumed share of wrong preferences.
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
        log_probabilities: Callable[..., Tensor] = linear_log_probabilities,
    ) -> None:
        super().__init__(shape, attention)
        self.beta, self.label_smoothing = beta, label_smoothing
        self.log_probabilities = log_probabilities
        self._tallies: dict[bool, Tensor | None] = {True: None, False: None}

    def forward(self, batch: PackedBatch, x: Tensor | None = None) -> Tensor:
        """Sum of the loss over the batch's pairs: 0-d float32 (float64 for float64 weights).

        In evaluation mode, for a batch without reference values, (pairs, 2) log-probabilities of the chosen and
        rejected answers instead: the reference values if this model is the reference.

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
        if batch.reference is None:
            if self.training:
                raise ValueError("this batch has no reference values, which the loss needs")
            return policy
        rewards = self.beta * (policy - batch.reference)
        margins = rewards[:, 0] - rewards[:, 1]
        losses = -(1.0 - self.label_smoothing) * F.logsigmoid(margins)
        if self.label_smoothing:
            losses = losses - self.label_smoothing * F.logsigmoid(-margins)
        self._count(rewards.detach(), margins.detach())
        return losses.sum().to(at_least_float32(self.output_weight.dtype))

    def pair_log_probabilities(self, batch: PreferenceBatch) -> Tensor:
        """(pairs, 2) float64 log-probabilities of the chosen and rejected answers, summed over their targets."""
        of_tokens = self.log_probabilities(
            self.hidden(batch), self.output_weight, batch.targets, num_targets=batch.num_target_tokens
        )
        # The sum of padding is dropped.
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

    def _count(self, rewards: Tensor, margins: Tensor) -> None:
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
