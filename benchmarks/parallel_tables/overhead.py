"""The cost of each strategy applied to one process, relative to plain training."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any, cast

from torch.distributed.device_mesh import init_device_mesh

from multipack.models.decoder import PARALLEL_PLAN
from multipack.parallel.build import replicate
from multipack.parallel.context import divide_context
from multipack.parallel.engine import ModelEngine, Share
from multipack.parallel.fsdp import shard
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ContextMethod, ParallelConfig
from multipack.parallel.pipeline import PipelineEngine
from multipack.parallel.tensor import divide_tensors
from multipack.parallel.world import World
from multipack.parallel.zero1 import ShardedOptimizer
from multipack.planning.cost import CostModel
from multipack.shapes import SHAPES, ModelShape
from parallel_tables.ranks import Ranks
from parallel_tables.setups import adamw, blueprint_of, engine_of, filling, pack_of, train_step
from planning_tables.table import Table
from result import by_turns


def table(quick: bool) -> Table:
    """CPU seconds of a step under each strategy over those of plain training."""
    slots, rounds = (256, 3) if quick else (2048, 7)
    shape = SHAPES["small"].with_vocabulary(2048)
    made = Table(
        "overhead",
        f"every strategy in a process group of one, applied in full: the same decoder, packs of {slots:,} slots,"
        f" CPU seconds, medians of {rounds} alternating rounds",
        {"strategy": "", "CPU seconds per step": ".3f", "over plain": ".3f", "least": ".3f", "most": ".3f"},
    )
    with Ranks(1) as ranks:
        ((found),) = ranks.run(measure, shape, slots, rounds)
    for name, seconds in found.items():
        ratios = [own / plain for own, plain in zip(seconds, found["plain"], strict=True)]
        made.row(name, median(seconds), median(ratios), min(ratios), max(ratios))
    made.notes += [
        "`plain, again` is plain training a second time, which shows the error of the measurement",
        "tensor and pipeline parallelism include FSDP2 with groups of one rank, and context parallelism includes DDP,"
        " as in a run",
    ]
    return made


def measure(
    world: World, kept: dict[str, Any], shape: ModelShape, slots: int, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds of each round's step, by strategy; every strategy once a round."""
    pack = pack_of(filling(slots, 300), slots, shape.vocabulary_size)
    engines = {name: engine_with(name, world, shape) for name in STRATEGIES}
    return by_turns(
        {name: partial(train_step, engine, [pack], 1) for name, engine in engines.items()}, rounds
    )


def engine_with(name: str, world: World, shape: ModelShape) -> ModelEngine:
    """An engine with this strategy applied; the engine of a run applies none to an axis of one rank."""
    if name.startswith("plain"):
        return engine_of(world, shape)
    if name in SHARDED:
        return engine_of(world, shape, SHARDED[name])
    mesh, blueprint = build_mesh(ParallelConfig(), world), blueprint_of(shape)
    model = blueprint.build((0, shape.layers) if name.startswith("pipeline") else None)
    share: Share = lambda batch: batch  # noqa: E731
    if name.startswith("context"):
        method = cast("ContextMethod", name.removeprefix("context, "))
        placing = ParallelConfig(context_method=method).placing(CostModel.from_shape(shape), 4)
        share = divide_context(model, init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)), placing)
    if name == "tensor":
        divide_tensors(model, mesh.axis("tp"), PARALLEL_PLAN)
    call = model
    if name == "tensor" or name.startswith("pipeline"):
        shard(model, mesh.axis("dp_replicate", "dp_shard"), reshard=True)
    else:
        call = replicate(model, mesh.axis("dp_replicate"))
    named, factory = dict(model.named_parameters()), partial(adamw, blueprint.shapes)
    if name.startswith("pipeline"):
        return PipelineEngine(
            [model], factory(named), mesh, schedule="1f1b", micro_batches=1, width=shape.d_model
        )
    axis = mesh.axis("dp_replicate")
    optimizer = ShardedOptimizer(factory, named, axis) if name == "zero1" else factory(named)
    return ModelEngine([model], optimizer, mesh, call=call, share=share)


SHARDED = {
    "zero2": ParallelConfig(data="zero2"),
    "zero3": ParallelConfig(data="zero3"),
    "hsdp": ParallelConfig(data="hsdp", replicate=1),
}
STRATEGIES = (
    *("plain", "plain, again", "ddp", "zero1", *SHARDED),
    *("tensor", "context, ulysses", "context, planned", "pipeline, 1f1b"),
)
