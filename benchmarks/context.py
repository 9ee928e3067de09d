"""Context parallelism by cost, simulated: one step of a supervised mix with long documents over 64 to 1,024 ranks.

    python benchmarks/context.py            64, 256 and 1,024 ranks; about two minutes
    python benchmarks/context.py --quick    64 ranks

A step has 8,192 slots a rank. A ring, Ulysses and auto (the cheaper one of placed documents and Ulysses for each pack)
have groups just large enough for the longest document, and their packs are dealt to the groups by cost. Documents
placed on all ranks share one group (`parallel.context` = ranks). Costs are those of Llama 3 8B, counted and not timed;
links as `advise` assumes them, without overlap: 300 GB/s inside groups of 8, 40 GB/s in larger ones, 400 TFLOP/s.
Results go to results/context.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: CPU seconds of one thread

import time

import numpy as np
from numpy.typing import NDArray

from multipack.planning.cost import CostModel
from multipack.planning.placement import Placement, Prices, head_tail, place
from multipack.planning.plan import plan
from multipack.shapes import SHAPES
from planning_tables.command import Suite
from planning_tables.table import Table

Integers = NDArray[np.int64]

SHAPE, SLOTS = SHAPES["llama-8b"], 8192
COST = CostModel.from_shape(SHAPE)
MIXES = [(0.0011, 16_384, 65_536), (0.02, 16_384, 65_536), (0.001, 65_536, 131_072), (0.02, 65_536, 131_072)]
"""Share of long documents, and their shortest and longest; the others are lognormal (6.5, 1.0), at most 8,192."""
FLOPS_PER_BYTE = {True: 400e12 / 300e9, False: 400e12 / 40e9}
"""Whether ranks are in one host of 8 → FLOPs while a byte is sent."""


def mix(slots: int, share: float, shortest: int, longest: int, seed: int) -> Integers:
    """Lengths of documents that fill these slots."""
    draw, lengths, left = np.random.default_rng(seed), list[int](), slots
    while left:
        long = draw.random() < share
        length = draw.integers(shortest, longest + 1) if long else min(draw.lognormal(6.5, 1.0), 8192)
        lengths.append(min(max(int(length), 8), left))
        left -= lengths[-1]
    return draw.permutation(lengths)


def prices(ranks: int) -> Prices:
    """What exchange costs among so many ranks."""
    return Prices.of(SHAPE, ranks, flops_per_byte=FLOPS_PER_BYTE[ranks <= 8])


def grouped(lengths: Integers, ranks: int, group: int) -> dict[str, tuple[float, float, float]]:
    """(cost, cost with bytes, keys a token) of ring, Ulysses and auto in groups; costs over a rank's mean."""
    slots = SLOTS + SLOTS // 50  # so that whole documents fit into full packs
    made = plan(lengths, capacity=group * slots, packs_per_step=ranks // group, cost=COST)
    mean, price = COST.cost(lengths).sum() / ranks, prices(group)
    found: dict[str, list[tuple[float, float, int]]] = {"ring": [], "Ulysses": [], "auto": []}
    for pack in made.deal(0, made.packs_per_step):
        own = lengths[pack]
        if not len(own):
            continue
        even = COST.cost(own).sum() / group
        sends = (price.token or 0) * int(own.sum()) // group
        ring = head_tail(own, group, slots)
        planned = place(own, COST, group, slots, price)
        ways = {"ring": placed(ring, price), "Ulysses": (even, even + sends, 0)}
        ways["auto"] = min(placed(planned, price), ways["Ulysses"], key=lambda way: way[1])
        for name, way in ways.items():
            found[name].append(way)
    total = int(lengths.sum())
    return {
        name: (
            max(cost for cost, *_ in rows) / mean,
            max(both for _, both, _ in rows) / mean,
            sum(keys for *_, keys in rows) / total,
        )
        for name, rows in found.items()
        if name != "Ulysses" or price.token is not None
    }


def placed(placement: Placement, price: Prices) -> tuple[float, float, int]:
    """(cost, cost with bytes, keys sent) of a placement."""
    return int(placement.costs(COST).max()), placement.slowest(COST, price), int(placement.sent.sum())


def table(quick: bool) -> Table:
    """Cost of the slowest rank over the mean, for every method, number of ranks and mix."""
    made = Table(
        "context",
        "one step, 8,192 slots a rank: slowest rank over the mean, cost alone and with what is sent; keys sent a token",
        {"long documents": "", "ranks": ",", "method": "", "cost": ".3f", "with bytes": ".3f", "keys": ".2f"}
        | {"seconds": ".2f"},
    )
    worst = {"all": 0.0, "auto": 0.0}
    place([300, 20, 10], COST, 4, 90)  # compiles
    for ranks in (64,) if quick else (64, 256, 1024):
        for share, shortest, longest in MIXES:
            lengths = mix(ranks * SLOTS, share, shortest, longest, seed=ranks)
            name, group = f"{share:.2%} of {shortest:,} to {longest:,}", -(-longest // SLOTS)
            mean = int(COST.cost(lengths).sum()) / ranks
            ways = grouped(lengths, ranks, group)
            others = min(both for method, (_, both, _) in ways.items() if method != "auto")
            worst["auto"] = max(worst["auto"], ways["auto"][1] / others)
            for method, (cost, both, keys) in ways.items():
                made.row(name, ranks, f"{method}, groups of {group}", cost, both, keys, 0.0)
            free, dear = Prices(), prices(ranks)
            for price, aim in ((free, "balance"), (dear, "time")):
                began = time.process_time()
                found = place(lengths, COST, ranks, SLOTS, price)
                seconds = time.process_time() - began
                cost, both, keys = placed(found, dear)
                title = f"placed on all, for {aim}"
                made.row(name, ranks, title, cost / mean, both / mean, keys / lengths.sum(), seconds)
                if aim == "balance":
                    worst["all"] = max(worst["all"], cost / mean)
    made.at_most("context: placed on all ranks", worst["all"], 1.10, ".3f")
    made.at_most(
        "context: auto over the better of a ring and Ulysses, with bytes", worst["auto"], 1.003, ".3f"
    )
    made.notes += [
        "for balance: bytes are free; for time: bytes have the price of the links",
        "groups of a ring and of Ulysses hold the longest document; their packs are dealt to groups by cost",
        "seconds: CPU time of one placement",
    ]
    return made


SUITE = Suite(
    "context", {"context": table}, lambda machine: f"Counted on {machine['cpu']}.", "parallel/context"
)

if __name__ == "__main__":
    SUITE.main(__doc__)
