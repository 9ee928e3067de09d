"""`PackedLoader`: packs collated ahead in a background thread; `PackedStreamDataset`: a stream for torch's loaders.

    sampler ─ numbers ─▶ documents ─▶ collator ─▶ [ batch | batch ]  ─▶ training
    └──────────── one background thread ─────────┘ └─ prefetch ──┘

The state is that of the last batch *handed out*: batches that wait in the queue when a checkpoint is written are
collated again after it. Nothing here draws random numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from multipack.data.batch import PackedBatch
from multipack.data.sampler import PackedBatchSampler
from multipack.planning.lengths import check_integer
from multipack.planning.options import Sync
from multipack.planning.stream import PackStream, StreamStep

THREAD = "multipack-loader"
"""Name of the background thread."""
Item = tuple[PackedBatch, dict[str, Any]]
"""A batch, and the sampler's state after it."""
Made = TypeVar("Made")


def prefetched(items: Iterator[Made], size: int) -> Generator[Made]:
    """The same items, of which a background thread makes `size` ahead; 0 = no thread.

    The number of items that were begun depends only on the number requested, not on the speed of the thread: ranks that
    requested equally many have begun equally many. An exception in the thread is raised here. Closing the generator
    finishes the items that were begun, and ends the thread.
    """
    if not size:
        yield from items
        return
    executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
    try:
        begun = deque(executor.submit(next, items, None) for _ in range(size))
        while True:
            begun.append(executor.submit(next, items, None))
            item = begun.popleft().result()
            if item is None:
                return
            yield item
    finally:
        # Garbage collection may close the generator in the thread itself, which cannot wait for itself.
        executor.shutdown(wait=not threading.current_thread().name.startswith(THREAD))


class PackedLoader:
    """Iterates the batches of the sampler's current epoch.

    One iteration at a time: a new iteration ends the previous one.

    Args:
        documents: indexed by the sampler's numbers.
        sampler: yields the document numbers of each pack, and has a state.
        collator: makes a batch of documents.
        prefetch: batches collated ahead; 0 = none, and no thread.

    Attributes:
        sampler, batch_sampler: the sampler (accelerate and Lightning look for it under these names).
    """

    def __init__(
        self,
        documents: Any,
        sampler: PackedBatchSampler,
        collator: Callable[[Sequence[Any]], PackedBatch],
        prefetch: int = 2,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: batches to collate ahead, 0 or more")
        self.documents = documents
        self.sampler = self.batch_sampler = sampler
        self._collator, self._prefetch = collator, prefetch
        self._state: dict[str, Any] | None = None
        self._current: Generator[Item] | None = None  # the current iteration

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[PackedBatch]:
        self.close()
        return self._hand_out()

    def _hand_out(self) -> Iterator[PackedBatch]:
        # Runs when the first batch is requested: an iterator that is never used does not move the sampler.
        self.close()
        items = self._current = prefetched(self._items(), self._prefetch)
        try:
            for batch, state in items:
                self._state = state
                yield batch
                if self._current is not items:
                    raise RuntimeError("this iteration was ended by another one, or by close()")
        finally:
            items.close()

    def _items(self) -> Iterator[Item]:
        """The batches of an iteration, each with the sampler's state after it."""
        for numbers in self.sampler:
            state = self.sampler.state_dict()
            try:
                batch = self._collator([self.documents[number] for number in numbers])
            except Exception as error:
                error.add_note(f"while making a batch of the documents {', '.join(map(str, numbers[:32]))}")
                raise
            yield batch, state

    def set_epoch(self, epoch: int) -> None:
        """Plan this epoch; ends the current iteration."""
        self.close()
        self.sampler.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last batch that was handed out."""
        return self.sampler.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that batch; ends the current iteration."""
        self.close()
        self.sampler.load_state_dict(state)
        self._state = None

    def close(self) -> None:
        """End the current iteration and its thread. The loader can be iterated again."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- streams ------------------------------------------------------------------------------------------


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
    mine = (dealt[number].tolist() for number in range(rank, len(dealt), world_size))
    return [[step.items[place] for place in pack] for pack in mine]


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
        begun, skip = self._begun, self._micro_batch
        for step in chain([] if begun is None else [begun], self.stream):
            packs = rank_items(step, self.rank, self.world_size, self.sync)
            self._begun = step
            for number in range(skip, len(packs)):
                batch = packs[number] if self.collate is None else self.collate(packs[number])
                self._micro_batch = number + 1
                if self._micro_batch == len(packs):
                    self._begun, self._micro_batch = None, 0
                yield MicroBatch(batch, step.number, number, len(packs), step.denominator)
            skip = 0

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
