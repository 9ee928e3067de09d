"""Bytes that ranks exchange in a step: predicted from a `ModelShape` and a `ParallelConfig`, without torch.

A rank of n that takes part in a collective over S bytes (S whole: gathered, or before it is scattered) sends, at best

    all-reduce  2·S·(n − 1)/n      all-gather, reduce-scatter, broadcast, all-to-all  S·(n − 1)/n      send  S

(Thakur et al. 2005, Optimization of collective communication operations in MPICH, §4; all-to-all: S of one rank). What
is exchanged, for P parameters of a rank's part, M micro-batches, T slots of a rank's share of a pack and L blocks:

    ddp             all-reduce of 4P a step
    zero1           the same, and the owners broadcast new values: 4P
    zero2           all-gather of P in the dtype of products a step, reduce-scatter of 4P in each micro-batch
    zero3, hsdp     in each micro-batch, blocks gathered twice: for the forward and for the backward pass
    hsdp            and over groups an all-reduce of 4P/N a step
    tensor          a block: 2 all-gathers and 2 reduce-scatters of T·d forward, as many backward, in each micro-batch;
                    once more for embedding and loss
    context         ulysses: an all-to-all of query, key and value, one of attention's result, forward and backward;
                    ring: keys and values to n − 1 ranks forward and backward, and half as many gradients: the rank
                    that has the pack's middle, for one long document; others and shorter documents send less
    pipeline        T·d to the next stage and its gradient back, in each micro-batch; the first stage sends no
                    gradient, the last none but that. With zero3 or hsdp stages keep what backward passes gathered:
                    blocks are gathered M + 1 times, the rest once

Blocks that are computed again exchange again what they exchange forward, but for what nobody reads again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from multipack.launch.memory_model import (
    FLOAT32,
    Dtype,
    Recompute,
    parameters_around,
    parameters_of_block,
    product_bytes,
    stream_bytes,
)
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.stages import RankPart, parts_of_ranks
from multipack.shapes import ModelShape

SHARES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}
"""Collective → how often a rank sends (n − 1)/n of the bytes."""


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step for one purpose.

    Attributes:
        method: the setting that asks for it: `data`, `tensor`, `context` or `pipeline`.
        kind: the collective, or `send`.
        ranks: that take part.
        reach: consecutive ranks that these lie among: within a host if they share one.
        count: calls in a step.
        payload: bytes of all calls: whole tensors, before they are scattered or after they are gathered.
    """

    method: str
    kind: str
    ranks: int
    reach: int
    count: int
    payload: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        if self.kind == "send":
            return self.payload
        return SHARES[self.kind] * self.payload * (self.ranks - 1) // self.ranks


def communication(
    shape: ModelShape,
    config: ParallelConfig,
    world_size: int,
    tokens: int,
    dtype: Dtype = "bf16",
    recompute: Recompute = "none",
    micro_batches: int = 1,
) -> list[Traffic]:
    """What the rank that sends most exchanges in a step; nothing where there is one rank.

    Args:
        shape: the decoder, with its vocabulary.
        config: how ranks share the work.
        world_size: ranks.
        tokens: slots of a pack.
        dtype: of products.
        recompute: which activations are computed again in the backward pass.
        micro_batches: packs of a rank in a step.

    Raises:
        ValueError: the ranks cannot be arranged so.
    """
    axes = config.axes(world_size)
    slots = tokens // axes["cp"]
    found = []
    for part in parts_of_ranks(shape, config, micro_batches):
        traffic = [
            *_data(shape, config, axes, part, dtype, micro_batches),
            *_tensor(shape, config, part, slots, dtype, recompute, micro_batches),
            *_context(shape, config, part, slots, dtype, recompute, micro_batches),
            *_pipeline(shape, config, axes, part, slots, dtype, micro_batches),
        ]
        found.append([each for each in traffic if each.ranks > 1 and each.payload])
    return max(found, key=lambda each: sum(one.sent for one in each))


