"""`PreferenceLoss`, a row of the table of objectives, and `Scores`, what its loss and its metrics read.

An item is two neighboring documents: a pair (chosen, rejected), or a labeled answer and, after the same prompt, the
answer of another record. π and ρ are (items, 2) log-probabilities of both under the model and the reference, summed
over an answer's targets; n is the number of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from multipack.data.text.data_config import ItemKind

PAIR_LEGEND = {
    "reward_accuracy": "share of pairs whose chosen answer has the higher reward",
    "reward_chosen": "mean reward of chosen answers: beta × (log-probability − the reference's), or"
    " beta × log-probability per token without a reference",
    "reward_rejected": "mean reward of rejected answers",
}


@dataclass(frozen=True)
class Scores:
    """The items of a pack.

    Attributes:
        policy: (items, 2) float64 π; of a loss on values, these values.
        reference: (items, 2) float64 ρ; None where the loss has no reference.
        counts: (items, 2) n, at least 1.
        desirable: (items,) bool labels of answers; true for pairs.
        options: name of a setting `preference.*` → its value.
        last: metric → its mean over the last global step in training, 0 before the first one.
    """

    policy: Tensor
    reference: Tensor | None
    counts: Tensor
    desirable: Tensor
    options: Mapping[str, float]
    last: Mapping[str, float]

    @property
    def beta(self) -> float:
        """The factor of rewards."""
        return self.options["beta"]

    @property
    def ratios(self) -> Tensor:
        """(items, 2) π − ρ."""
        return self.policy if self.reference is None else self.policy - self.reference

    @property
    def means(self) -> Tensor:
        """(items, 2) π / n."""
        return self.policy / self.counts


def difference(values: Tensor) -> Tensor:
    """(items, 2) → (items,) the first minus the second: chosen minus rejected."""
    return values[:, 0] - values[:, 1]


def reward_metrics(rewards: Tensor) -> dict[str, Tensor]:
    """The metrics of `PAIR_LEGEND` from (pairs, 2) rewards of chosen and rejected answers."""
    accurate = (difference(rewards) > 0).to(rewards.dtype)
    return dict(zip(PAIR_LEGEND, (accurate, *rewards.unbind(1)), strict=True))


def pair_metrics(scores: Scores) -> dict[str, Tensor]:
    """Metrics of implicit rewards: β (π − ρ), or β π / n without a reference."""
    return reward_metrics(scores.beta * (scores.means if scores.reference is None else scores.ratios))


@dataclass(frozen=True)
class PreferenceLoss:
    """An objective on pairs or on labeled answers: a row of the table in `models/objectives`.

    Attributes:
        name: the value of `preference.loss`.
        losses: scores → (items,) losses.
        options: name of a setting `preference.*` that it reads → its default.
        reads: kind of items.
        reads_values: whether it reads values at last tokens, of a decoder with a head of one value, as `Scores.policy`.
        uses_reference: whether it reads reference values.
        metrics: scores → metric → values, of which the mean is reported.
        legend: metric → meaning, in the order of `metrics`. With reward_chosen and reward_rejected, their difference is
            reported as reward_margin.
        reads_last: metrics of the last global step that `losses` reads.
    """

    name: str
    losses: Callable[[Scores], Tensor]
    options: Mapping[str, float] = field(default_factory=lambda: {"beta": 0.1, "sft": 0.0})
    reads: ItemKind = "pairs"
    reads_values: bool = False
    uses_reference: bool = True
    metrics: Callable[[Scores], dict[str, Tensor]] = pair_metrics
    legend: Mapping[str, str] = field(default_factory=lambda: PAIR_LEGEND)
    reads_last: tuple[str, ...] = ()

    def means(self, tally: list[float], prefix: str = "") -> dict[str, float]:
        """Metric → mean, from the sum and the number of its values; metrics without values are omitted."""
        sums = zip(self.legend, tally[::2], tally[1::2], strict=True)
        found = {name: total / count for name, total, count in sums if count}
        if {"reward_chosen", "reward_rejected"} <= found.keys():
            found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
        return {f"{prefix}{name}": value for name, value in found.items()}
