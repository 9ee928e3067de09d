"""The cost of context parallelism on the packs of a request to `advise`: balance of ranks, and bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multipack.data.views.stored_lengths import read_lengths
from multipack.launch.advise_request import AdviseRequest
from multipack.parallel.parallel_config import ParallelConfig
from multipack.planning.cost import CostModel
from multipack.planning.placement import Placing, Prices
from multipack.planning.placement_report import ContextMeasure, measure_context
from multipack.planning.plan import plan
from multipack.planning.report import evenly_spaced
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig

Integers = NDArray[np.int64]

PACKS = 16
"""Number of packs that are measured."""
SAMPLE = 50_000
"""Maximum number of documents that are packed for them."""


@lru_cache(maxsize=4)
def packs_of(path: str, capacity: int, document_tokens: int) -> tuple[Integers, ...]:
    """Lengths of the documents in each of some packs, from a file or all equal.

    Raises:
        ValueError: there are no lengths at `path`, or documents longer than a pack.
    """
    if not path:
        longest = min(document_tokens, capacity)
        full, rest = divmod(capacity, longest)
        return (np.array([longest] * full + [rest] * (rest > 0), dtype=np.int64),)
    lengths = read_lengths(Path(path).expanduser(), capacity)
    if len(lengths) > SAMPLE:
        lengths = np.random.default_rng(0).choice(lengths, SAMPLE, replace=False)
    made = plan(lengths, capacity=capacity, packs_per_step=PACKS)
    starts, numbers = made.pack_offsets, evenly_spaced(made.num_packs, PACKS).tolist()
    return tuple(lengths[made.order[starts[number] : starts[number + 1]]] for number in numbers)


def with_link(config: ParallelConfig, request: AdviseRequest) -> ParallelConfig:
    """The configuration with the method that the model allows, and the speed of the links among context ranks."""
    flops, within_host, between_hosts = request.speeds
    reach = config.context * config.tensor
    inside = request.devices_per_host % reach == 0 or request.devices == request.devices_per_host
    price = float(f"{flops / (within_host if inside else between_hosts):.2g}")
    usual = ParallelConfig().context_flops_per_byte
    # The default if it is close: then it is no word of the command.
    close = abs(price / usual - 1) < 0.1
    return replace(config.resolved(request.model), context_flops_per_byte=usual if close else price)


def measures(request: AdviseRequest, config: ParallelConfig) -> list[ContextMeasure]:
    """All methods of context parallelism on the packs of a request, for the ranks of a configuration."""
    packs = (request.lengths, request.capacity, request.document_tokens)
    size = 4 if request.dtype == "fp32" else 2
    price = config.context_flops_per_byte
    return _measures(request.model, request.adapter, packs, config.context, config.tensor, price, size)


@lru_cache(maxsize=256)
def _measures(
    shape: ModelShape,
    adapter: AdapterConfig,
    packs: tuple[str, int, int],
    ranks: int,
    tensor: int,
    price: float,
    size: int,
) -> list[ContextMeasure]:
    cost, prices = CostModel.from_shape(shape, adapter=adapter), Prices.of(shape, ranks, tensor, price, size)
    slots = -(-packs[1] // (ranks * tensor)) * ranks * tensor
    return measure_context(packs_of(*packs), Placing(cost, ranks, prices, tensor), slots, shape, size)
