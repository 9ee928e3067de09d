"""Losses of preference pairs, each a function of the log-probabilities of both answers; a row of `LOSSES` names it.

π and ρ are (pairs, 2) log-probabilities of the chosen and the rejected answer under the model and the reference, summed
over an answer's tokens; n is the number of these. x = (π_chosen − π_rejected) − (ρ_chosen − ρ_rejected).

    sigmoid   −(1 − ε) log σ(βx) − ε log σ(−βx)                          DPO (Rafailov et al. 2023, arXiv:2305.18290);
                                                                         ε > 0: cDPO (Mitchell 2023)
    robust    (−(1 − ε) log σ(βx) + ε log σ(−βx)) / (1 − 2ε)             Chowdhury et al. 2024, arXiv:2403.00409
    hinge     max(0, 1 − βx)                                             SLiC (Zhao et al. 2023, arXiv:2305.10425)
    ipo       (x̄ − 1 / 2β)²  with π / n and ρ / n in x̄                    Azar et al. 2023, arXiv:2310.12036
    simpo     −log σ(β (π_c / n_c − π_r / n_r) − γ)                      Meng et al. 2024, arXiv:2405.14734
    orpo      −π_c / n_c − β log σ(odds(π_c / n_c) − odds(π_r / n_r))    Hong et al. 2024, arXiv:2403.07691;
                                                                         odds(p) = p − log(1 − exp p)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What a loss reads, and its constants.

    Attributes:
        policy: (pairs, 2) float64 log-probabilities of chosen and rejected, summed over their targets (π).
        reference: the same under the reference model (ρ); None where the loss has no reference.
        counts: (pairs, 2) targets of each answer (n), at least 1.
        beta: factor of rewards (β).
        label_smoothing: assumed share of wrong preferences (ε).
        margin: difference of rewards that SimPO asks for (γ).
    """

    policy: Tensor
    reference: Tensor | None
    counts: Tensor
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.0

    @property
    def ratios(self) -> Tensor:
        """(pairs, 2) π − ρ."""
        return self.policy if self.reference is None else self.policy - self.reference

    @property
    def means(self) -> Tensor:
        """(pairs, 2) π / n."""
        return self.policy / self.counts


def rewards(scores: Scores) -> Tensor:
    """(pairs, 2) rewards for metrics: β (π − ρ), or β π / n without a reference."""
    return scores.beta * (scores.means if scores.reference is None else scores.ratios)


def _sigmoid(scores: Scores) -> Tensor:
    x = scores.beta * _difference(scores.ratios)
    return -(1.0 - scores.label_smoothing) * F.logsigmoid(x) - scores.label_smoothing * F.logsigmoid(-x)


def _robust(scores: Scores) -> Tensor:
    x, share = scores.beta * _difference(scores.ratios), scores.label_smoothing
    return (-(1.0 - share) * F.logsigmoid(x) + share * F.logsigmoid(-x)) / (1.0 - 2.0 * share)


def _hinge(scores: Scores) -> Tensor:
    return (1.0 - scores.beta * _difference(scores.ratios)).clamp(min=0.0)


def _ipo(scores: Scores) -> Tensor:
    return (_difference(scores.ratios / scores.counts) - 0.5 / scores.beta).square()


def _simpo(scores: Scores) -> Tensor:
    return -F.logsigmoid(scores.beta * _difference(scores.means) - scores.margin)


def _orpo(scores: Scores) -> Tensor:
    # A mean of 0 (probability 1) has infinite odds.
    means = scores.means.clamp(max=-1e-12)
    odds = means - torch.log1p(-means.exp())
    return -scores.means[:, 0] - scores.beta * F.logsigmoid(_difference(odds))


def _difference(values: Tensor) -> Tensor:
    """(pairs, 2) → (pairs,) chosen minus rejected."""
    return values[:, 0] - values[:, 1]


LOSSES: dict[str, Callable[[Scores], Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""Value of `preference.loss` → (pairs,) losses."""
