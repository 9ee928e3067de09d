"""Builds a model and its engine on every rank: the only place that knows the order in which strategies are applied.

    Blueprint ─▶ tensors ▸ context ▸ prepare (checkpointing, compilation) ▸ shards or replicas ▸ weights ▸ optimizer
                └ in a pipeline: a module for each stage of this rank, in the same way

A strategy is a function applied to an untouched model. To add one: its file, its settings and what it divides in
parallel_config.py, and its place here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multipack.parallel.context import divide_context
from multipack.parallel.engine import ModelEngine, Share
from multipack.parallel.fsdp import shard, synchronizing
from multipack.parallel.materialize import materialize
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.replicate import replicate, zero_gradients
from multipack.parallel.stages import split_layers, stages_of_rank
from multipack.parallel.tensor import divide_tensors
from multipack.parallel.zero1 import ShardedOptimizer

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
"""This rank's parameters by name → an optimizer over them."""


@dataclass(frozen=True)
class Blueprint:
    """What parallelism needs to know of a model, and how to build it.

    Attributes:
        build: (first, stop) → these blocks of the model, under their names in the whole; None → the whole model.
            Weights are arbitrary where ranks do not hold the whole: `initial` fills them.
        layers: number of blocks.
        width: of the hidden states between blocks.
        shapes: names and shapes of all parameters.
        initial: names and whole values of the first weights, one at a time; called on rank 0 alone.
        tensor_plan: pattern of module names → what tensor parallelism does with them.
        head_layers: cost of the projection onto the vocabulary, in layers.
        prepare: applied to what was built, before it is sharded: activation checkpointing, compilation.
    """

    build: Callable[[tuple[int, int] | None], nn.Module]
    layers: int
    width: int
    shapes: Mapping[str, tuple[int, ...]]
    initial: Callable[[], Iterator[tuple[str, Tensor]]]
    tensor_plan: Mapping[str, str]
    head_layers: float = 0.0
    prepare: Callable[[nn.Module], None] = lambda model: None


def build_engine(
    blueprint: Blueprint,
    optimizer: OptimizerFactory,
    mesh: Mesh,
    config: ParallelConfig,
    dtype: torch.dtype = torch.float32,
    *,
    micro_batches: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> ModelEngine:
    """Build this rank's part of a model as the configuration says, and its engine; collective.

    Args:
        blueprint: the model.
        optimizer: makes the optimizer of this rank's parameters.
        mesh: the ranks; without a process group every strategy is plain training.
        config: the strategies.
        dtype: of forward passes.
        micro_batches: per rank and step; a pipeline is built for this number.
        clock: seconds.

    Raises:
        ValueError: the strategies cannot be applied to this model.
    """
    if mesh.weights is None or (mesh.is_plain and not config.shards_parameters):
        model = blueprint.build(None).to(mesh.world.device)
        blueprint.prepare(model)
        made = _optimizer(optimizer, dict(model.named_parameters()), mesh, config)
        return plain_engine(model, made, mesh, dtype, clock)
    if mesh.sizes["pp"] > 1:
        return _pipeline_engine(blueprint, optimizer, mesh, config, dtype, micro_batches, clock)
    model, share = _divided(blueprint, None, mesh, config, dtype)
    materialize([model], blueprint.initial, blueprint.shapes, mesh.world, _home(mesh, config))
    call = model if config.uses_fsdp else replicate(model, mesh.axis("dp_replicate"))
    return ModelEngine(
        [model],
        _optimizer(optimizer, dict(model.named_parameters()), mesh, config),
        mesh,
        dtype,
        share=share,
        **_calling(model, call, keep=config.strategy.keeps_gathered),
        shapes=blueprint.shapes,
        whole=lambda: blueprint.build(None),
        clock=clock,
    )


def plain_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    clock: Callable[[], float] = time.perf_counter,
) -> ModelEngine:
    """The engine of one process, or of replicas: every rank holds the whole model, with rank 0's weights.

    Args:
        model: takes a batch, returns the summed loss over its targets.
        optimizer: over its parameters.
        mesh: the ranks.
        dtype: of forward passes.
        clock: seconds.
    """
    call = replicate(model, mesh.axis("dp_replicate")) if mesh.world.size > 1 else model
    return ModelEngine([model], optimizer, mesh, dtype, **_calling(model, call), clock=clock)


