"""What a strategy costs by itself: applied to one process, against plain training."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from multipack.models.decoder import PARALLEL_PLAN
from multipack.parallel.context import divide_context
from multipack.parallel.engine import ModelEngine
from multipack.parallel.fsdp import shard, synchronizing
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ContextMethod, ParallelConfig
from multipack.parallel.pipeline import Pipeline, PipelineEngine
from multipack.parallel.replicate import replicate
from multipack.parallel.tensor import divide_tensors
from multipack.parallel.world import World
from multipack.parallel.zero1 import ShardedOptimizer
from multipack.shapes import SHAPES, ModelShape
from parallel_tables.ranks import Ranks
from parallel_tables.setups import adamw, blueprint_of, engine_of, filling, pack_of, train_step
from planning_tables.table import Table

Maker = Callable[[World, ModelShape], ModelEngine]


def table(quick: bool) -> Table:
    """CPU seconds of a step under each strategy over those of plain training."""
    slots, rounds = (256, 3) if quick else (2048, 7)
    shape = SHAPES["small"].with_vocabulary(2048)
    made = Table(
        "overhead",
        f"every strategy in a process group of one, applied in full: the same decoder, packs of {slots:,} slots,"
        f" CPU seconds, medians of {rounds} rounds in turns",
        {"strategy": "", "CPU seconds a step": ".3f", "over plain": ".3f", "least": ".3f", "most": ".3f"},
    )
    with Ranks(1) as ranks:
        ((found),) = ranks.run(measure, shape, slots, rounds)
    for name, seconds in found.items():
        ratios = [own / plain for own, plain in zip(seconds, found["plain"], strict=True)]
        made.row(name, median(seconds), median(ratios), min(ratios), max(ratios))
    made.notes.append("`plain, again` is plain training a second time: how far equal work differs here")
    made.notes.append(
        "tensor and pipeline parallelism come with FSDP2's groups of one rank, and context parallelism with DDP, as in"
        " a run"
    )
    return made


def measure(
    world: World, kept: dict[str, Any], shape: ModelShape, slots: int, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds of each round's step, by strategy; every strategy once a round."""
    pack = pack_of(filling(slots, 300), slots, shape.vocabulary_size)
    engines = {name: make(world, shape) for name, make in STRATEGIES.items()}
    for engine in engines.values():
        train_step(engine, [pack], 1)
    found: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.process_time()
            train_step(engines[name], [pack], 1)
            found[name].append(time.process_time() - began)
    return found


def plain(world: World, shape: ModelShape) -> ModelEngine:
    """No strategy."""
    return engine_of(world, shape)


def sharded(config: ParallelConfig, world: World, shape: ModelShape) -> ModelEngine:
    """Shards of one rank, which the engine applies as to any number."""
    return engine_of(world, shape, config)


def replicated(world: World, shape: ModelShape, divided: bool = False) -> ModelEngine:
    """DDP, and an optimizer that ranks divide."""
    mesh, blueprint = build_mesh(ParallelConfig(), world), blueprint_of(shape)
    model = blueprint.build(None)
    axis, named = mesh.axis("dp_replicate"), dict(model.named_parameters())
    factory = partial(adamw, blueprint.shapes)
    optimizer = ShardedOptimizer(factory, named, axis) if divided else factory(named)
    call = replicate(model, axis)
    return ModelEngine([model], optimizer, mesh, call=call, synchronizing=synchronizing(call))


def tensors(world: World, shape: ModelShape) -> ModelEngine:
    """All matrices divided among one rank, and groups of one shard around them."""
    mesh, blueprint = build_mesh(ParallelConfig(), world), blueprint_of(shape)
    model = blueprint.build(None)
    divide_tensors(model, mesh.axis("tp"), PARALLEL_PLAN)
    shard(model, mesh.axis("dp_replicate", "dp_shard"), reshard=True)
    optimizer = adamw(blueprint.shapes, dict(model.named_parameters()))
    return ModelEngine([model], optimizer, mesh, synchronizing=synchronizing(model))


def tokens(method: ContextMethod, world: World, shape: ModelShape) -> ModelEngine:
    """The tokens of every pack divided among one rank."""
    mesh, blueprint = build_mesh(ParallelConfig(), world), blueprint_of(shape)
    model = blueprint.build(None)
    share = divide_context(model, init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)), method)
    optimizer = adamw(blueprint.shapes, dict(model.named_parameters()))
    call = replicate(model, mesh.axis("dp_replicate"))
    return ModelEngine([model], optimizer, mesh, call=call, share=share, synchronizing=synchronizing(call))


def stages(world: World, shape: ModelShape) -> ModelEngine:
    """A pipeline of one stage, sharded in groups of one."""
    mesh, blueprint = build_mesh(ParallelConfig(), world), blueprint_of(shape)
    model = blueprint.build((0, shape.layers))
    shard(model, mesh.axis("dp_replicate", "dp_shard"), reshard=True)
    pipeline = Pipeline([model], mesh.axis("pp"), "1f1b", 1, width=shape.d_model)
    return PipelineEngine(pipeline, adamw(blueprint.shapes, pipeline.parameters), mesh)


STRATEGIES: dict[str, Maker] = {
    "plain": plain,
    "plain, again": plain,
    "ddp": replicated,
    "zero1": partial(replicated, divided=True),
    "zero2": partial(sharded, ParallelConfig(data="zero2")),
    "zero3": partial(sharded, ParallelConfig(data="zero3")),
    "hsdp": partial(sharded, ParallelConfig(data="hsdp", replicate=1)),
    "tensor": tensors,
    "context, ulysses": partial(tokens, "ulysses"),
    "context, ring": partial(tokens, "ring"),
    "pipeline, 1f1b": stages,
}
"""Name → engine. The engine of a run applies no strategy to an axis of one rank; here each is applied."""
