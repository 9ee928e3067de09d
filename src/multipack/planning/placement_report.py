"""Methods of context parallelism compared on packs: how uneven ranks are, and what they send.

A ring cuts every pack into chunks (`placement.head_tail`), which balances one document a pack. Ulysses balances every
pack, and sends all tokens. A placement by cost (`placement.place`) sends only what divided documents need. *auto* takes
for each pack the cheaper one of the last two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from multipack.planning.lengths import Integers
from multipack.planning.placement import Placement, Placing, head_tail, key_bytes, token_bytes
from multipack.shapes import ModelShape


@dataclass(frozen=True)
class ContextMeasure:
    """One method over packs. Costs are the slowest rank's over the mean of all ranks.

    Attributes:
        method: ring, ulysses, planned or auto.
        attention_mean, attention_max: cost of attention, mean and largest of the packs.
        step_mean, step_max: cost of all operations.
        time: cost of all operations plus the price of what is sent, over the mean cost; mean of the packs.
        sent, received: tokens whose keys and values the busiest rank (by 2 · sent + received) exchanges; means.
        exchanged: share of the packs that ranks exchange by Ulysses.
        payload: bytes that the busiest rank sends for a pack, over all layers, forward and backward; mean.
    """

    method: str
    attention_mean: float
    attention_max: float
    step_mean: float
    step_max: float
    time: float
    sent: float
    received: float
    exchanged: float
    payload: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def measure_context(
    packs: Iterable[Integers], placing: Placing, slots: int, shape: ModelShape, size: int = 2
) -> list[ContextMeasure]:
    """Measure each method that the model can use.

    Args:
        packs: lengths of the documents of each pack.
        placing: the ranks, their cost model and prices.
        slots: slots of a pack, a multiple of the ranks.
        shape: the decoder.
        size: bytes of an element.

    Returns:
        Measures of ring, ulysses, planned and auto; ulysses alone for models that planned cannot compute exactly.
    """
    rows: dict[str, list[tuple[float, ...]]] = {"ring": [], "ulysses": [], "planned": [], "auto": []}
    for lengths in packs:
        placements: dict[str, Placement | None] = {}
        if placing.prices.token is not None:
            placements["ulysses"] = None
        if not placing.cost.sliding and not shape.explicit_scores:
            planned = placing.planned(lengths, slots)
            placements["ring"] = head_tail(lengths, placing.ranks, slots // placing.ranks)
            placements |= {"planned": planned, "auto": placing.cheaper(planned, slots)}
        for method, placement in placements.items():
            rows[method].append(_of_pack(placement, lengths, placing, slots // placing.ranks, shape, size))
    measures = []
    for method, found in rows.items():
        if found:
            attention, step, *others = np.array(found).T
            worst = attention.mean(), attention.max(), step.mean(), step.max()
            measures.append(ContextMeasure(method, *map(float, [*worst, *(each.mean() for each in others)])))
    return measures


def _of_pack(
    placement: Placement | None, lengths: Integers, placing: Placing, each: int, shape: ModelShape, size: int
) -> tuple[float, ...]:
    """(attention, step, time, sent, received, exchanged, payload) of a pack; `placement` is None for Ulysses."""
    cost, prices, ranks = placing.cost, placing.prices, placing.ranks
    if placement is None:
        mean = int(cost.cost(lengths).sum()) / ranks if len(lengths) else 0
        mean += cost.linear * (each - int(lengths.sum()) / ranks)
        time = (mean + (prices.token or 0) * each) / max(mean, 1)
        return 1.0, 1.0, time, 0.0, 0.0, 1.0, each * token_bytes(shape, ranks, placing.multiple, size)
    attention, costs = placement.attention, placement.costs(cost, each)
    exchanged = 2 * placement.sent + placement.received
    most = int(np.argmax(exchanged))
    return (
        int(attention.max()) / max(attention.mean(), 1),
        int(costs.max()) / max(costs.mean(), 1),
        placement.slowest(cost, prices, each) / max(costs.mean(), 1),
        int(placement.sent[most]),
        int(placement.received[most]),
        0.0,
        key_bytes(shape, placing.multiple, size) * int(exchanged[most]),
    )
