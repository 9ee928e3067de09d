"""Predicted bytes that ranks exchange in a step.

One of n ranks in a collective over S bytes (the whole, after gathering or before scattering) sends at least

    all-reduce  2·S·(n − 1)/n      all-gather, reduce-scatter, broadcast, all-to-all  S·(n − 1)/n      send  S

(Thakur et al. 2005, Optimization of collective communication operations in MPICH, §4; all-to-all: S of one rank).
docs/parallel/ describes what each method exchanges. Activation checkpointing repeats the exchanges of the forward
pass, except for results that are not read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from multipack.launch.held import FLOAT32, outside_held
from multipack.launch.memory_model import Workload
from multipack.parallel.stages import RankPart, parts_of_ranks
from multipack.planning.placement import key_bytes, token_bytes


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends in a step for one purpose.

    Attributes:
        method: `data`, `tensor`, `context` or `pipeline`.
        kind: name of the collective, or `send`.
        ranks: number of ranks that take part.
        reach: number of consecutive ranks that contain these ranks; if a host holds all of them, its links are used.
        payload: bytes of all calls, of whole tensors: before scattering, or after gathering.
    """

    method: str
    kind: str
    ranks: int
    reach: int
    payload: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        if self.kind == "send":
            return self.payload
        times = 2 if self.kind == "all_reduce" else 1
        return times * self.payload * (self.ranks - 1) // self.ranks


def communication(work: Workload) -> list[Traffic]:
    """Return the traffic of the rank that sends most; empty for one rank."""
    found = []
    for part in parts_of_ranks(work.shape, work.config, work.micro_batches):
        rows = [*_data(work, part), *_tensor(work, part), *_context(work, part), *_pipeline(work, part)]
        found.append([row for row in rows if row.ranks > 1 and row.payload])
    return max(found, key=lambda rows: sum(row.sent for row in rows))


def _data(work: Workload, part: RankPart) -> Iterator[Traffic]:
    config, micro_batches = work.config, work.micro_batches
    divided = config.divisions(work.world_size)
    blocks, outside = work.block * part.layers, outside_held(work.shape, part, work.adapter, config.tensor)
    gradients = round(FLOAT32 * (blocks + outside).trained)
    if not config.shards_parameters:
        ranks = divided["replicas"]
        yield Traffic("data", "all_reduce", ranks, ranks * config.tensor, gradients)
        if config.strategy.divides_optimizer:  # new values of parameters have the size of gradients
            yield Traffic("data", "broadcast", ranks, ranks * config.tensor, gradients)
        return
    # Blocks are gathered for the forward and for the backward pass; zero2 and pipelines keep gathered parameters.
    reductions, block_gathers, outside_gathers = micro_batches, 2 * micro_batches, micro_batches
    if config.pipeline > 1:
        reductions, block_gathers, outside_gathers = 1, micro_batches + 1, 1
    if config.strategy.keeps_gathered:
        block_gathers = outside_gathers = 1
    shards, groups = divided["parameters"], divided["replicas"]
    reach = shards * config.tensor
    gathered = (blocks * block_gathers + outside * outside_gathers).size(work.product, work.product)
    yield Traffic("data", "all_gather", shards, reach, gathered)
    yield Traffic("data", "reduce_scatter", shards, reach, reductions * gradients)
    yield Traffic("data", "all_reduce", groups, groups * reach, gradients // shards)


def _tensor(work: Workload, part: RankPart) -> Iterator[Traffic]:
    ranks, hidden = work.config.tensor, work.slots * work.shape.d_model
    for kind in ("all_gather", "reduce_scatter"):
        # Checkpointing repeats both exchanges of the forward pass, the second reduce-scatter only before dropout.
        again = 2 if kind == "all_gather" or work.shape.dropout else 1
        calls = part.layers * (4 + (again if work.recompute != "none" else 0)) + part.is_last
        size = calls * work.product + part.is_first * work.stream
        yield Traffic("tensor", kind, ranks, ranks, work.micro_batches * hidden * size)


def _context(work: Workload, part: RankPart) -> Iterator[Traffic]:
    shape, config, ranks = work.shape, work.config, work.config.context
    if ranks == 1:
        return
    again, placed, slots = work.recompute != "none", work.placed, work.tokens // ranks
    ulysses = config.resolved(shape).context_method == "ulysses"
    calls, reach = work.micro_batches * part.layers / shape.layers, ranks * config.tensor
    exchanged = placed.exchanged if placed else float(ulysses)
    # One document: the rank with its middle sends all its tokens to all others, and needs half of theirs.
    all_others = slots * (ranks - 1)
    sent, received = (placed.sent, placed.received) if placed else (all_others, all_others / 2)
    if exchanged:
        # `token_bytes` leaves out what stays, as `Traffic.sent` does. Recomputing repeats the forward half.
        each = token_bytes(shape, ranks, config.tensor, work.product) * ranks / (ranks - 1)
        times = exchanged * slots * (1.5 if again else 1)
        yield Traffic("context", "all_to_all", ranks, reach, round(calls * times * each))
    if exchanged < 1:  # keys and values forward and backward, and the gradients of received ones
        each = key_bytes(shape, config.tensor, work.product)
        times = sent * (3 if again else 2) + received
        yield Traffic("context", "send", ranks, reach, round(calls * times * each))


def _pipeline(work: Workload, part: RankPart) -> Iterator[Traffic]:
    config = work.config
    hidden = work.slots // config.tensor * work.shape.d_model * work.stream
    inner = work.world_size // config.pipeline
    # The last stage sends no hidden states, and the first stage no gradients.
    sends = (2 * config.stages // config.pipeline - part.is_first - part.is_last) * work.micro_batches
    yield Traffic("pipeline", "send", config.pipeline, config.pipeline * inner, sends * hidden)
