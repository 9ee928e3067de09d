"""OpenChat V1 on eight ranks: the table of multipack's README, for every way of ending an epoch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multipack.integrations.multipack_v2 import (
    InterleavedSampler,
    MultipackDistributedBatchSampler,
    MultipackDistributedBatchSampler_LinearAttention,
)
from multipack.planning import report as measure
from multipack.planning.cost import CostModel
from multipack.planning.plan import Plan, plan
from multipack.planning.report import kappa
from planning_tables.lengths import ABSENT, Integers, load
from planning_tables.table import MEASURED, PUBLISHED, Table, cpu_seconds, missing

RANKS, CAPACITY = 8, 32_768
PEER = "LightBinPack ogbfd"


@dataclass(frozen=True)
class Epochs:
    """What some epochs reached: means over epochs, and the worst."""

    steps: int
    efficiency: float
    utilization: float
    cost_utilization: float
    lag_mean: float
    lag_max: float
    dropped: float
    spread: float | None
    milliseconds: float


def dealt(made: Plan) -> list[list[Integers]]:
    """Each step's packs, one a rank."""
    return [list(made.deal(step, RANKS)) for step in range(made.num_steps)]


def of_steps(steps: Sequence[Sequence[Integers]], lengths: Integers) -> dict[str, float | None]:
    """The project's measures of steps that are lists of packs, as samplers and peers give them."""
    costs = CostModel.from_shape().cost(lengths)

    def loads(values: Integers) -> Integers:
        return np.array([[int(values[pack].sum()) for pack in step] for step in steps], dtype=np.int64)

    tokens, lags = loads(lengths), measure.spread(loads(lengths * lengths))
    documents = [np.concatenate(step) for step in steps]
    means = np.array([lengths[each].mean() for each in documents])
    sizes = np.array([len(each) for each in documents])
    used = lengths[np.concatenate(documents)]
    expected = float(used.var(ddof=1)) * float((1 / sizes - 1 / len(used)).sum())
    return {
        "steps": len(steps),
        "efficiency": measure.efficiency(int(tokens.sum()), len(steps), RANKS, CAPACITY),
        "utilization": measure.utilization(tokens),
        "cost_utilization": measure.utilization(loads(costs)),
        "lag_mean": float(np.sqrt(lags.mean())),
        "lag_max": float(np.sqrt(lags.max())),
        "dropped": 1 - int(tokens.sum()) / int(lengths.sum()),
        "spread": float(np.sqrt(((means - used.mean()) ** 2).sum() / expected)) if len(steps) > 1 else None,
    }


def summarize(epochs: list[dict[str, Any]], seconds: list[float]) -> Epochs:
    """Means over epochs; of lag and steps also the worst."""

    def mean(name: str) -> float:
        return float(statistics.mean(each[name] for each in epochs))

    spreads = [each["spread"] for each in epochs if each["spread"] is not None]
    return Epochs(
        steps=max(each["steps"] for each in epochs),
        efficiency=mean("efficiency"),
        utilization=mean("utilization"),
        cost_utilization=mean("cost_utilization"),
        lag_mean=mean("lag_mean"),
        lag_max=max(each["lag_max"] for each in epochs),
        dropped=mean("dropped"),
        spread=statistics.mean(spreads) if spreads else None,
        milliseconds=1e3 * statistics.mean(seconds),
    )


def planned(lengths: Integers, epochs: int, repeats: int, **options: Any) -> Epochs:
    """Plan epochs by themselves, each dealt to all ranks."""
    found, seconds = [], []
    for epoch in range(epochs):

        def whole(epoch: int = epoch) -> list[list[Integers]]:
            made = plan(lengths, capacity=CAPACITY, packs_per_step=RANKS, window=1, epoch=epoch, **options)
            return dealt(made)

        spent, steps = cpu_seconds(whole, repeats)
        found.append(of_steps(steps, lengths))
        seconds.append(spent)
    return summarize(found, seconds)


