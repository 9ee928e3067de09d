"""Builds a model and its engine on every rank: the only place that knows the order in which strategies are applied.

    Blueprint ─▶ tensor ▸ context ▸ prepare (checkpointing, compilation) ▸ FSDP2 ▸ weights ▸ DDP ▸ optimizer (ZeRO 1)
                └ in a pipeline: each stage of this rank, in the same way

A strategy is a function applied to an untouched model. To add one, write its file, add its settings and the things that
it divides to parallel_config.py, and give it a place here, where it is imported if a run uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from multipack.parallel.engine import ModelEngine, Share, whole_pack
from multipack.parallel.fsdp import shard
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.stages import split_layers, stages_of_rank
from multipack.parallel.world import World
from multipack.planning.cost import CostModel

if TYPE_CHECKING:
    from multipack.parallel.mapped import MappedFiles
    from multipack.parallel.materialize import Source

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
"""This rank's parameters by name → an optimizer over them."""


@dataclass(frozen=True)
class Blueprint:
    """A description of a model for parallelism: how to build it whole or in parts, its parameters and costs.

    Attributes:
        build: (first, stop) → these blocks of the model, under their names in the whole; None → the whole model.
            Weights are arbitrary where ranks do not hold the whole: `initial` gives them.
        layers: number of blocks.
        width: width of the hidden states between blocks.
        shapes: names and shapes of all parameters.
        initial: the initial weights, see `materialize`.
        tensor_plan: pattern of module names → what tensor parallelism does with them.
        head_layers: cost of the projection onto the vocabulary, in layers.
        prepare: applied to a built module before it is sharded: activation checkpointing, compilation.
        from_main: whether rank 0 alone calls `initial`, because it reads files; the model is then built without values.
        saved: names of the parameters that the engine's state has, see `ModelEngine`; None = all.
        dtypes: name → dtype of the parameters that are not float32.
        cost: cost of documents, by which context parallelism places them.
    """

    build: Callable[[tuple[int, int] | None], nn.Module]
    layers: int
    width: int
    shapes: Mapping[str, tuple[int, ...]]
    initial: Source
    tensor_plan: Mapping[str, str]
    head_layers: float = 0.0
    prepare: Callable[[nn.Module], None] = lambda model: None
    from_main: bool = False
    saved: frozenset[str] | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    cost: CostModel = field(default_factory=CostModel.from_shape)


def build_engine(
    blueprint: Blueprint,
    optimizer: OptimizerFactory,
    mesh: Mesh,
    config: ParallelConfig,
    dtype: torch.dtype = torch.float32,
    *,
    micro_batches: int = 1,
) -> ModelEngine:
    """Build this rank's part of a model as the configuration says, and its engine; collective.

    Without a process group every strategy is plain training. A pipeline is built for this number of micro-batches per
    rank and step.

    Raises:
        ValueError: the strategies cannot be applied to this model.
    """
    files: MappedFiles | None = None
    if config.offload == "disk":
        optimizer, files = _on_disk(optimizer, config.offload_folder)
    if mesh.weights is None or (mesh.is_plain and not config.shards_parameters):
        # Every rank holds the whole model.
        with torch.device("meta") if blueprint.from_main else mesh.world.device:
            model = blueprint.build(None)
        if blueprint.from_main:
            _fill(blueprint, [model], mesh.world)
        blueprint.prepare(model)
        made = _optimizer(optimizer, dict(model.named_parameters()), mesh, config)
        call = replicate(model, mesh.axis("dp_replicate")) if mesh.world.size > 1 else model
        return ModelEngine([model], made, mesh, dtype, call=call, saved=blueprint.saved)
    built = [
        _apply_strategies(blueprint, each, mesh, config, dtype) for each in _stages(blueprint, mesh, config)
    ]
    modules, share = [module for module, _ in built], built[0][1]
    host = torch.device("cpu") if config.offloads_parameters else None
    _fill(blueprint, modules, mesh.world, host, files.empty_like if files is not None and host else None)
    parameters = {name: each for module in modules for name, each in module.named_parameters()}
    made = _optimizer(optimizer, parameters, mesh, config)
    options: dict[str, Any] = {"share": share, "shapes": blueprint.shapes, "saved": blueprint.saved}
    if mesh.sizes["pp"] == 1:
        call = modules[0] if config.uses_fsdp else replicate(modules[0], mesh.axis("dp_replicate"))
        keep = config.strategy.keeps_gathered
        return ModelEngine(modules, made, mesh, dtype, call=call, keep_gathered=keep, **options)
    from multipack.parallel.pipeline import PipelineEngine

    return PipelineEngine(
        modules,
        made,
        mesh,
        dtype,
        schedule=config.schedule,
        micro_batches=micro_batches,
        width=blueprint.width,
        hidden_dtype=dtype if config.shards_parameters else torch.float32,
        **options,
    )


