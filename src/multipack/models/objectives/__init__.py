"""Objectives on pairs of answers and on labeled answers: each is a file here, and a row of `LOSSES`."""

from __future__ import annotations

from multipack.data.text.data_config import ItemKind
from multipack.models.objectives.dpo import HINGE, IPO, ROBUST, SIGMOID
from multipack.models.objectives.kto import KTO
from multipack.models.objectives.orpo import ORPO
from multipack.models.objectives.reward import REWARD
from multipack.models.objectives.scores import PreferenceLoss
from multipack.models.objectives.simpo import SIMPO

LOSSES = {row.name: row for row in (SIGMOID, ROBUST, HINGE, IPO, SIMPO, ORPO, REWARD, KTO)}
"""Value of `preference.loss` → row. The first one of a kind of items is its default."""


def find_loss(name: str, reads: ItemKind | None = None) -> PreferenceLoss:
    """The row of a name; of `auto`, the first that reads these items.

    Raises:
        ValueError: there is no such row, or it reads other items.
    """
    fitting = [row.name for row in LOSSES.values() if reads in (None, row.reads)]
    if name == "auto":
        return LOSSES[fitting[0]]
    if name not in LOSSES:
        raise ValueError(f"preference.loss={name} is not one of auto, {', '.join(LOSSES)}")
    if name not in fitting:
        kinds = {"pairs": "pairs (chosen, rejected)", "labels": "labeled answers (prompt, completion, label)"}
        raise ValueError(
            f"preference.loss={name} reads {kinds[LOSSES[name].reads]}, and these documents are"
            f" {kinds[reads or 'pairs']}: use {', '.join(fitting)}"
        )
    return LOSSES[name]


def check_options(row: PreferenceLoss, given: dict[str, float], reference: str) -> None:
    """Check that a row reads all changed options, and the reference model if one is named.

    Raises:
        ValueError: it does not; the message names the rows that read an option.
    """
    for name, value in given.items():
        if name not in row.options:
            readers = [each.name for each in LOSSES.values() if name in each.options]
            raise ValueError(
                f"preference.{name}={value} is of preference.loss={' and '.join(readers)}, got {row.name}: leave it out"
            )
    if reference and not row.uses_reference:
        raise ValueError(f"preference.loss={row.name} has no reference model: leave preference.reference out")
