"""A stream, dealt to one rank: as a data set for torch's loaders, or as a sampler for `PackedLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from multipack.data.arriving import Arriving
from multipack.data.documents import Document
from multipack.planning.lengths import check_integer
from multipack.planning.options import Sync
from multipack.planning.packing import Packs
from multipack.planning.stream import PackStream
from multipack.planning.stream_step import StreamStep


class MicroBatch(NamedTuple):
    """What one rank runs at once, and what it must know of the step.

    Attributes:
        batch: the documents of one pack, collated where a collator was given; possibly none.
        step: number of the step, from 0.
        micro_batch: number of this pack among the rank's packs of the step.
        micro_batches: how many these are.
        denominator: what the summed loss of the step is divided by, over all ranks that share the stream.
    """

    batch: Any
    step: int
    micro_batch: int
    micro_batches: int
    denominator: int


def own_packs(dealt: Packs, rank: int, world_size: int) -> list[NDArray[np.int64]]:
    """The packs of one rank, micro-batch after micro-batch, of a step that was dealt to all."""
    return [dealt[number] for number in range(rank, len(dealt), world_size)]


class PackedStreamDataset(IterableDataset[MicroBatch]):
    """One rank's micro-batches of a `PackStream`: as many as every other rank's.

    Use it as `DataLoader(data_set, batch_size=None, num_workers=0 or 1)`; a loader that keeps states (torchdata's
    `StatefulDataLoader`) finds `state_dict` and `load_state_dict` here. Every rank reads the same documents and takes
    its share, or has a stream of its own shard; then `world_size` is 1 and the denominators of all ranks must be added.

    Args:
        stream: the steps.
        collate: documents of a pack → batch, such as `PackedCollator.of(stream)` for streams of `Document`; None = the
            list of documents itself.
        rank: of this process among those that share the stream.
        world_size: how many these are.
        sync: where ranks wait for each other: `micro`, `step` or `pipeline`.

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
        self._micro_batch = 0  # how many of the current step were

    def __iter__(self) -> Iterator[MicroBatch]:
        """Micro-batches, from where the stream stands."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"num_workers={worker.num_workers}: each worker would read all documents of the stream; use"
                " num_workers=1, or 0"
            )
        skip = self._micro_batch
        for step in self._steps():
            dealt = step.deal(self.world_size, self.sync)
            own = own_packs(dealt, self.rank, self.world_size)
            denominator = step.denominator
            self._begun = step
            for number in range(skip, len(own)):
                documents = step.items[own[number]].tolist()
                batch = documents if self.collate is None else self.collate(documents)
                self._micro_batch = number + 1
                if self._micro_batch == len(own):
                    self._begun, self._micro_batch = None, 0
                yield MicroBatch(batch, step.number, number, len(own), denominator)
            skip = 0

    def _steps(self) -> Iterator[StreamStep]:
        """Steps of the stream, the one that was begun first."""
        if self._begun is not None:
            yield self._begun
        yield from self.stream

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the current one goes on where it stands."""
        if epoch != self.stream.epoch:
            self.stream.set_epoch(epoch)
            self._begun, self._micro_batch = None, 0

    def state_dict(self) -> dict[str, Any]:
        """The state after the last micro-batch that was yielded, as plain values."""
        return {
            "stream": self.stream.state_dict()
            if self._begun is None
            else self._begun.state_dict(before=True),
            "micro_batch": self._micro_batch,
            "world_size": self.world_size,
            "sync": self.sync,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, in the next iterator; between two steps the world size may differ.

        Raises:
            ValueError: the state is damaged, of another stream, or inside a step that another world size or sync had
                arranged.
        """
        missing = [key for key in ("stream", "micro_batch", "world_size", "sync") if key not in state]
        if missing:
            raise ValueError(f"the saved state of the stream's data set lacks {', '.join(missing)}")
        micro_batch = check_integer("the saved state's micro_batch", state["micro_batch"], 0)
        if micro_batch and (state["world_size"], state["sync"]) != (self.world_size, self.sync):
            raise ValueError(
                f"the saved position is inside a step, after {micro_batch} micro-batches that"
                f" world_size={state['world_size']}, sync={state['sync']!r} had arranged (now {self.world_size},"
                f" {self.sync!r}); go on with those, or from a state between two steps"
            )
        self.stream.load_state_dict(state["stream"])
        self._begun, self._micro_batch = None, micro_batch


class StreamSampler:
    """One rank's micro-batches of a stream of arriving documents, as the positions of their documents.

    For `PackedLoader`, both as its sampler and as its documents: a document is made of its item when the pack of its
    step is collated.

    Args:
        stream: the steps.
        arriving: what the stream's items are.
        rank: of this process among those that share the stream.
        world_size: how many these are.
        sync: where ranks wait for each other.

    Raises:
        ValueError: more ranks than packs of a step.
    """

    def __init__(
        self, stream: PackStream, arriving: Arriving, *, rank: int, world_size: int, sync: Sync = "micro"
    ) -> None:
        self.stream, self.arriving = stream, arriving
        self.rank, self.world_size, self.sync = rank, world_size, sync
        self._step: StreamStep | None = None
        self._items: dict[int, Any] = {}

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.stream:
            self._step = step
            self._items = dict(zip(step.positions.tolist(), step.items.tolist(), strict=True))
            for pack in own_packs(step.deal(self.world_size, self.sync), self.rank, self.world_size):
                yield step.positions[pack].tolist()

    def __getitem__(self, position: int) -> Document:
        """The document at a position of the stream, one of the step whose packs are being yielded."""
        return self.arriving.document(self._items[position])

    def __len__(self) -> int:
        raise TypeError("a stream has no length: nobody knows how many documents are to come")

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: documents arrive once."""
        if epoch:
            raise ValueError(f"epoch {epoch} of a stream: its documents arrive once")

    def state_dict(self) -> dict[str, Any]:
        """The step whose pack was yielded last.

        Its own `state_dict` is the state after it: large, so that it is made when it is asked for, not for every pack.
        """
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, in the next iteration, after the step whose own state this is."""
        self.stream.load_state_dict(state)
        self.arriving.restart()  # a state from before the first step puts the documents nowhere