def _fill(
    blueprint: Blueprint,
    modules: list[nn.Module],
    world: World,
    device: torch.device | None = None,
    empty_like: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Give modules on the meta device their initial weights; collective."""
    from multipack.parallel.materialize import materialize

    options: dict[str, Any] = {"dtypes": blueprint.dtypes, "from_main": blueprint.from_main}
    options["empty_like"] = empty_like
    materialize(modules, blueprint.initial, blueprint.shapes, world, device, **options)


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrap a model in DDP: rank 0's parameters everywhere, gradients averaged in the last backward pass of a step.

    Gradients are views of DDP's reduction buckets, which exist from the first step on. The result is the module to call
    in training; it shares the model's parameters.
    """
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=ids, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )


def _stages(blueprint: Blueprint, mesh: Mesh, config: ParallelConfig) -> list[tuple[int, int] | None]:
    """Blocks of each pipeline stage of this rank, as arguments of `Blueprint.build`; [None] without a pipeline."""
    if mesh.sizes["pp"] == 1:
        return [None]
    ranges = split_layers(blueprint.layers, config.stages, blueprint.head_layers)
    numbers = stages_of_rank(mesh.coordinate("pp"), mesh.sizes["pp"], config.schedule)
    return [(ranges[number].start, ranges[number].stop) for number in numbers]


def _apply_strategies(
    blueprint: Blueprint,
    blocks: tuple[int, int] | None,
    mesh: Mesh,
    config: ParallelConfig,
    dtype: torch.dtype,
) -> tuple[nn.Module, Share]:
    """The model or a stage of it on the meta device with all strategies applied, and its `Share` function."""
    with torch.device("meta"):
        model = blueprint.build(blocks)
    share: Share = whole_pack
    if mesh.sizes["tp"] > 1:
        from multipack.parallel.tensor import divide_tensors

        divide_tensors(model, mesh.axis("tp"), blueprint.tensor_plan)
    if mesh.sizes["cp"] > 1:
        from multipack.parallel.context import divide_context

        share = divide_context(model, mesh.axis("cp"), config.placing(blueprint.cost, dtype.itemsize))
    blueprint.prepare(model)
    if config.uses_fsdp:
        # Without sharding, FSDP2's groups have one rank, and gradients are all-reduced over groups.
        in_groups = config.strategy.in_groups or not config.shards_parameters
        shard(
            model,
            mesh.axis("dp_replicate", "dp_shard") if in_groups else mesh.axis("dp_shard"),
            reshard=not config.strategy.keeps_gathered,
            dtype=dtype if config.shards_parameters else torch.float32,
            offload=config.offloads_parameters,
            pin=config.offload == "cpu",
        )
    return model, share


def _on_disk(factory: OptimizerFactory, folder: str) -> tuple[OptimizerFactory, MappedFiles]:
    """The same optimizers with their states in files of a folder, and the files."""
    from multipack.parallel.mapped import MappedFiles, MappedOptimizer

    files = MappedFiles(folder)
    return lambda parameters: MappedOptimizer(factory(parameters), files), files


def _optimizer(
    factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter], mesh: Mesh, config: ParallelConfig
) -> torch.optim.Optimizer:
    if config.strategy.divides_optimizer and mesh.weights is not None and mesh.world.size > 1:
        from multipack.parallel.zero1 import ShardedOptimizer

        return ShardedOptimizer(factory, parameters, mesh.axis("dp_replicate"))
    return factory(parameters)
