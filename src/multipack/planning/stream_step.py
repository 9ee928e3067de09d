"""What a stream yields: the documents of one step, and how ranks share them."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from multipack.planning.options import Sync
from multipack.planning.packing import Packs
from multipack.planning.stream_state import Place

Integers = NDArray[np.int64]


class StreamStep:
    """A step of a stream: documents that train together, and how ranks share them.

    Packs hold numbers into the step's own arrays: document n of the step is `items[n]`, with `lengths[n]` tokens.

    Attributes:
        number: of the step, from 0.
    """

    def __init__(self, before: Place, after: Place, index: int | None) -> None:
        """Make step `index` of a block, between two places of the stream; None = without documents."""
        self.number = before.step
        self._before, self._after, self._plan, self._index = before, after, after.block.plan, index
        self._first = self._last = 0
        if index is not None:
            first, last = self._plan.step_offsets[index : index + 2]
            self._first, self._last = (int(self._plan.pack_offsets[pack]) for pack in (first, last))

    def __len__(self) -> int:
        """Documents of the step: 0 where this rank has none left and goes on for the others."""
        return self._last - self._first

    @property
    def positions(self) -> Integers:
        """(documents,) int64 places of the documents in the source, counted from 0 over all shards."""
        return self._after.block.flight.positions[self._first : self._last]

    @property
    def items(self) -> NDArray[Any]:
        """(documents,) what the source gave, as an array of objects; the positions where it gave lengths."""
        items = self._after.block.flight.items
        return self.positions if items is None else items[self._first : self._last]

    @property
    def lengths(self) -> Integers:
        """(documents,) int64 tokens of each document."""
        return self._plan.lengths[self._first : self._last]

    @property
    def tokens(self) -> int:
        """Tokens of the documents."""
        return int(self.lengths.sum())

    @property
    def targets(self) -> int:
        """Target tokens of the documents; with sharded readers of this shard's."""
        return 0 if self._index is None else self._plan.targets(self._index)

    @property
    def denominator(self) -> int:
        """What the summed loss is divided by; with sharded readers add those of all ranks. See `Plan.denominator`."""
        return 0 if self._index is None else self._plan.denominator(self._index)

    @property
    def packs(self) -> Packs:
        """One packing that fits: at most `packs_per_step` packs, none of them empty."""
        if self._index is None:
            return Packs(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
        packs = self._plan.packs(self._index)
        return Packs(packs.order - self._first, packs.offsets)

    def deal(self, data_parallel_size: int, sync: Sync = "micro") -> Packs:
        """The documents arranged for ranks, as `Plan.deal` does: pack m · ranks + r is rank r's micro-batch m.

        With sharded readers each rank deals its own step to itself: `data_parallel_size` is 1.
        """
        if self._index is not None:
            dealt = self._plan.deal(self._index, data_parallel_size, sync)
            return Packs(dealt.order - self._first, dealt.offsets)
        if sync not in get_args(Sync):
            raise ValueError(f"sync={sync!r} is unknown; choose one of {', '.join(get_args(Sync))}")
        packs = data_parallel_size * self._plan.micro_batches(data_parallel_size)
        return Packs(np.empty(0, dtype=np.int64), np.zeros(packs + 1, dtype=np.int64))

    def state_dict(self, before: bool = False) -> dict[str, Any]:
        """The state after this step, or before it, however far the stream was read ahead: plain values."""
        return (self._before if before else self._after).state()

    def __repr__(self) -> str:
        return f"StreamStep({self.number:,}: {len(self):,} documents of {self.tokens:,} tokens)"