def queued(lengths: Integers, epochs: int, **options: Any) -> tuple[dict[str, Any], int, int]:
    """Epochs that carry what fills no step: measures of all as one queue; documents lost; documents waiting."""
    carried: Integers = np.empty(0, dtype=np.int64)
    steps: list[list[Integers]] = []
    seconds = 0.0
    for epoch in range(epochs):

        def whole(epoch: int = epoch, carried: Integers = carried) -> tuple[Plan, list[list[Integers]]]:
            made = plan(
                lengths,
                capacity=CAPACITY,
                packs_per_step=RANKS,
                window=1,
                epoch=epoch,
                tail="carry",
                carried=carried,
                **options,
            )
            return made, dealt(made)

        spent, (made, more) = cpu_seconds(whole, 1)
        seconds += spent
        steps += more
        carried = made.carried
    trained = np.bincount(np.concatenate([np.concatenate(step) for step in steps]), minlength=len(lengths))
    waiting = np.bincount(carried, minlength=len(lengths))
    lost = int(np.abs(trained + waiting - epochs).sum())
    return of_steps(steps, lengths) | {"seconds": seconds / epochs}, lost, len(carried)


def sampled(lengths: Integers, epochs: int, make: Callable[[int], Any]) -> Epochs:
    """Batches of samplers, one a rank; the time is all ranks' together, as each does all of the work."""
    samplers = [make(rank) for rank in range(RANKS)]
    found, seconds = [], []
    for epoch in range(epochs):

        def whole(epoch: int = epoch) -> list[list[Integers]]:
            for sampler in samplers:
                sampler.set_epoch(epoch)
            return [list(sampler) for sampler in samplers]

        spent, ranks = cpu_seconds(whole, 1)
        found.append(of_steps(list(zip(*ranks, strict=True)), lengths))
        seconds.append(spent)
    return summarize(found, seconds)


