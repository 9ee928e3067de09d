"""ORPO (Hong et al. 2024, arXiv:2403.07691): −p_chosen − β log σ(odds(p_chosen) − odds(p_rejected)).

p = π / n, and odds(p) = p − log(1 − exp p). p is a mean over the answer of one pair; TRL's first term is a mean over
the prompts and chosen answers of a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.models.objectives.scores import PreferenceLoss, Scores, difference


def _losses(scores: Scores) -> Tensor:
    # A mean of 0 (probability 1) has infinite odds.
    means = scores.means.clamp(max=-1e-12)
    odds = means - torch.log1p(-means.exp())
    return -scores.means[:, 0] - scores.beta * F.logsigmoid(difference(odds))


ORPO = PreferenceLoss("orpo", _losses, uses_reference=False)
