"""What ranks have and do, observed on real ranks: the data of pictures.py."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.parallel.collectives import all_gather_single, reduce_scatter_single
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import ParallelConfig, Schedule
from multipack.parallel.stages import split_layers
from multipack.parallel.state import local
from multipack.parallel.world import World
from multipack.shapes import ModelShape
from parallel_tables.ranks import Ranks
from parallel_tables.setups import engine_of, pack_of, train_step

BASE = 100
"""Element e of rank r has the value BASE^r in place e of a vector, so that a result shows what it is made of."""
OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather"),
    *("reduce_scatter", "gather", "scatter", "all_to_all"),
)
Element = tuple[int | None, int]
"""(rank that an element comes from, its place there); rank None = the sum over all ranks."""


def collective_results(size: int) -> dict[str, list[list[Element]]]:
    """Operation → what each rank has after it; `before` is what each has before it."""
    with Ranks(size) as ranks:
        found: dict[str, list[list[Element]]] = {
            "before": [[(rank, at) for at in range(size)] for rank in range(size)]
        }
        for operation in OPERATIONS:
            found[operation] = ranks.run(_after, operation)
    return found


def _after(world: World, operation: str) -> list[Element]:
    size = 1 if operation in ("all_gather", "gather") else world.size
    own = torch.tensor([10.0 * (world.rank + 1) + at for at in range(size)])
    result = _called(operation, own, world)
    total = [sum(10.0 * (rank + 1) + at for rank in range(world.size)) for at in range(world.size)]
    return [
        (None, total.index(value)) if value in total else (int(value) // 10 - 1, int(value) % 10)
        for value in ([] if result is None else result.tolist())
    ]


def _called(operation: str, own: Tensor, world: World) -> Tensor | None:
    """The result of a collective on this rank's tensor; None on ranks that receive nothing."""
    rank, size = world.rank, world.size
    result = own.clone()
    if operation in ("all_gather", "gather"):
        result = own.new_empty(own.numel() * size)
    elif operation in ("scatter", "reduce_scatter"):
        result = own.new_empty(own.numel() // size)
    match operation:
        case "all_reduce":
            dist.all_reduce(result)
        case "reduce":
            dist.reduce(result, 0)
        case "broadcast":
            dist.broadcast(result, 0)
        case "all_gather":
            all_gather_single(result, own)
        case "gather":
            dist.gather(own, None if rank else list(result.chunk(size)), 0)
        case "scatter":
            dist.scatter(result, None if rank else list(own.chunk(size)), 0)
        case "reduce_scatter":
            reduce_scatter_single(result, own)
        case "all_to_all":
            dist.all_to_all_single(result, own)
    return None if rank and operation in ("reduce", "gather") else result


# Matrices of a block under tensor parallelism

BLOCK = ModelShape(
    layers=1, heads=8, kv_heads=4, d_model=128, d_ff=256, context=64, vocabulary_size=256, tied=False
)
Piece = tuple[int, int, int, int]
"""(first row, first column, rows, columns) of a rank's piece."""


def pieces_of_matrices(size: int) -> dict[str, tuple[tuple[int, int], list[Piece]]]:
    """Matrix → its whole shape, and the piece of each rank under `parallel.tensor`."""
    with Ranks(size) as ranks:
        found = ranks.run(_pieces)
    return {name: (shape, [each[name][1] for each in found]) for name, (shape, _) in found[0].items()}


def _pieces(world: World) -> dict[str, tuple[tuple[int, int], Piece]]:
    engine, found = engine_of(world, BLOCK, ParallelConfig(tensor=world.size)), {}
    for name, parameter in engine.parameters.items():
        if parameter.ndim == 2:
            (rows, columns), (own_rows, own_columns) = parameter.shape, local(parameter).shape
            start = (world.rank * own_rows % rows, world.rank * own_columns % columns)
            found[name.removeprefix("blocks.0.").removesuffix(".weight")] = (
                (rows, columns),
                (*start, own_rows, own_columns),
            )
    return found


# Passes of a pipeline

DEEP = ModelShape(layers=8, heads=2, d_model=16, d_ff=32, context=64, vocabulary_size=64, tied=False)
Pass = tuple[int, int, int, bool, float, float]
"""(rank, stage, micro-batch, whether backward, start, end) in units of a forward pass of one of P equal stages."""


def passes_of_stages(size: int, micro_batches: int) -> dict[str, list[Pass]]:
    """Schedule → its passes in the order in which ranks ran them, a backward pass taking two units."""
    with Ranks(size) as ranks:
        orders = {name: ranks.run(_order, name, micro_batches) for name in get_args(Schedule)}
    return {name: timed(order, 0.5 if name == "interleaved" else 1.0) for name, order in orders.items()}


def _order(world: World, schedule: Schedule, count: int) -> list[tuple[int, int, bool]]:
    """(stage, micro-batch, whether backward) of this rank's passes in a step."""
    config = ParallelConfig(pipeline=world.size, schedule=schedule)
    engine = engine_of(world, DEEP, config, count)
    packs = [pack_of([64], 64, DEEP.vocabulary_size, seed) for seed in range(count)]
    train_step(engine, packs, 1)
    seen: list[tuple[int, int, bool]] = []

    def note(stage: int, backward: bool, *_: Any) -> None:
        number = sum((each[0], each[2]) == (stage, backward) for each in seen)
        seen.append((stage, number, backward))

    for turn, module in enumerate(engine.modules):
        stage = world.rank + turn * world.size
        module.register_forward_pre_hook(partial(note, stage, False))
        module.register_full_backward_pre_hook(partial(note, stage, True))
    train_step(engine, packs, 1)
    return seen


def timed(orders: list[list[tuple[int, int, bool]]], unit: float) -> list[Pass]:
    """When passes run, if each starts as soon as its rank is free and its input is there, and sending takes no time."""
    last = max(stage for order in orders for stage, *_ in order)
    ends: dict[tuple[int, int, bool], float] = {}
    free, waiting, found = [0.0] * len(orders), [list(order) for order in orders], []
    while any(waiting):
        before = len(found)
        for rank, queue in enumerate(waiting):
            while queue:
                stage, number, backward = queue[0]
                needs = (
                    [(stage + (1 if backward else -1), number, backward)]
                    if stage != (last if backward else 0)
                    else []
                )
                needs += [(stage, number, False)] * backward
                if any(each not in ends for each in needs):
                    break
                start = max([free[rank], *(ends[each] for each in needs)])
                free[rank] = ends[queue.pop(0)] = start + unit * (2 if backward else 1)
                found.append((rank, stage, number, backward, start, free[rank]))
        if len(found) == before:
            raise ValueError("the ranks of this schedule wait for each other")
    return found


# Places in a mesh


class Place(NamedTuple):
    """Where a rank is, and its layers."""

    stage: int
    shard: int
    tensor: int
    layers: range


def places(config: ParallelConfig, ranks: int, layers: int) -> list[Place]:
    """The place of each rank in the mesh of a configuration."""
    found, split = [], split_layers(layers, config.stages)
    for rank in range(ranks):
        at = Mesh(World(rank, ranks), config.axes(ranks)).coordinate
        found.append(Place(at("pp"), at("dp_shard"), at("tp"), split[at("pp")]))
    return found
