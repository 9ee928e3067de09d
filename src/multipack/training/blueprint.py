"""Builds the engine of a run: how to build its model whole or in parts, its first weights, and its optimizer."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from multipack.machine import available_memory, import_extra
from multipack.models.decoder import PARALLEL_PLAN, Decoder, DecoderPart, initial_parameters
from multipack.parallel.build import Blueprint, build_engine
from multipack.parallel.engine import Engine
from multipack.parallel.mesh import Mesh
from multipack.parallel.stages import head_layers, split_layers
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.shapes import ModelShape
from multipack.training.objective import Objective
from multipack.training.optimizer import build_optimizer, freeze, parameter_options
from multipack.training.run_config import Config
from multipack.words import flatten

if TYPE_CHECKING:
    from multipack.models.kernels import Kernel
    from multipack.ops.quantized import Quantized
    from multipack.training.weights import Reader


def open_engine(
    config: Config,
    objective: Objective,
    shape: ModelShape,
    weights: Reader | None,
    mesh: Mesh,
    dtype: torch.dtype,
) -> Engine:
    """Build this rank's part of the model and its optimizer; collective. `weights` = None draws random weights."""
    kernels = kernels_of(config, shape, mesh.world.device)
    whole = _parameters(shape, config, dtype)
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
    dtypes = {name: each.dtype for name, each in whole.items() if each.dtype != torch.float32}
    if config.parallel.pipeline > 1:
        _check_first_stage(whole, config, shape)
    _check_memory(whole, config, mesh.world)
    saved = _saved(config, whole)
    initial = _initial(config, shape, weights, whole)

    def build(blocks: tuple[int, int] | None) -> nn.Module:
        if torch.get_default_device().type != "meta":  # on which no numbers are drawn
            torch.manual_seed(config.train.seed)
        part = None if blocks is None else DecoderPart(*blocks, shape.layers)
        model = objective.decoder(shape, part)
        _add_adapters(model, config, dtype)
        return model

    def prepare(model: nn.Module) -> None:
        assert isinstance(model, Decoder)
        freeze(dict(model.named_parameters()), config.optimizer, whole)
        if kernels:
            from multipack.models.kernels import MODULE, use_liger

            use_liger(model, kernels, import_module(MODULE))
        if config.train.tiles > 1 or config.train.recompute != "none":
            from multipack.models.recompute import recompute_blocks, tile_layers

            tile_layers(model, config.train.tiles)
            recompute_blocks(model, config.train.recompute)
        if config.train.compile == "true":
            from multipack.models.compile import compile_blocks

            compile_blocks(model, one_size=config.pack_slots is not None)

    return build_engine(
        Blueprint(
            build,
            shape.layers,
            shape.d_model,
            shapes,
            initial,
            PARALLEL_PLAN,
            head_layers(shape),
            prepare,
            from_main=weights is not None,
            saved=saved,
            dtypes=dtypes,
            cost=CostModel.from_shape(shape, adapter=config.adapter),
        ),
        partial(build_optimizer, config=config.optimizer, whole=whole),
        mesh,
        config.parallel,
        dtype,
        micro_batches=-(-config.plan.packs_per_step // mesh.data_size),
    )


def kernels_of(config: Config, shape: ModelShape, device: torch.device) -> list[Kernel]:
    """The operations that Liger's kernels compute, by `model.kernels`.

    Raises:
        ValueError: `model.kernels=liger`, and this run cannot use one of the kernels; the message has the reason.
        ImportError: `model.kernels=liger`, and Liger is not installed.
    """
    wanted = config.model.kernels
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return []
    from multipack.models.kernels import MODULE, problems

    found = problems(shape, flatten(asdict(config)))
    problem = f"this run is on a {device.type.upper()}" if device.type != "cuda" else ""
    if shape.architecture:
        problem = f"the code of model=hf:{shape.architecture} is that of transformers"
    if wanted == "liger":
        refused = (f"{reason} cannot be with its {kernel}" for kernel, reason in found.items() if reason)
        if reason := problem or next(refused, ""):
            raise ValueError(
                f"model.kernels=liger: {reason}; use model.kernels=auto, which takes the kernels that suit, or torch"
            )
        import_extra(MODULE, "model.kernels=liger", "liger")
    elif problem or find_spec("liger_kernel") is None:
        return []
    return [kernel for kernel, reason in found.items() if not reason]


def _check_first_stage(whole: Mapping[str, nn.Parameter], config: Config, shape: ModelShape) -> None:
    """Check that the first stage of a pipeline has trained parameters, so that gradients arrive in it."""
    parallel = config.parallel
    blocks = split_layers(shape.layers, parallel.stages, head_layers(shape))[0]
    held = ("embedding.", "positions.", *(f"blocks.{number}." for number in blocks))
    options = parameter_options(whole, config.optimizer)
    if all(each.frozen for name, each in options.items() if name.startswith(held)):
        setting = "optimizer.rules" if config.adapter.name == "none" else "adapter.targets"
        raise ValueError(
            f"{setting} freeze all that the first stage of the pipeline holds, which then has no gradients to"
            f" compute: use fewer than the {parallel.stages} stages of parallel.pipeline={parallel.pipeline}, or"
            " parallel.pipeline=1 with parallel.data=zero3"
        )


def _check_memory(whole: Mapping[str, nn.Parameter], config: Config, world: World) -> None:
    """Check that the weights of this host's ranks would fit into its memory, before any is allocated; collective."""
    parallel, free = config.parallel, available_memory()
    elements = sum(each.numel() for each in whole.values())
    parts = parallel.tensor * parallel.pipeline * parallel.divisions(world.size)["parameters"]
    names = world.gather(socket.gethostname())
    ranks = names.count(names[world.rank])
    needed = sum(each.nbytes for each in whole.values()) // parts * ranks
    allocates = torch.get_default_device().type == "cpu"  # not on the meta device, as in estimates
    if parallel.offload == "disk" and parallel.offloads_parameters:
        return  # parameters are in files
    if free is not None and needed > free and world.device.type == "cpu" and allocates:
        divide = ", or parallel.data=zero3" if parts < world.size else ""
        raise ValueError(
            f"the model has {elements:,} parameters, of which the {ranks} of {world.size} ranks on this host hold"
            f" {needed:,} bytes, and {free:,} are free: choose a smaller model=, or more hosts{divide}"
        )


def _parameters(
    shape: ModelShape, config: Config, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    """All parameters of the model on the meta device, frozen as adapters leave them; products are in `dtype`."""
    with torch.device("meta"):
        model = Decoder(shape)
    if config.adapter.name != "none":
        from multipack.ops.lora import check_adapters

        check_adapters(model, config.adapter)
    _add_adapters(model, config, dtype)
    return dict(model.named_parameters())


def _add_adapters(model: nn.Module, config: Config, dtype: torch.dtype) -> None:
    """Put the adapters of the settings, if there are any, beside the matrices of a model, which are frozen."""
    if config.adapter.name != "none":
        from multipack.ops.lora import add_adapters

        add_adapters(model, config.adapter, dtype)


def _saved(config: Config, whole: Mapping[str, nn.Parameter]) -> frozenset[str] | None:
    """Names of the parameters that checkpoints hold; None = all."""
    if config.adapter.name == "none":
        return None
    return frozenset(name for name, parameter in whole.items() if parameter.requires_grad)


def _initial(
    config: Config, shape: ModelShape, weights: Reader | None, whole: Mapping[str, nn.Parameter]
) -> Callable[[str, torch.device], Tensor]:
    """(name, device) → the initial value of a parameter; adapters are drawn, and frozen matrices quantized."""
    drawn, seed = initial_parameters(shape, config.train.seed), config.train.seed

    def read(name: str, device: torch.device) -> Tensor:
        return drawn(name, device) if weights is None else weights(name)

    if config.adapter.name == "none":
        return read
    from multipack.ops.lora import initial_adapter, is_adapter, quantize
    from multipack.ops.quantized import part_names, whole_name

    @lru_cache(maxsize=1)  # its parts follow each other
    def quantized(name: str, device: torch.device) -> Quantized:
        return quantize(read(name, device).to(device), config.adapter)

    def value(name: str, device: torch.device) -> Tensor:
        if (original := whole_name(name, whole)) is not None:
            return quantized(original, device).part(name)
        if not is_adapter(name):
            return read(name, device)
        weight = f"{name.rpartition('.')[0]}.weight"

        def matrix() -> Tensor:
            if part_names(weight)[0] in whole:
                return quantized(weight, device).to(torch.float32)
            return read(weight, device).to(whole[weight].dtype)

        return initial_adapter(name, tuple(whole[name].shape), seed, matrix)

    return value
