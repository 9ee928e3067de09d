"""DPO and losses of the same difference, x = (π_chosen − π_rejected) − (ρ_chosen − ρ_rejected).

sigmoid   −(1 − ε) log σ(βx) − ε log σ(−βx)                          DPO (Rafailov et al. 2023, arXiv:2305.18290);
                                                                     ε > 0: cDPO (Mitchell 2023)
robust    (−(1 − ε) log σ(βx) + ε log σ(−βx)) / (1 − 2ε)             Chowdhury et al. 2024, arXiv:2403.00409
hinge     max(0, 1 − βx)                                             SLiC (Zhao et al. 2023, arXiv:2305.10425)
ipo       (x̄ − 1 / 2β)²  with π / n and ρ / n in x̄                    Azar et al. 2023, arXiv:2310.12036
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from multipack.models.objectives.scores import PreferenceLoss, Scores, difference


def _sigmoid(scores: Scores) -> Tensor:
    x, share = scores.beta * difference(scores.ratios), scores.options["label_smoothing"]
    return -(1.0 - share) * F.logsigmoid(x) - share * F.logsigmoid(-x)


def _robust(scores: Scores) -> Tensor:
    x, share = scores.beta * difference(scores.ratios), scores.options["label_smoothing"]
    return (-(1.0 - share) * F.logsigmoid(x) + share * F.logsigmoid(-x)) / (1.0 - 2.0 * share)


def _hinge(scores: Scores) -> Tensor:
    return (1.0 - scores.beta * difference(scores.ratios)).clamp(min=0.0)


def _ipo(scores: Scores) -> Tensor:
    return (difference(scores.ratios / scores.counts) - 0.5 / scores.beta).square()


_SMOOTHED = {"beta": 0.1, "label_smoothing": 0.0, "sft": 0.0}
SIGMOID = PreferenceLoss("sigmoid", _sigmoid, _SMOOTHED)
ROBUST = PreferenceLoss("robust", _robust, _SMOOTHED)
HINGE = PreferenceLoss("hinge", _hinge)
IPO = PreferenceLoss("ipo", _ipo)
