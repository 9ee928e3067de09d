"""Bytes that ranks exchange in a step: counted as they are handed to collectives, against launch/traffic.py."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from multipack.parallel.parallel_config import ParallelConfig
from parallel_tables.ranks import Ranks
from parallel_tables.setups import filling
from parallel_tables.step import MICRO_BATCHES, SHAPE, SLOTS, formula, measure
from planning_tables.table import Table

CLOSE = 0.05


class Case(NamedTuple):
    """Processes, fields of `ParallelConfig`, and whether one document fills a pack.

    For such documents the formula of planned holds; for others it is an upper bound.
    """

    ranks: int
    words: dict[str, Any]
    long: bool = False

    @property
    def config(self) -> ParallelConfig:
        """The parallelism."""
        return ParallelConfig(**self.words)

    @property
    def lengths(self) -> list[int]:
        """Those of the documents of a pack."""
        return [SLOTS] if self.long else filling(SLOTS, 20)

    @property
    def is_planned(self) -> bool:
        """Whether documents decide how much is sent."""
        return self.words.get("context_method") == "planned"


CASES = [
    *(Case(2, {"data": data}) for data in ("ddp", "zero1", "zero2", "zero3")),
    Case(2, {"tensor": 2}),
    Case(2, {"context": 2, "context_method": "ulysses"}),
    Case(2, {"context": 2, "context_method": "planned"}, long=True),
    Case(2, {"pipeline": 2, "schedule": "gpipe"}),
    Case(2, {"pipeline": 2}),
    Case(2, {"pipeline": 2, "schedule": "interleaved"}),
    *(Case(4, {"data": data}) for data in ("ddp", "zero1", "zero2", "zero3", "hsdp")),
    Case(4, {"tensor": 4}),
    Case(4, {"context": 4, "context_method": "ulysses"}),
    Case(4, {"context": 4, "context_method": "planned"}, long=True),
    Case(4, {"context": 4, "context_method": "planned"}),
    Case(4, {"pipeline": 4}),
    Case(4, {"data": "zero3", "tensor": 2}),
    Case(4, {"data": "zero3", "pipeline": 2}),
]


def table(quick: bool) -> Table:
    """Counted bytes over those of the formula, for every method."""
    made = Table(
        "traffic",
        f"bytes sent in a step by the rank that sends most: {SHAPE.layers} layers, width {SHAPE.d_model},"
        f" {MICRO_BATCHES} packs of {SLOTS} slots for each data-parallel rank, fp32",
        dict.fromkeys(("parallel.…", "ranks", "calls"), "")
        | {"counted": ",", "formula": ",", "counted / formula": ".3f", "worst collective": ".3f"},
    )
    worst = 0.0
    for size in (2,) if quick else (2, 4):
        with Ranks(size) as ranks:
            for case in (each for each in CASES if each.ranks == size):
                steps = measure(case.config, ranks, case.lengths)
                busiest = max(steps, key=lambda step: step.sent.total())
                row = compared(case, busiest.calls, busiest.sent)
                made.row(*row)
                if case.long or not case.is_planned:
                    worst = max(worst, abs(row[5] - 1), abs(row[6] - 1))
    made.at_most("traffic: counted bytes off the formula, worst method and kind", worst, CLOSE, ".1%")
    made.notes += [
        "counted: the payload of all collectives of a step, including norms for clipping. calls: of the collectives in"
        " the formula",
        "planned: only documents that ranks divide are sent. The formula is exact for one document per pack, and an"
        " upper bound otherwise",
    ]
    return made


def compared(case: Case, calls: Counter[str], sent: Counter[str]) -> list[Any]:
    """A row: counted calls and bytes beside the formula."""
    expected = formula(case.config, case.ranks)
    ratios = [sent[kind] / expected[kind] for kind in expected]
    named = ", ".join(f"{calls[kind]} {kind.replace('_', '-')}" for kind in expected)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    total = sent.total()
    title = " ".join(f"{name}={value}" for name, value in case.words.items())
    title += case.is_planned * f", {'one document per pack' if case.long else 'short documents'}"
    return [title, case.ranks, named, total, expected.total(), total / expected.total(), worst]
