"""Arithmetic of pipeline parallelism: which rank holds which layers, and how long it waits. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from multipack.parallel.parallel_config import STAGES_PER_RANK, ParallelConfig, Schedule
from multipack.shapes import ModelShape


@dataclass(frozen=True)
class RankPart:
    """The part of a model on one rank of a pipeline.

    Attributes:
        layers: number of blocks.
        is_first: whether tokens are embedded on this rank.
        is_last: whether the loss is computed on this rank.
        in_flight: maximum number of micro-batches whose activations the blocks hold; a mean over blocks, and so maybe a
            fraction, if a rank has several stages.
        edge_in_flight: the same for the embedding or the loss.
    """

    layers: int
    is_first: bool = True
    is_last: bool = True
    in_flight: float = 1.0
    edge_in_flight: int = 1


def head_layers(shape: ModelShape) -> float:
    """Cost of the projection onto the vocabulary relative to a layer, by matrix elements."""
    return shape.d_model * shape.vocabulary_size / shape.layer_parameters


@cache
def split_layers(layers: int, stages: int, head: float = 0.0) -> tuple[range, ...]:
    """Split a model's layers into stages of nearly equal cost.

    Each stage gets at least one layer, and the last one the projection onto the vocabulary, which costs as much as
    `head` layers. The cost of the most expensive stage is minimal; among equally good splits the later stage gets the
    layer, because earlier stages hold more micro-batches.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if not 1 <= stages <= layers:
        raise ValueError(
            f"a pipeline of {stages} stages cannot be cut from model.layers={layers}: use at most {layers} stages"
            " (parallel.pipeline, twice that with parallel.schedule=interleaved), or more layers"
        )
    counts, extra = [1] * stages, [0.0] * (stages - 1) + [head]
    for _ in range(layers - stages):
        counts[min(range(stages), key=lambda stage: (counts[stage] + extra[stage], -stage))] += 1
    return tuple(range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True))


def stages_of_rank(rank: int, ranks: int, schedule: Schedule) -> list[int]:
    """Numbers of the stages that a rank holds: stage s is on rank s mod `ranks`."""
    return [rank + turn * ranks for turn in range(STAGES_PER_RANK if schedule == "interleaved" else 1)]


def parts_of_ranks(shape: ModelShape, config: ParallelConfig, micro_batches: int) -> list[RankPart]:
    """The part of the model on each rank along the pipeline.

    Micro-batches in flight on rank r of P: all M (gpipe); at most P − r (1f1b: Narayanan et al. 2019, PipeDream);
    with V stages per rank, 2(P − r − 1) + (V − 1)P + 1 passes of one stage each (interleaved: Narayanan et al. 2021,
    arXiv:2104.04473, §2.2), of which V make a micro-batch.
    """
    ranks, stages = config.pipeline, config.stages
    if ranks == 1:
        return [RankPart(shape.layers)]
    layers = [len(each) for each in split_layers(shape.layers, stages, head_layers(shape))]
    per_rank = stages // ranks
    parts = []
    for rank in range(ranks):
        is_first, is_last = rank == 0, rank == ranks - 1
        if config.schedule == "gpipe":
            in_flight, at_end = float(micro_batches), micro_batches
        elif config.schedule == "1f1b":
            in_flight = float(min(micro_batches, ranks - rank))
            at_end = min(micro_batches, ranks) if is_first else 1
        else:
            passes = 2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1
            in_flight = min(passes, per_rank * micro_batches) / per_rank
            at_end = min(micro_batches, ranks) if is_first else 1
        parts.append(RankPart(sum(layers[rank::ranks]), is_first, is_last, in_flight, at_end))
    return parts


def stage_imbalance(shape: ModelShape, config: ParallelConfig) -> float:
    """Cost of the most expensive stage over the mean cost of a stage, minus 1."""
    if config.pipeline == 1:
        return 0.0
    head = head_layers(shape)
    sizes = [len(each) for each in split_layers(shape.layers, config.stages, head)]
    return max(*sizes[:-1], sizes[-1] + head) * config.stages / (shape.layers + head) - 1


def bubble(config: ParallelConfig, micro_batches: int) -> float:
    """Share of a step in which a rank idles, if all stages take equally long and sending takes no time.

    (P − 1) / (V·M + P − 1), with V stages per rank and M micro-batches (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2).
    """
    ranks = config.pipeline
    return (ranks - 1) / (config.stages // ranks * micro_batches + ranks - 1)


def fit_micro_batches(config: ParallelConfig, micro_batches: int) -> int:
    """The least number of micro-batches per rank, not below `micro_batches`, that the pipeline can run.

    At least one per rank of the pipeline; for the interleaved schedule a multiple of the number of ranks.
    """
    if config.pipeline == 1:
        return micro_batches
    wanted = max(micro_batches, config.pipeline)
    if config.schedule == "interleaved":
        wanted = -(-wanted // config.pipeline) * config.pipeline
    return wanted
