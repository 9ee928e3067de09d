"""One `Engine` for the trainer, whatever the strategy: the only place that knows the order in which they are applied.

    Blueprint ─ build ─▶ tensors ▸ tokens ▸ prepare (recompute, compile) ▸ shards or replicas ▸ weights ▸ optimizer
                └ in a pipeline: a part for each stage of this rank, all the same way

A strategy is a function applied to an untouched model, and the trainer's loop has no branch on any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multipack.parallel.base import StepResult, forget
from multipack.parallel.context import divide_context
from multipack.parallel.loop import LoopEngine
from multipack.parallel.materialize import materialize
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.replicate import clear, replicate
from multipack.parallel.shard import shard, synchronizing
from multipack.parallel.stages import split_layers, stages_of_rank
from multipack.parallel.state import Source, State
from multipack.parallel.tensor import divide_tensors
from multipack.parallel.world import World
from multipack.parallel.zero1 import ShardedOptimizer

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
"""Named parameters, those of this rank, → their optimizer."""


class Engine(Protocol):
    """What the trainer's loop needs: pipelines, shards and plain loops look alike behind it."""

    mesh: Mesh
    """The ranks."""
    modules: list[nn.Module]
    """What this rank holds of the model: one module, or its stages of a pipeline."""
    overflowed: bool
    """Whether the gradient of this step left fp16's range, so that the step cannot be applied."""
    parameters: dict[str, nn.Parameter]
    """What this rank holds of the model's parameters, by name."""
    shapes: dict[str, tuple[int, ...]]
    """Names and whole shapes of all of them."""

    @property
    def world(self) -> World:
        """All ranks."""
        ...

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by until `unscale`."""
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        denominator: float,
        watch: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Accumulate the gradient of the summed loss divided by `denominator`."""
        ...

    def evaluate(self, micro_batches: Sequence[Any]) -> list[float]:
        """This rank's shares of summed losses, in evaluation mode and without gradients."""
        ...

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """What this rank holds of the model in evaluation mode, without gradients, in the run's precision."""
        ...

    def gathered(self) -> AbstractContextManager[nn.Module | None]:
        """The whole model on rank 0, likewise; None elsewhere."""
        ...

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole values of all parameters, one after the other, on every rank."""
        ...

    def unscale(self) -> None:
        """Make the accumulated gradient what it is without `loss_scale`."""
        ...

    def squared_norms(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """The squared norm of each of the model's tensors, of which this rank holds these."""
        ...

    def clip(self, max_norm: float) -> float:
        """Clip by the global norm; return that norm."""
        ...

    def step(self, learning_rate: float) -> None:
        """Apply the optimizer and clear the gradient."""
        ...

    def discard(self) -> None:
        """Clear the gradient without applying it."""
        ...

    def state(self) -> State:
        """Named live tensors of model and optimizer, as far as this rank holds them."""
        ...

    def load_state(self, state: Source | Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over saved tensors, on any mesh."""
        ...


@dataclass(frozen=True)
class Blueprint:
    """What parallelism has to know of a model, and how to make it.

    Attributes:
        build: (first, stop) → these blocks of it, under their names in the whole; None → the whole. Weights may be
            anything: `initial` fills them where ranks do not hold the whole.
        layers: blocks of the whole.
        width: of the hidden states between them.
        shapes: names and shapes of its parameters.
        initial: names and whole values of its first weights, one at a time; asked of rank 0 alone.
        tensor_plan: pattern of names → what tensor parallelism does with them.
        head_layers: what the projection onto the vocabulary costs, in layers.
        prepare: done to what was built before it is sharded: activation checkpointing, compilation.
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
) -> Engine:
    """Build a model on this rank as the configuration says, and its engine; collective.

    Args:
        blueprint: the model.
        optimizer: makes the optimizer of this rank's parameters.
        mesh: the ranks; one without a device mesh is a single process, for which every strategy is plain training.
        config: the strategies.
        dtype: of forward passes.
        micro_batches: of every rank in a step, which a pipeline is built for.
        clock: seconds.
    """
    if mesh.weights is None or (mesh.is_plain and not config.shards_parameters):
        model = blueprint.build(None).to(mesh.world.device)
        blueprint.prepare(model)
        made = _optimizer(optimizer, dict(model.named_parameters()), mesh, config)
        return plain_engine(model, made, mesh, dtype, clock)
    if mesh.sizes["pp"] == 1:
        return _looping_engine(blueprint, optimizer, mesh, config, dtype, clock)
    return _pipeline_engine(blueprint, optimizer, mesh, config, dtype, micro_batches, clock)


