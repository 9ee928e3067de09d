"""Bradley–Terry reward model: −log σ(r_chosen − r_rejected), where r is a value at an answer's last token.

Ouyang et al. 2022, arXiv:2203.02155, after Bradley and Terry 1952. The decoder has a head of one value instead of the
vocabulary's (`model.scores=1`), as transformers' …ForSequenceClassification have.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from multipack.models.objectives.scores import PreferenceLoss, Scores, difference, reward_metrics


def _losses(scores: Scores) -> Tensor:
    return -F.logsigmoid(difference(scores.policy))


REWARD = PreferenceLoss(
    "reward",
    _losses,
    options={},
    reads_values=True,
    uses_reference=False,
    metrics=lambda scores: reward_metrics(scores.policy),
    legend={
        "reward_accuracy": "share of pairs whose chosen answer has the higher reward",
        "reward_chosen": "mean reward of chosen answers",
        "reward_rejected": "mean reward of rejected answers",
    },
)
