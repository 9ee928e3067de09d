"""SimPO (Meng et al. 2024, arXiv:2405.14734): −log σ(β (π_chosen / n_chosen − π_rejected / n_rejected) − γ)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from multipack.models.objectives.scores import PreferenceLoss, Scores, difference


def _losses(scores: Scores) -> Tensor:
    return -F.logsigmoid(scores.beta * difference(scores.means) - scores.options["margin"])


SIMPO = PreferenceLoss("simpo", _losses, {"beta": 0.1, "margin": 0.5, "sft": 0.0}, uses_reference=False)