def plain_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    clock: Callable[[], float] = time.perf_counter,
) -> LoopEngine:
    """The engine of one process, or of replicas: every rank holds the whole model, with rank 0's weights.

    Args:
        model: takes a batch, returns the summed loss over its targets.
        optimizer: over its parameters.
        mesh: the ranks.
        dtype: of forward passes.
        clock: seconds.
    """
    call = model
    if mesh.world.size > 1:
        call = replicate(model, mesh.axis("dp_replicate"))
    return LoopEngine(
        model,
        optimizer,
        mesh,
        dtype,
        call=call,
        synchronizing=synchronizing(call),
        clear=forget if call is model else clear,
        clock=clock,
    )


def _looping_engine(
    blueprint: Blueprint,
    optimizer: OptimizerFactory,
    mesh: Mesh,
    config: ParallelConfig,
    dtype: torch.dtype,
    clock: Callable[[], float],
) -> Engine:
    """Ranks hold a shard of all layers: built without memory, filled from rank 0."""
    model, share = _divided(blueprint, None, mesh, config, dtype)
    materialize([model], blueprint.initial, blueprint.shapes, mesh.world, _home(mesh, config))
    call = model if _is_sharded(mesh, config) else replicate(model, mesh.axis("dp_replicate"))
    return LoopEngine(
        model,
        _optimizer(optimizer, dict(model.named_parameters()), mesh, config),
        mesh,
        dtype,
        call=call,
        share=share,
        synchronizing=synchronizing(call, keep=config.data == "zero2"),
        clear=forget if call is model else clear,
        shapes=blueprint.shapes,
        whole=lambda: blueprint.build(None),
        clock=clock,
    )


def _pipeline_engine(
    blueprint: Blueprint,
    optimizer: OptimizerFactory,
    mesh: Mesh,
    config: ParallelConfig,
    dtype: torch.dtype,
    micro_batches: int,
    clock: Callable[[], float],
) -> Engine:
    """Ranks hold stages of the model, each of which may be divided and sharded as a whole model is."""
    # Only here: torch's pipelining imports its compiler, which no other run should wait for.
    from multipack.parallel.pipeline import Pipeline
    from multipack.parallel.pipelined import PipelineEngine

    ranges = split_layers(blueprint.layers, config.stages, blueprint.head_layers)
    numbers = stages_of_rank(mesh.coordinate("pp"), mesh.sizes["pp"], config.schedule)
    blocks = [(ranges[number].start, ranges[number].stop) for number in numbers]
    made = [_divided(blueprint, each, mesh, config, dtype) for each in blocks]
    stages, share = [stage for stage, _ in made], made[0][1]
    materialize(stages, blueprint.initial, blueprint.shapes, mesh.world, _home(mesh, config))
    trained = any(each.requires_grad for each in stages[0].parameters())
    if mesh.world.sum([float(0 in numbers and not trained)])[0]:
        raise frozen_stage(config)
    narrow = config.shards_parameters and dtype != torch.float32
    pipeline = Pipeline(
        stages,
        mesh.axis("pp"),
        config.schedule,
        micro_batches,
        width=blueprint.width,
        dtype=dtype if narrow else torch.float32,
        tensor_ranks=mesh.sizes["tp"],
        device=mesh.world.device,
        clock=clock,
    )
    return PipelineEngine(
        stages,
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
    """What is said of a pipeline that could not send gradients back to its first stage."""
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
) -> tuple[nn.Module, Callable[[Any], Any] | None]:
    """The model or a stage of it, on the meta device, all strategies applied; and how to take this rank's tokens."""
    with torch.device("meta"):
        model = blueprint.build(blocks)
    share = None
    if mesh.sizes["tp"] > 1:
        divide_tensors(model, mesh.axis("tp"), blueprint.tensor_plan)
    if mesh.sizes["cp"] > 1:
        share = divide_context(model, mesh.axis("cp"), config.context_method)
    blueprint.prepare(model)
    if _is_sharded(mesh, config):
        groups = ("dp_replicate",) if config.data == "hsdp" or not config.shards_parameters else ()
        shard(
            model,
            mesh.axis(*groups, "dp_shard"),
            reshard=config.data != "zero2",
            dtype=dtype if config.shards_parameters else torch.float32,
            offload=config.offload == "cpu",
        )
    return model, share


def _is_sharded(mesh: Mesh, config: ParallelConfig) -> bool:
    """Whether FSDP2 does the data-parallel part: beside tensors and stages, where DDP cannot, with shards of one."""
    return config.shards_parameters or mesh.sizes["tp"] > 1 or mesh.sizes["pp"] > 1


def _home(mesh: Mesh, config: ParallelConfig) -> torch.device:
    """Where parameters live between steps."""
    return torch.device("cpu") if config.offload == "cpu" else mesh.world.device


def _optimizer(
    factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter], mesh: Mesh, config: ParallelConfig
) -> torch.optim.Optimizer:
    if config.data == "zero1" and mesh.weights is not None and mesh.world.size > 1:
        return ShardedOptimizer(factory, parameters, mesh.axis("dp_replicate"))
    return factory(parameters)
