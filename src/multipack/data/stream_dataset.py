"""`PackedStreamDataset`: one rank's micro-batches of a `PackStream`, as a data set for torch's loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from multipack.planning.lengths import check_integer
from multipack.planning.options import Sync
from multipack.planning.stream import PackStream, StreamStep


class MicroBatch(NamedTuple):
    """One forward and backward pass of one rank.

    Attributes:
        batch: the documents of one pack (possibly none), collated if there is a collator.
        step: number of the step, from 0.
        micro_batch: number of this pack among the rank's packs of the step.
        micro_batches: number of these packs.
        denominator: divisor of the step's summed loss, over all ranks that share the stream.
    """

    batch: Any
    step: int
    micro_batch: int
    micro_batches: int
    denominator: int


def rank_items(step: StreamStep, rank: int, world_size: int, sync: Sync) -> list[list[Any]]:
    """The items of each pack of one rank, in the order of its micro-batches."""
    dealt = step.deal(world_size, sync)
    items = step.items
    return [
        [items[place] for place in dealt[number].tolist()] for number in range(rank, len(dealt), world_size)
    ]


class PackedStreamDataset(IterableDataset[MicroBatch]):
    """One rank's micro-batches of a `PackStream`, equally many on every rank.

    Use it as `DataLoader(data_set, batch_size=None, num_workers=0 or 1)`; loaders that keep states (torchdata's
    `StatefulDataLoader`) find `state_dict` and `load_state_dict` here. Every rank reads the same documents and takes
    its share.

    Args:
        stream: the steps.
        collate: documents of a pack → batch, such as `PackedCollator.of(stream)` for streams of `Document`; None = the
            list of documents itself.
        rank: this process among those that share the stream.
        world_size: number of these processes.
        sync: sync points of the ranks: `micro`, `step` or `pipeline`.

    Raises:
        ValueError: a rank outside the world; while iterating, more ranks than packs of a step, or more than one
            worker process, each of which would read all documents.
    """

    def __init__(
        self,
        stream: PackStream,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        sync: Sync = "micro",
    ) -> None:
        super().__init__()
        self.stream, self.collate, self.sync = stream, collate, sync
        self.world_size = check_integer("world_size", world_size)
        self.rank = check_integer("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(f"rank={rank} is outside world_size={world_size}: ranks count from 0")
        self._begun: StreamStep | None = None  # a step of which not all micro-batches were yielded
        self._micro_batch = 0  # number of micro-batches of the current step that were yielded

    def __iter__(self) -> Iterator[MicroBatch]:
        """Micro-batches from the current position."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"num_workers={worker.num_workers}: each worker would read all documents of the stream; use"
                " num_workers=1, or 0"
            )
        skip = self._micro_batch
        for step in self._steps():
            packs = rank_items(step, self.rank, self.world_size, self.sync)
            self._begun = step
            for number in range(skip, len(packs)):
                batch = packs[number] if self.collate is None else self.collate(packs[number])
                self._micro_batch = number + 1
                if self._micro_batch == len(packs):
                    self._begun, self._micro_batch = None, 0
                yield MicroBatch(batch, step.number, number, len(packs), step.denominator)
            skip = 0

    def _steps(self) -> Iterator[StreamStep]:
        """The steps of the stream, after the step that was begun."""
        if self._begun is not None:
            yield self._begun
        yield from self.stream

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the current epoch continues where it stands."""
        if epoch != self.stream.epoch:
            self.stream.set_epoch(epoch)
            self._begun, self._micro_batch = None, 0

    def state_dict(self) -> dict[str, Any]:
        """The state after the last micro-batch that was yielded, as plain values."""
        begun = self._begun
        return {
            "stream": self.stream.state_dict() if begun is None else begun.state_dict(before=True),
            "micro_batch": self._micro_batch,
            "world_size": self.world_size,
            "sync": self.sync,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state` in the next iterator; between two steps the world size may differ.

        Raises:
            ValueError: the state is damaged, of another stream, or inside a step that was dealt to another world size
                or for another sync.
        """
        missing = [key for key in ("stream", "micro_batch", "world_size", "sync") if key not in state]
        if missing:
            raise ValueError(f"the saved state of the stream's data set lacks {', '.join(missing)}")
        micro_batch = check_integer("the saved state's micro_batch", state["micro_batch"], 0)
        if micro_batch and (state["world_size"], state["sync"]) != (self.world_size, self.sync):
            raise ValueError(
                f"the saved position is inside a step, after {micro_batch} micro-batches, and was dealt for"
                f" world_size={state['world_size']}, sync={state['sync']!r} (now {self.world_size}, {self.sync!r});"
                " resume with those, or from a state between two steps"
            )
        self.stream.load_state_dict(state["stream"])
        self._begun, self._micro_batch = None, micro_batch
