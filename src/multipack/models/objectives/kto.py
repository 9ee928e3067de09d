"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306) on labeled answers.

desirable     λ_D (1 − σ(β (r − z)))     r = π − ρ of the answer
undesirable   λ_U (1 − σ(β (z − r)))     z = max(0, mean of π − ρ of mismatched answers)

A mismatched answer is another record's answer after the same prompt; the mean of their ratios estimates the divergence
of the model from the reference. It is taken over the last global step, so that a loss needs no other rank; before the
first step it is 0, and exact. TRL takes it over the batch itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multipack.models.objectives.scores import PreferenceLoss, Scores


def _gains(scores: Scores) -> Tensor:
    """(items,) gains, which the loss makes large: β (r − z), negated for undesirable answers."""
    gains = scores.beta * (scores.ratios[:, 0] - max(scores.last["kl"], 0.0))
    return torch.where(scores.desirable, gains, -gains)


def _losses(scores: Scores) -> Tensor:
    losses = torch.sigmoid(-_gains(scores))  # 1 − σ(gain)
    options = scores.options
    return torch.where(scores.desirable, options["desirable"] * losses, options["undesirable"] * losses)


def _metrics(scores: Scores) -> dict[str, Tensor]:
    rewards = scores.beta * scores.ratios[:, 0]
    return {
        "reward_accuracy": (_gains(scores) > 0).to(rewards.dtype),
        "reward_chosen": rewards[scores.desirable],
        "reward_rejected": rewards[~scores.desirable],
        "kl": scores.ratios[:, 1],
    }


KTO = PreferenceLoss(
    "kto",
    _losses,
    {"beta": 0.1, "desirable": 1.0, "undesirable": 1.0},
    reads="labels",
    metrics=_metrics,
    legend={
        "reward_accuracy": "share of answers whose reward is on the side of beta × kl that their label says",
        "reward_chosen": "mean reward of desirable answers: beta × (log-probability − the reference's)",
        "reward_rejected": "mean reward of undesirable answers",
        "kl": "mean log-probability of mismatched answers − the reference's",
    },
    reads_last=("kl",),
)
