"""`multipack calibrate`: real packs timed on this device, the planner's cost fitted to them, and checked on others.

documents ─▶ plan ─▶ some packs ─┬─ every second one, with mixes ─▶ fit ─▶ cost.json
                                 └─ the others ─▶ predicted against measured
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from multipack.data.corpus import load_corpus
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.planning.plan import plan as make_plan
from multipack.reports.console import Console
from multipack.training.calibrate import NOISY, DecoderTimer, calibrate, cost_rows, least_seconds
from multipack.training.precision import resolve_dtype
from multipack.training.run_parts import document_limit, shape_of

if TYPE_CHECKING:
    from multipack.training.run_config import Config

PACKS = 24
"""Packs of the plan that are timed, half of them to fit and half of them to check."""


@dataclass(frozen=True)
class Calibration:
    """What calibrating found.

    Attributes:
        model: the fitted cost.
        checked: (documents, tokens, longest, measured seconds, predicted seconds) of packs that were not fitted to.
    """

    model: CostModel
    checked: list[tuple[int, int, int, float, float]]

    @property
    def error(self) -> float:
        """Mean absolute error of the predictions, as a share of the mean measured time."""
        measured = sum(row[3] for row in self.checked)
        return sum(abs(row[3] - row[4]) for row in self.checked) / measured

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column names and rows for the console."""
        rows = [
            [f"{count:,}", f"{tokens:,}", f"{longest:,}", f"{1e3 * measured:.1f}", f"{1e3 * predicted:.1f}"]
            for count, tokens, longest, measured, predicted in self.checked
        ]
        return ["documents", "tokens", "longest", "measured ms", "predicted ms"], rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "cost": self.model.to_dict(),
            "error": self.error,
            "checked": [list(row) for row in self.checked],
        }


def calibration_rows(found: Calibration, saved: Path) -> list[tuple[str, str]]:
    """What was fitted, how well it predicts, and where it is."""
    busy = "; was the machine busy?" if found.error > NOISY else ""
    return [
        *cost_rows(found.model),
        (
            "predictions",
            f"{found.error:.1%} from the measured times, in the mean of {len(found.checked)} packs{busy}",
        ),
        ("saved", f"{saved} (plan.cost={saved} in training, cost={saved} in `multipack plan`)"),
    ]


def calibrate_documents(config: Config, world: World, console: Console) -> Calibration:
    """Time packs of the documents that `config` names, with its model, and fit the planner's cost to them.

    Raises:
        ValueError: the documents do not fit, are too few, or their times say nothing.
    """
    with console.progress("reading documents") as advance:
        corpus = load_corpus(config.data, config.tokenizer, limit=document_limit(config), progress=advance)
    shape = shape_of(config, corpus.tokenizer)
    lengths = corpus.train.lengths
    made = make_plan(
        lengths, options=config.plan.for_ranks(1), cost=CostModel.from_shape(shape), seed=config.train.seed
    )
    packs = [made.slots[pack] for step in _apart(made.num_steps) for pack in made.packs(step) if len(pack)]
    chosen = [packs[index].tolist() for index in _apart(len(packs))]
    if len(chosen) < 4:
        raise ValueError(
            f"{len(chosen)} packs are too few to fit a cost and to check it: give more documents, or lower"
            f" plan.capacity={config.plan.capacity}"
        )
    timer = DecoderTimer(
        shape, config.model.attention, world.device, resolve_dtype(config.train.dtype, world.device)
    )
    with console.progress("timing packs") as advance:
        told = _Counted(timer, advance)
        model = calibrate(told, shape, config.plan.capacity, made.longest, packs=chosen[::2])
        held_out = chosen[1::2]
        seconds = least_seconds(told, held_out)
    rows = [
        (len(pack), sum(pack), max(pack), measured, model.seconds(pack))
        for pack, measured in zip(held_out, seconds, strict=True)
    ]
    return Calibration(model, rows)


class _Counted:
    """A timer that tells how many packs it has timed."""

    def __init__(self, timer: DecoderTimer, advance: object) -> None:
        self._timer, self._advance, self._done = timer, advance, 0

    def __call__(self, lengths: list[int]) -> float:
        self._done += 1
        self._advance(self._done, None, "micro-batches timed")  # type: ignore[operator]
        return self._timer(lengths)


def _apart(count: int) -> list[int]:
    """At most `PACKS` numbers below `count`, evenly apart."""
    return [int(number) for number in np.unique(np.linspace(0, count - 1, min(count, PACKS)).round())]
