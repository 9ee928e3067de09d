"""OpenChat V1 on eight ranks: the table of multipack's README, for every way of ending an epoch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multipack.integrations.multipack_v2 import (
    InterleavedSampler,
    MultipackDistributedBatchSampler,
    MultipackDistributedBatchSampler_LinearAttention,
)
from multipack.planning import report as measure
from multipack.planning.cost import CostModel
from multipack.planning.plan import plan
from multipack.planning.report import kappa
from packing.epoch import Epoch, flat
from packing.measure import loads_of, spread
from planning_tables.lengths import ABSENT, Integers, load
from planning_tables.table import MEASURED, PUBLISHED, Table, cpu_seconds

RANKS, CAPACITY = 8, 32_768
COLUMNS = {
    "": "", "source": "", "steps": ",", "efficiency": "%", "utilization": "%", "cost utilization": "%",
    "L² lag": ".1f", "its max": ".0f", "dropped tokens": "%", "spread": ".2f", "CPU ms an epoch, all ranks": ".1f",
}  # fmt: skip
README = (
    ("multipack V2, quadratic", 37, 0.9816, 0.9970, 0.9971, 438, 717, 0.0),
    ("multipack V2, linear", 36, 0.9964, 0.9964, 0.9922, 6500, 6761, 0.0124),
    ("interleaved", 48, 0.7567, 0.9679, 0.9677, 1914, 2000, 0.0),
)
Steps = Sequence[Sequence[Any]]
"""The packs of each step, one a rank: lists or arrays of document numbers."""


def measures(steps: Steps, lengths: Integers) -> dict[str, Any]:
    """The project's measures of an epoch, in the order of the columns."""
    epoch = Epoch(*flat(pack for step in steps for pack in step))

    def loads(value: Callable[[Integers], Integers]) -> Integers:
        return loads_of(epoch, lengths, value).reshape(-1, RANKS)

    tokens, lags = loads(lambda lengths: lengths), measure.spread(loads(np.square))
    return {
        "steps": len(steps),
        "efficiency": measure.efficiency(int(tokens.sum()), len(steps), RANKS, CAPACITY),
        "utilization": measure.utilization(tokens),
        "cost_utilization": measure.utilization(loads(CostModel.from_shape().cost)),
        "lag_mean": float(np.sqrt(lags.mean())),
        "lag_max": float(np.sqrt(lags.max())),
        "dropped": 1 - int(tokens.sum()) / int(lengths.sum()),
        "spread": spread(epoch, lengths, RANKS),
    }


def epochs_of(
    make: Callable[[int], Steps], lengths: Integers, epochs: int, repeats: int = 1
) -> dict[str, Any]:
    """Means over epochs, with CPU milliseconds of an epoch; of steps and the largest lag the maximum."""
    found = []
    for epoch in range(epochs):
        seconds, steps = cpu_seconds(lambda epoch=epoch: make(epoch), repeats)
        found.append(measures(steps, lengths) | {"milliseconds": 1e3 * seconds})
    worst = {name: max(each[name] for each in found) for name in ("steps", "lag_max")}
    return {name: float(statistics.mean(each[name] for each in found)) for name in found[0]} | worst


def planner(lengths: Integers, **options: Any) -> Callable[[int], Steps]:
    """Plans of single epochs, dealt to all ranks."""

    def make(epoch: int) -> Steps:
        made = plan(lengths, capacity=CAPACITY, packs_per_step=RANKS, window=1, epoch=epoch, **options)
        return [list(made.deal(step, RANKS)) for step in range(made.num_steps)]

    return make


class Carrying:
    """Epochs that carry what fills no step into the next; counts how often each document is trained."""

    def __init__(self, lengths: Integers, balance: str) -> None:
        self.lengths, self.balance = lengths, balance
        self.carried = np.empty(0, dtype=np.int64)
        self.times = np.zeros(len(lengths), dtype=np.int64)

    def __call__(self, epoch: int) -> Steps:
        """The steps of an epoch."""
        options: Any = {"capacity": CAPACITY, "packs_per_step": RANKS, "window": 1, "balance": self.balance}
        made = plan(self.lengths, epoch=epoch, tail="carry", carried=self.carried, **options)
        self.carried = made.carried
        self.times += np.bincount(made.order, minlength=len(self.lengths))
        return [list(made.deal(step, RANKS)) for step in range(made.num_steps)]

    def lost(self, epochs: int) -> int:
        """Documents that were trained too rarely or too often, those that wait not counted."""
        waiting = np.bincount(self.carried, minlength=len(self.lengths))
        return int(np.abs(self.times + waiting - epochs).sum())


