"""The cost of context parallelism on the packs of a request to `advise`: balance of ranks, and bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from multipack.launch.advise_request import AdviseRequest
from multipack.parallel.parallel_config import ParallelConfig
from multipack.planning.cost import CostModel
from multipack.planning.placement import Placing, Prices
from multipack.planning.placement_report import ContextMeasure, measure_context
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig


def pack_of(capacity: int, document_tokens: int) -> NDArray[np.int64]:
    """Lengths of the documents of a pack: all typical, and one for the rest."""
    full, rest = divmod(capacity, min(document_tokens, capacity))
    return np.array([min(document_tokens, capacity)] * full + [rest] * (rest > 0), dtype=np.int64)


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


def measured(request: AdviseRequest, config: ParallelConfig) -> ContextMeasure:
    """The method of context parallelism of a configuration on the packs of a request."""
    pack, ranks = (request.capacity, request.document_tokens), (config.context, config.tensor)
    size = 4 if request.dtype == "fp32" else 2
    found = _measures(request.model, request.adapter, pack, ranks, config.context_flops_per_byte, size)
    return found[config.context_method]


@lru_cache(maxsize=256)
def _measures(
    shape: ModelShape,
    adapter: AdapterConfig,
    pack: tuple[int, int],
    ranks: tuple[int, int],
    price: float,
    size: int,
) -> dict[str, ContextMeasure]:
    context, tensor = ranks
    cost, prices = (
        CostModel.from_shape(shape, adapter=adapter),
        Prices.of(shape, context, tensor, price, size),
    )
    slots = -(-pack[0] // (context * tensor)) * context * tensor
    found = measure_context([pack_of(*pack)], Placing(cost, context, prices, tensor), slots, shape, size)
    return {each.method: each for each in found}