def table(quick: bool) -> Table:
    """Every tail and balance, ten epochs, beside multipack V2's own figures."""
    made = Table(
        "openchat",
        f"OpenChat V1, {RANKS} ranks × {CAPACITY:,} tokens, window 1; means over {2 if quick else 10} epochs",
        {
            "": "",
            "source": "",
            "steps": ",",
            "efficiency": "%",
            "utilization": "%",
            "cost utilization": "%",
            "L² lag": ".1f",
            "its max": ".0f",
            "dropped tokens": "%",
            "spread": ".2f",
            "CPU ms an epoch, all ranks": ".1f",
        },
    )
    readme = (
        ("multipack V2, quadratic", 37, 0.9816, 0.9970, 0.9971, 438, 717, 0.0),
        ("multipack V2, linear", 36, 0.9964, 0.9964, 0.9922, 6500, 6761, 0.0124),
        ("interleaved", 48, 0.7567, 0.9679, 0.9677, 1914, 2000, 0.0),
    )
    for name, steps, efficiency, used, cost, lag, most, dropped in readme:
        made.row(name, PUBLISHED, steps, efficiency, used, cost, lag, most, dropped, None, None)
    lengths = load("openchat_v1")
    if lengths is None:
        made.notes.append(ABSENT)
        return made
    epochs, repeats = (2, 1) if quick else (10, 3)
    planned(lengths, 1, 1, balance="joint")  # compiles
    rows: dict[str, Epochs] = {}
    for tail in ("keep", "drop"):
        for balance in ("cost", "joint", "tokens"):
            rows[f"{tail}, {balance}"] = planned(lengths, epochs, repeats, tail=tail, balance=balance)
    rows["drop-in sampler"] = sampled(
        lengths, epochs, lambda rank: MultipackDistributedBatchSampler(CAPACITY, lengths, RANKS, rank)
    )
    rows["drop-in linear sampler"] = sampled(
        lengths,
        epochs,
        lambda rank: MultipackDistributedBatchSampler_LinearAttention(CAPACITY, lengths, RANKS, rank),
    )
    rows["interleaved sampler"] = sampled(
        lengths, epochs, lambda rank: InterleavedSampler(lengths, CAPACITY // 2048, RANKS, rank)
    )
    rows.update(_peer(lengths, made))
    for name, each in rows.items():
        made.row(
            name,
            MEASURED,
            each.steps,
            each.efficiency,
            each.utilization,
            each.cost_utilization,
            each.lag_mean,
            each.lag_max,
            each.dropped,
            each.spread,
            each.milliseconds,
        )
    _carry(lengths, epochs, made)
    _ask(made, rows, lengths)
    return made


def _peer(lengths: Integers, made: Table) -> dict[str, Epochs]:
    """LightBinPack's grouped best fit, which makes steps too: not random, and the same in every epoch."""
    absent = missing("lightbinpack")
    if absent:
        made.notes.append(absent)
        return {}
    import lightbinpack

    values = lengths.tolist()
    seconds, groups = cpu_seconds(lambda: lightbinpack.ogbfd(values, CAPACITY, RANKS))
    steps = [[np.array(pack, dtype=np.int64) for pack in group] for group in groups]
    return {PEER: summarize([of_steps(steps, lengths)], [seconds])}


def _carry(lengths: Integers, epochs: int, made: Table) -> None:
    for balance in ("cost", "joint"):
        found, lost, waiting = queued(lengths, epochs, balance=balance)
        made.row(
            f"carry, {balance}: {epochs} epochs as one",
            MEASURED,
            found["steps"],
            found["efficiency"],
            found["utilization"],
            found["cost_utilization"],
            found["lag_mean"],
            found["lag_max"],
            0.0,
            found["spread"],
            1e3 * found["seconds"],
        )
        made.notes.append(f"carry, {balance}: {waiting} documents wait for the next epoch, {lost} are lost")
        if balance == "joint":
            made.at_least("OpenChat carry, joint: efficiency", found["efficiency"], 0.9993, "%")
            made.at_most("OpenChat carry, joint: lost documents", lost, 0)


def _ask(made: Table, rows: dict[str, Epochs], lengths: Integers) -> None:
    keep, drop = rows["keep, joint"], rows["drop, joint"]
    made.at_most("OpenChat keep, joint: steps", keep.steps, 37)
    made.at_most("OpenChat keep, joint: dropped tokens", keep.dropped, 0.0, "%")
    made.at_least("OpenChat keep, joint: utilization", keep.utilization, 0.9998, "%")
    made.at_least("OpenChat keep, joint: cost utilization", keep.cost_utilization, 0.9998, "%")
    made.at_most("OpenChat keep, joint: L² lag", keep.lag_mean, 110, ".1f")
    made.at_most("OpenChat keep, joint: CPU ms an epoch", keep.milliseconds, 50, ".1f")
    made.at_most("OpenChat drop, joint: steps", drop.steps, 36)
    made.at_least("OpenChat drop, joint: efficiency", drop.efficiency, 0.9993, "%")
    made.at_most("OpenChat drop, joint: dropped tokens", drop.dropped, 0.0096, "%")
    made.at_most("OpenChat drop, joint: L² lag", drop.lag_mean, 120, ".1f")
    costs = CostModel.from_shape().cost(lengths)
    tokens = int(lengths.sum())
    made.notes.append(
        f"{tokens:,} tokens need {-(-tokens // (RANKS * CAPACITY))} steps, and 36 leave out at least"
        f" {1 - 36 * RANKS * CAPACITY / tokens:.3%}; κ = {kappa(lengths, costs):.3f}"
    )
    made.notes.append(
        "published: README of multipack_sampler V2; cost utilization and dropped tokens of its rows were"
        " computed from the steps that its samplers give. spread: of the steps' mean lengths, over that of random"
        " steps (1 = alike). Drop-in samplers have a window of 4, and their CPU is that of eight ranks, each of"
        " which plans the epoch"
    )