def sampled(make: Callable[[int], Any]) -> Callable[[int], Steps]:
    """Batches of samplers, one a rank; the time is that of all ranks, as each does all of the work."""
    samplers = [make(rank) for rank in range(RANKS)]

    def epoch_of(epoch: int) -> Steps:
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return list(zip(*map(list, samplers), strict=True))

    return epoch_of


def table(quick: bool) -> Table:
    """Every tail and balance, ten epochs, beside multipack V2's own figures."""
    epochs, repeats = (2, 1) if quick else (10, 3)
    title = f"OpenChat V1, {RANKS} ranks × {CAPACITY:,} tokens, window 1; means over {epochs} epochs"
    made = Table("openchat", title, COLUMNS)
    for name, *values in README:
        made.row(name, PUBLISHED, *values, None, None)
    lengths = load("openchat_v1")
    if lengths is None:
        made.notes.append(ABSENT)
        return made
    planner(lengths, balance="joint")(0)  # compiles
    rows: dict[str, dict[str, Any]] = {}
    for tail in ("keep", "drop"):
        for balance in ("cost", "joint", "tokens"):
            make = planner(lengths, tail=tail, balance=balance)
            rows[f"{tail}, {balance}"] = epochs_of(make, lengths, epochs, repeats)
    carrying = {balance: Carrying(lengths, balance) for balance in ("cost", "joint")}
    for balance, carry in carrying.items():
        found = epochs_of(carry, lengths, epochs)
        rows[f"carry, {balance}"] = found | {"dropped": carry.lost(epochs) / (epochs * len(lengths))}
        made.notes.append(f"carry, {balance}: {len(carry.carried)} documents wait for the next epoch")
    for name, kind in (
        ("drop-in sampler", MultipackDistributedBatchSampler),
        ("drop-in linear sampler", MultipackDistributedBatchSampler_LinearAttention),
    ):
        make = sampled(lambda rank, kind=kind: kind(CAPACITY, lengths, RANKS, rank))
        rows[name] = epochs_of(make, lengths, epochs)
    make = sampled(lambda rank: InterleavedSampler(lengths, CAPACITY // 2048, RANKS, rank))
    rows["interleaved sampler"] = epochs_of(make, lengths, epochs)
    for name, each in rows.items():
        made.row(name, MEASURED, *each.values())
    made.at_most("OpenChat carry, joint: lost documents", carrying["joint"].lost(epochs), 0)
    _ask(made, rows, lengths)
    return made


def _ask(made: Table, rows: dict[str, dict[str, Any]], lengths: Integers) -> None:
    keep, drop, carry = (rows[f"{tail}, joint"] for tail in ("keep", "drop", "carry"))
    made.at_least("OpenChat carry, joint: efficiency", carry["efficiency"], 0.9993, "%")
    made.at_most("OpenChat keep, joint: steps", keep["steps"], 37)
    made.at_most("OpenChat keep, joint: dropped tokens", keep["dropped"], 0.0, "%")
    made.at_least("OpenChat keep, joint: utilization", keep["utilization"], 0.9998, "%")
    made.at_least("OpenChat keep, joint: cost utilization", keep["cost_utilization"], 0.9998, "%")
    made.at_most("OpenChat keep, joint: L² lag", keep["lag_mean"], 110, ".1f")
    made.at_most("OpenChat keep, joint: CPU ms an epoch", keep["milliseconds"], 50, ".1f")
    made.at_most("OpenChat drop, joint: steps", drop["steps"], 36)
    made.at_least("OpenChat drop, joint: efficiency", drop["efficiency"], 0.9993, "%")
    made.at_most("OpenChat drop, joint: dropped tokens", drop["dropped"], 0.0096, "%")
    made.at_most("OpenChat drop, joint: L² lag", drop["lag_mean"], 120, ".1f")
    tokens = int(lengths.sum())
    made.notes.append(
        f"{tokens:,} tokens need {-(-tokens // (RANKS * CAPACITY))} steps, and 36 leave out at least"
        f" {1 - 36 * RANKS * CAPACITY / tokens:.3%}; κ = {kappa(lengths, CostModel.from_shape().cost(lengths)):.3f}"
    )
    made.notes.append(
        "published: README of multipack_sampler V2; cost utilization and dropped tokens of its rows were"
        " computed from the steps that its samplers give. spread: of the steps' mean lengths, over that of random"
        " steps (1 = random). Drop-in samplers have a window of 4, and their CPU is that of eight ranks, each of"
        " which plans the epoch"
    )
