"""Weak scaling: the same work for every rank, on one process and on two."""

from __future__ import annotations

import time
from statistics import mean, median
from typing import Any

import torch.distributed as dist

from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.world import World
from multipack.shapes import SHAPES
from parallel_tables.ranks import Ranks
from parallel_tables.setups import engine_of, filling, pack_of, train_step
from planning_tables.table import Table

PROCESSES = 2
WAYS: dict[str, ParallelConfig | None] = {
    "one process": None,
    "no communication": None,
    "ddp": ParallelConfig(),
    "zero3": ParallelConfig(data="zero3"),
}
"""Row → parallelism. In the first row the other process sleeps; in both first rows none communicates."""


def table(quick: bool) -> Table:
    """Step times of two processes over those of one."""
    slots, rounds, steps = (512, 3, 1) if quick else (4096, 7, 2)
    shape = SHAPES["small"].with_vocabulary(2048)
    made = Table(
        "scaling",
        f"weak scaling over {PROCESSES} processes of one thread: a decoder of {shape.layers} layers, width"
        f" {shape.d_model}, fp32, a pack of {slots:,} slots for each rank in a step; medians of {rounds} rounds",
        {"": "", "seconds per step": ".3f", "efficiency": ".1%", "over no communication": ".1%"}
        | {"CPU seconds per step": ".3f", "seconds of each round": ""},
    )
    with Ranks(PROCESSES) as ranks:
        ranks.run(prepare, shape, slots)
        for way in WAYS:
            ranks.run(timed, way, 1, only=[0] if way == "one process" else ())
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            for place in range(len(WAYS)):
                way = list(WAYS)[(turn + place) % len(WAYS)]
                found[way].append(_round(ranks, way, steps))
    walls = {way: [wall for wall, _ in spent] for way, spent in found.items()}
    for way, wall in walls.items():
        made.row(
            way,
            median(wall),
            median(one / own for one, own in zip(walls["one process"], wall, strict=True)),
            median(one / own for one, own in zip(walls["no communication"], wall, strict=True)),
            median(cpu for _, cpu in found[way]),
            " ".join(f"{seconds:.2f}" for seconds in wall),
        )
    made.notes += [
        "one process: each process while the other sleeps. no communication: both processes compute at the same time;"
        " the difference is the machine's own loss (memory bandwidth, caches, clock)",
        "a step takes as long as its slower rank; efficiency is the time of one process over it, for each round. CPU"
        " seconds are those of one process, without waiting",
    ]
    return made


def prepare(world: World, kept: dict[str, Any], shape: Any, slots: int) -> None:
    """Make the engines, and this rank's pack: ranks have documents of the same lengths and different tokens."""
    kept["pack"] = pack_of(filling(slots, 300), slots, shape.vocabulary_size, seed=world.rank)
    plain = engine_of(world, shape)
    kept["engines"] = {
        way: plain if config is None else engine_of(world, shape, config) for way, config in WAYS.items()
    }


def timed(world: World, kept: dict[str, Any], way: str, steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of a step on this rank; ranks begin together, except in `one process`."""
    engine, together = kept["engines"][way], 1 if WAYS[way] is None else world.size
    if way != "one process":
        dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        train_step(engine, [kept["pack"]], together)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def _round(ranks: Ranks, way: str, steps: int) -> tuple[float, float]:
    """One measurement: the slower rank; for `one process` the mean of the ranks, measured one after the other."""
    if way == "one process":
        each = [ranks.run(timed, way, steps, only=[rank])[0] for rank in range(ranks.size)]
    else:
        each = ranks.run(timed, way, steps)
    walls, cpus = zip(*each, strict=True)
    return (mean if way == "one process" else max)(walls), mean(cpus)