def _calling(model: nn.Module, call: nn.Module, *, keep: bool = False) -> dict[str, Any]:
    """Arguments of `ModelEngine` that follow from the module to call in training: the model, or DDP's wrapper."""
    arguments: dict[str, Any] = {"call": call, "synchronizing": synchronizing(call, keep=keep)}
    return arguments if call is model else arguments | {"clear": zero_gradients}


def _pipeline_engine(
    blueprint: Blueprint,
    optimizer: OptimizerFactory,
    mesh: Mesh,
    config: ParallelConfig,
    dtype: torch.dtype,
    micro_batches: int,
    clock: Callable[[], float],
) -> ModelEngine:
    """Ranks hold stages of the model, each of which may be divided and sharded as a whole model is."""
    # Imported here: torch's pipelining imports its compiler, which other runs need not wait for.
    from multipack.parallel.pipeline import Pipeline, PipelineEngine

    ranges = split_layers(blueprint.layers, config.stages, blueprint.head_layers)
    numbers = stages_of_rank(mesh.coordinate("pp"), mesh.sizes["pp"], config.schedule)
    blocks = [(ranges[number].start, ranges[number].stop) for number in numbers]
    made = [_divided(blueprint, each, mesh, config, dtype) for each in blocks]
    stages, share = [stage for stage, _ in made], made[0][1]
    materialize(stages, blueprint.initial, blueprint.shapes, mesh.world, _home(mesh, config))
    trained = any(each.requires_grad for each in stages[0].parameters())
    if mesh.world.sum([float(0 in numbers and not trained)])[0]:
        raise frozen_stage(config)
    pipeline = Pipeline(
        stages,
        mesh.axis("pp"),
        config.schedule,
        micro_batches,
        width=blueprint.width,
        dtype=dtype if config.shards_parameters else torch.float32,
        tensor_ranks=mesh.sizes["tp"],
        device=mesh.world.device,
        clock=clock,
    )
    return PipelineEngine(
        pipeline,
        _optimizer(optimizer, pipeline.parameters, mesh, config),
        mesh,
        dtype,
        share=share,
        shapes=blueprint.shapes,
        whole=lambda: blueprint.build(None),
        clock=clock,
    )


def frozen_stage(config: ParallelConfig) -> ValueError:
    """The error of a pipeline whose first stage has no trained parameters, and so no gradients to compute."""
    return ValueError(
        "optimizer.rules freeze all that the first stage of the pipeline holds, which then has no gradients to"
        f" compute: use fewer than the {config.stages} stages of parallel.pipeline={config.pipeline}, or"
        " parallel.pipeline=1 with parallel.data=zero3"
    )


def _divided(
    blueprint: Blueprint,
    blocks: tuple[int, int] | None,
    mesh: Mesh,
    config: ParallelConfig,
    dtype: torch.dtype,
) -> tuple[nn.Module, Share]:
    """The model or a stage of it on the meta device with all strategies applied, and how to take this rank's tokens."""
    with torch.device("meta"):
        model = blueprint.build(blocks)
    share: Share = lambda batch: batch  # noqa: E731
    if mesh.sizes["tp"] > 1:
        divide_tensors(model, mesh.axis("tp"), blueprint.tensor_plan)
    if mesh.sizes["cp"] > 1:
        share = divide_context(model, mesh.axis("cp"), config.context_method)
    blueprint.prepare(model)
    if config.uses_fsdp:
        in_groups = config.strategy.in_groups or not config.shards_parameters
        shard(
            model,
            mesh.axis(*["dp_replicate"] * in_groups, "dp_shard"),
            reshard=not config.strategy.keeps_gathered,
            dtype=dtype if config.shards_parameters else torch.float32,
            offload=config.offload == "cpu",
        )
    return model, share


def _home(mesh: Mesh, config: ParallelConfig) -> torch.device:
    """Where parameters are between steps."""
    return torch.device("cpu") if config.offload == "cpu" else mesh.world.device


def _optimizer(
    factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter], mesh: Mesh, config: ParallelConfig
) -> torch.optim.Optimizer:
    if config.strategy.divides_optimizer and mesh.weights is not None and mesh.world.size > 1:
        return ShardedOptimizer(factory, parameters, mesh.axis("dp_replicate"))
    return factory(parameters)
