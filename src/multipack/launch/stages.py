"""What each rank of a pipeline holds, and for how many micro-batches at a time: by arithmetic, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from multipack.parallel.config import ParallelConfig
from multipack.shapes import ModelShape


@dataclass(frozen=True)
class RankPart:
    """What a rank holds of a model.

    Attributes:
        layers: blocks.
        begins: whether tokens are embedded here.
        ends: whether the loss is computed here.
        in_flight: micro-batches whose activations all of these blocks hold at a time; a fraction where a rank's stages
            hold different ones.
        ends_in_flight: those that the embedding or the loss hold.
    """

    layers: int
    begins: bool = True
    ends: bool = True
    in_flight: float = 1.0
    ends_in_flight: int = 1


def head_layers(shape: ModelShape) -> float:
    """What the projection onto the vocabulary costs, in layers: by matrix elements."""
    return shape.d_model * shape.vocabulary_size / shape.layer_parameters


def parts_of_ranks(shape: ModelShape, config: ParallelConfig, micro_batches: int) -> list[RankPart]:
    """What each rank along the pipeline holds.

    Micro-batches in flight on rank r of P: all M (gpipe); at most P − r (1f1b: Narayanan et al. 2019, PipeDream);
    with V stages a rank, 2(P − r − 1) + (V − 1)P + 1 passes of one stage each (interleaved: Narayanan et al. 2021,
    arXiv:2104.04473, §2.2), that is a V-th of it in micro-batches.
    """
    ranks, stages = config.pipeline, config.stages
    if ranks == 1:
        return [RankPart(shape.layers)]
    layers = layers_of_stages(shape.layers, stages, head_layers(shape))
    a_rank = stages // ranks
    parts = []
    for rank in range(ranks):
        begins, ends = rank == 0, rank == ranks - 1
        if config.schedule == "gpipe":
            in_flight, at_end = float(micro_batches), micro_batches
        elif config.schedule == "1f1b":
            in_flight = float(min(micro_batches, ranks - rank))
            at_end = min(micro_batches, ranks) if begins else 1
        else:
            passes = 2 * (ranks - rank - 1) + (a_rank - 1) * ranks + 1
            in_flight = min(passes, a_rank * micro_batches) / a_rank
            at_end = min(micro_batches, ranks) if begins else 1
        parts.append(RankPart(sum(layers[rank::ranks]), begins, ends, in_flight, at_end))
    return parts


@cache
def layers_of_stages(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Blocks of each stage: as even as can be, where the last one's head counts as `head` blocks.

    As `parallel.pipeline.split_layers` cuts them: where stages would be equally good, the later one gets the block.
    """
    sizes = [1] * stages
    for _ in range(layers - stages):
        costs = [size + (head if stage == stages - 1 else 0) for stage, size in enumerate(sizes)]
        sizes[min(range(stages), key=lambda stage: (costs[stage], -stage))] += 1
    return tuple(sizes)


def imbalance(shape: ModelShape, config: ParallelConfig) -> float:
    """What the dearest stage costs over the mean stage: 1 without a pipeline."""
    if config.pipeline == 1:
        return 1.0
    head = head_layers(shape)
    sizes = layers_of_stages(shape.layers, config.stages, head)
    dearest = max(*sizes[:-1], sizes[-1] + head)
    return dearest * config.stages / (shape.layers + head)


def bubble(config: ParallelConfig, micro_batches: int) -> float:
    """Share of a step in which a rank of the pipeline idles: (P − 1) / (V·M + P − 1)."""
    ranks = config.pipeline
    return (ranks - 1) / (config.stages // ranks * micro_batches + ranks - 1)