def _data(
    shape: ModelShape,
    config: ParallelConfig,
    axes: dict[str, int],
    part: RankPart,
    dtype: Dtype,
    micro_batches: int,
) -> list[Traffic]:
    tensor, product = config.tensor, product_bytes(dtype)
    blocks = part.layers * parameters_of_block(shape, tensor)
    around = parameters_around(shape, part, tensor)
    held, units = blocks + around, part.layers + 1
    shards = axes["dp_shard"] * axes["cp"]
    if not config.shards_parameters:
        ranks = axes["dp_replicate"] * axes["cp"]
        reach = ranks * tensor
        found = [Traffic("data", "all_reduce", ranks, reach, units, FLOAT32 * held)]
        if config.data == "zero1":
            found.append(Traffic("data", "broadcast", ranks, reach, units, FLOAT32 * held))
        return found
    # zero2 gathers once a step, and keeps what it gathered. Stages of a pipeline keep what their first backward pass
    # gathered, but free blocks after each forward pass; their gradients are reduced once a step.
    reduces, of_blocks, of_rest = micro_batches, 2 * micro_batches, micro_batches
    if config.pipeline > 1:
        reduces, of_blocks, of_rest = 1, micro_batches + 1, 1
    if config.data == "zero2":
        of_blocks = of_rest = 1
    gathered, calls = of_blocks * blocks + of_rest * around, of_blocks * part.layers + of_rest
    reach = shards * tensor
    found = [
        Traffic("data", "all_gather", shards, reach, calls, product * gathered),
        Traffic("data", "reduce_scatter", shards, reach, reduces * units, FLOAT32 * reduces * held),
    ]
    groups = axes["dp_replicate"]
    if groups > 1:
        found.append(Traffic("data", "all_reduce", groups, groups * reach, units, FLOAT32 * held // shards))
    return found


def _tensor(
    shape: ModelShape,
    config: ParallelConfig,
    part: RankPart,
    slots: int,
    dtype: Dtype,
    recompute: Recompute,
    micro_batches: int,
) -> list[Traffic]:
    ranks, product = config.tensor, product_bytes(dtype)
    hidden = slots * shape.d_model
    # What a block exchanges forward is exchanged again where it is computed again, but for its last reduce-scatter,
    # unless dropout follows. Backward: an all-gather for each reduce-scatter, and the other way round.
    again = {"all_gather": 2, "reduce_scatter": 2 if shape.dropout else 1}
    found = []
    for kind in _EXCHANGES:
        count = part.layers * (4 + (again[kind] if recompute != "none" else 0)) * micro_batches
        found.append(Traffic("tensor", kind, ranks, ranks, count, count * hidden * product))
    if part.is_first:  # the embedding's summands forward, their gradient backward
        stream = stream_bytes(config, dtype)
        found += [
            Traffic("tensor", kind, ranks, ranks, micro_batches, micro_batches * hidden * stream)
            for kind in _EXCHANGES
        ]
    if part.is_last:
        found += [
            Traffic("tensor", kind, ranks, ranks, micro_batches, micro_batches * hidden * product)
            for kind in _EXCHANGES
        ]
    return found


_EXCHANGES = ("all_gather", "reduce_scatter")


def _context(
    shape: ModelShape,
    config: ParallelConfig,
    part: RankPart,
    slots: int,
    dtype: Dtype,
    recompute: Recompute,
    micro_batches: int,
) -> list[Traffic]:
    ranks, product = config.context, product_bytes(dtype)
    reach = ranks * config.tensor
    passes = part.layers * micro_batches
    heads, key_heads = shape.heads // config.tensor, max(1, shape.kv_heads // config.tensor)
    token = slots * shape.head_width * product
    if config.context_method == "ulysses":
        times = 3 if recompute != "none" else 2
        exchanged = 2 * heads + 2 * math.lcm(key_heads, ranks)  # copies of keys, where ranks outnumber them
        calls = passes * times * 2
        return [Traffic("context", "all_to_all", ranks, reach, calls, passes * times * exchanged * token)]
    # At most, for one long document: the last rank shows all its keys and values to all others, forward and backward,
    # and has gradients for the earlier one of the two chunks of each.
    sends = (ranks - 1) * (4 if recompute != "none" else 3)
    whole = 2 * sends - (ranks - 1)  # in halves
    return [Traffic("context", "send", ranks, reach, passes * sends, passes * whole * key_heads * token)]


def _pipeline(
    shape: ModelShape,
    config: ParallelConfig,
    axes: dict[str, int],
    part: RankPart,
    slots: int,
    dtype: Dtype,
    micro_batches: int,
) -> list[Traffic]:
    ranks = config.pipeline
    hidden = slots // config.tensor * shape.d_model * stream_bytes(config, dtype)
    inner = axes["dp_replicate"] * axes["dp_shard"] * axes["cp"] * axes["tp"]
    # To the next stage, and its gradient to the one before, where there are such.
    sends = (2 * config.stages // ranks - part.is_first - part.is_last) * micro_batches
    return [Traffic("pipeline", "send", ranks, ranks * inner, sends, sends * hidden)]
