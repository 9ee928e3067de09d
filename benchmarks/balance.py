"""`multipack.balance` beside the Karmarkar-Karp method: time, balance and the limit of tokens, on rollouts.

    python benchmarks/balance.py            both tables, about two minutes
    python benchmarks/balance.py --quick    fewer rollouts and ranks, for a look

The differencing method (Karmarkar and Karp 1982; in several parts: Korf 2009, "Multi-way number partitioning", §2.4) is
what verl, OpenRLHF and slime balance with. Here it is written anew and plainly in Python and numpy; it is no peer's
code. Both ways divide the same costs: 24,576·l + l², verl's workload. CPU seconds of one thread, the least of several
calls, after compilation. Results go to results/balance.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: CPU seconds of one thread

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from multipack.planning.balance import balance
from multipack.planning.cost import CostModel
from planning_tables.command import Suite
from planning_tables.lengths import load, lognormal
from planning_tables.table import Table, cpu_seconds

Integers = NDArray[np.int64]

WORKLOAD = CostModel(None, linear=24_575)
"""24,576·l + l²."""


def karmarkar_karp(weights: Integers, parts: int, equal: bool = False) -> list[list[int]]:
    """Divide weights into parts by the largest differencing method: parts may be empty, or all have `equal` numbers.

    A state is a division of some weights, sums in falling order. The two states of the largest differences between
    their largest and smallest sum are joined, the largest sums of one with the smallest of the other, until one
    is left. A state begins as one weight, or, for `equal` numbers, as one weight in each part.
    """
    states = []
    by_weight = np.argsort(-weights, kind="stable")
    for group in by_weight.reshape(-1, parts if equal else 1).tolist():
        sums = np.zeros(parts, dtype=np.int64)
        sums[: len(group)] = weights[group]
        items = [[number] for number in group] + [[] for _ in range(parts - len(group))]
        states.append((int(sums[-1] - sums[0]), len(states), sums, items))
    heapq.heapify(states)
    count = len(states)
    while len(states) > 1:
        (_, _, sums, items), (_, _, other, more) = heapq.heappop(states), heapq.heappop(states)
        joined = sums + other[::-1]
        order = np.argsort(-joined, kind="stable")
        joined = joined[order]
        both = [mine + theirs for mine, theirs in zip(items, reversed(more), strict=True)]
        count += 1
        heapq.heappush(states, (int(joined[-1] - joined[0]), count, joined, [both[part] for part in order]))
    return states[0][3]


def rollouts(count: int) -> Iterator[tuple[str, Integers]]:
    """Lengths of a step's rollouts: drawn, and of GSM8K's answers where they are at hand."""
    rng = np.random.default_rng(0)
    yield "lognormal (6.5, 1.0), at most 32,768", lognormal(count, 6.5, 1.0, 32_768)
    yield "uniform 1 to 8,192", rng.integers(1, 8193, count)
    prompts, answers = rng.integers(50, 400, -(-count // 8)), lognormal(count, 6.0, 0.6, 16_384, seed=1)
    yield "groups of 8 on one prompt", np.repeat(prompts, 8)[:count] + answers
    real = load("gsm8k_train")
    if real is not None:
        yield "GSM8K (real)", rng.choice(real, count)


def over_mean(parts: list[list[int]], costs: Integers) -> float:
    """The largest sum of a part over the mean."""
    sums = [int(costs[part].sum()) for part in parts]
    return max(sums) * len(sums) / sum(sums)


def ranks_table(quick: bool) -> Table:
    """Rollouts divided among ranks, without a limit."""
    columns = {
        "rollouts": "",
        "ranks": ",",
        "KK ms": ",.0f",
        "KK max/mean": ".6f",
        "ours ms": ".1f",
        "ours max/mean": ".6f",
        "proven least": ".6f",
    }
    count = 1024 if quick else 8192
    made = Table("ranks", f"{count:,} rollouts on ranks, one micro-batch each", columns)
    slowest, farthest = 0.0, 0.0
    for name, lengths in rollouts(count):
        costs = WORKLOAD.cost(lengths)
        for ranks in (8, 64) if quick else (8, 64, 512):
            balance(lengths, ranks, budget=None, cost=WORKLOAD)  # compiled
            seconds, ours = cpu_seconds(lambda: balance(lengths, ranks, budget=None, cost=WORKLOAD), 40)  # noqa: B023
            theirs, parts = cpu_seconds(lambda: karmarkar_karp(costs, ranks), 1)  # noqa: B023
            reached, least = ours.max_over_mean, ours.least_max_over_mean
            made.row(name, ranks, 1e3 * theirs, over_mean(parts, costs), 1e3 * seconds, reached, least)
            slowest, farthest = max(slowest, 1e3 * seconds), max(farthest, reached / max(least, 1.0001))
    made.at_most(f"CPU ms, {count:,} rollouts, up to {ranks} ranks", slowest, 10, ".1f")
    made.at_most("max over mean, over the larger of 1.0001 and the proven least", farthest, 1, ".6f")
    return made


def budget_table(quick: bool) -> Table:
    """Micro-batches under a limit of tokens."""
    columns = {
        "rollouts": "",
        "budget": ",",
        "KK micro-batches": ",",
        "over the budget": ",",
        "fullest": ".3f",
        "ours": ",",
        "least": ",",
        "ours over": ",",
        "ours max/mean": ".6f",
        "ours ms": ".1f",
    }
    count, ranks = (1024, 8) if quick else (8192, 64)
    made = Table(
        "budget", f"{count:,} rollouts on {ranks} ranks, micro-batches under a limit of tokens", columns
    )
    made.notes.append(
        "Karmarkar-Karp divides into ⌈tokens / budget⌉ parts, as verl does; fullest: tokens over budget"
    )
    over = 0
    for name, lengths in rollouts(count):
        budget = max(int(lengths.max()), 16_384)
        number = -(-int(lengths.sum()) // budget)
        parts = karmarkar_karp(WORKLOAD.cost(lengths), number)
        held = np.array([lengths[part].sum() for part in parts])
        balance(lengths, ranks, budget=budget, cost=WORKLOAD)
        seconds, ours = cpu_seconds(lambda: balance(lengths, ranks, budget=budget, cost=WORKLOAD), 5)  # noqa: B023
        wrong = int((ours.packs.totals(lengths) > budget).sum())
        over += wrong
        made.row(
            *(name, budget, number, int((held > budget).sum()), held.max() / budget),
            *(ranks * ours.micro_batches, ranks * ours.least_micro_batches, wrong),
            *(ours.max_over_mean, 1e3 * seconds),
        )
    made.at_most("micro-batches over the budget", over, 0)
    return made


SUITE = Suite(
    "balance",
    {"ranks": ranks_table, "budget": budget_table},
    lambda machine: f"Measured on {machine['cpu']}, one thread.",
)

if __name__ == "__main__":
    SUITE.main(__doc__)
