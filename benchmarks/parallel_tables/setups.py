"""What the tables train: decoders, packs, and how an engine is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import nn

from multipack.data.packs.batch import PackedBatch
from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import PARALLEL_PLAN, Decoder, DecoderPart, initial_parameters
from multipack.parallel.build import Blueprint, build_engine
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.world import World
from multipack.shapes import ModelShape
from multipack.training.optimizer import build_optimizer, meta_parameters
from multipack.training.settings import OptimizerConfig


def blueprint_of(shape: ModelShape) -> Blueprint:
    """The decoder as parallelism asks for it, its weights drawn from seed 0."""
    with torch.device("meta"):
        shapes = {name: tuple(each.shape) for name, each in Decoder(shape).named_parameters()}

    def build(blocks: tuple[int, int] | None) -> nn.Module:
        torch.manual_seed(0)
        return Decoder(shape, part=None if blocks is None else DecoderPart(*blocks, shape.layers))

    initial = initial_parameters(shape, 0)
    return Blueprint(build, shape.layers, shape.d_model, shapes, initial, PARALLEL_PLAN, 1.0)


def adamw(
    shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW as a run has it."""
    return build_optimizer(parameters, OptimizerConfig(lr=1e-3), meta_parameters(shapes))


def engine_of(
    world: World, shape: ModelShape, config: ParallelConfig | None = None, micro_batches: int = 1
) -> ModelEngine:
    """The engine of a run with these strategies; without a configuration this process trains alone."""
    blueprint = blueprint_of(shape)
    mesh = Mesh(World()) if config is None else build_mesh(config, world)
    factory = partial(adamw, blueprint.shapes)
    return build_engine(blueprint, factory, mesh, config or ParallelConfig(), micro_batches=micro_batches)


def pack_of(lengths: list[int], slots: int, vocabulary: int, seed: int = 0) -> PackedBatch:
    """Documents of these lengths and of random tokens, padded to a number of slots."""
    draw = np.random.default_rng(seed)
    documents = [
        Document(draw.integers(0, vocabulary, length).astype(np.uint32), np.array([[0, length]]))
        for length in lengths
    ]
    return PackedCollator(max_documents=len(lengths) + 1, max_seqlen=slots, pad_to=slots)(documents)


def filling(slots: int, mean: float, seed: int = 0) -> list[int]:
    """Lognormal lengths that fill exactly a number of slots."""
    draw, lengths = np.random.default_rng(seed), []
    while (left := slots - sum(lengths)) > 0:
        lengths.append(int(np.clip(draw.lognormal(np.log(mean) - 0.32, 0.8), 2, max(slots // 2, 2))))
        if lengths[-1] > left - 2:
            lengths[-1] = left
    return lengths


def train_step(engine: ModelEngine, packs: list[PackedBatch], ranks: int) -> None:
    """A whole step: gradients, clipping, optimizer."""
    engine.forward_backward(packs, ranks * sum(pack.num_target_tokens for pack in packs))
    engine.clip(1.0)
    engine.step(1e-3)
