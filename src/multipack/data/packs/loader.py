"""`PackedLoader`: packs of an epoch, collated ahead in a background thread.

    sampler ─ numbers ─▶ documents ─▶ collator ─▶ [ batch | batch ]  ─▶ training
    └──────────── one background thread ─────────┘ └─ prefetch ──┘

The state belongs to the last batch *handed out*: batches that wait in the queue when a checkpoint is written are
collated again after a resume. Nothing here draws random numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from multipack.data.packs.batch import PackedBatch
from multipack.data.packs.sampler import PackedBatchSampler

THREAD = "multipack-loader"
"""Name of the background thread."""
Item = tuple[PackedBatch, tuple[int, int, int]]
"""A batch, and the sampler's position after it."""
Made = TypeVar("Made")


def prefetched(items: Iterator[Made], size: int) -> Generator[Made]:
    """The same items, of which a background thread makes `size` ahead; 0 = no thread.

    The number of items begun depends only on the number requested, not on the speed of the thread: ranks that request
    equally many begin equally many. An exception in the thread is raised here. Closing the generator finishes the items
    that were begun, and ends the thread.
    """
    if not size:
        yield from items
        return
    executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
    begun = deque(executor.submit(next, items, None) for _ in range(size))
    try:
        while True:
            begun.append(executor.submit(next, items, None))
            item = begun.popleft().result()
            if item is None:
                return
            yield item
    finally:
        # Garbage collection may close the generator in the thread itself, which cannot wait for itself, or in one that
        # holds a lock of `threading`, without which no thread can be joined.
        executor.shutdown(wait=False)
        if not threading.current_thread().name.startswith(THREAD):
            wait(begun)


class PackedLoader:
    """Iterates the batches of the sampler's current epoch.

    One iteration at a time: the first batch of a new iteration ends the previous one.

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
        self.documents = documents
        self.sampler = self.batch_sampler = sampler
        self._collator, self._prefetch = collator, prefetch
        self._position: tuple[int, int, int] | None = None  # after the last batch that was handed out
        self._current: Generator[Item] | None = None  # the current iteration

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[PackedBatch]:
        # Runs when the first batch is requested: an iterator that is never used does not move the sampler.
        self.close()
        items = self._current = prefetched(self._items(), self._prefetch)
        try:
            for batch, position in items:
                self._position = position
                yield batch
                if self._current is not items:
                    raise RuntimeError("this iteration was ended by another one, or by close()")
        finally:
            items.close()

    def _items(self) -> Iterator[Item]:
        """The batches of an iteration, each with the sampler's position after it."""
        for numbers in self.sampler:
            position = self.sampler.position
            try:
                batch = self._collator([self.documents[number] for number in numbers])
            except Exception as error:
                error.add_note(f"while making a batch of the documents {', '.join(map(str, numbers[:32]))}")
                raise
            yield batch, position

    def set_epoch(self, epoch: int) -> None:
        """Plan this epoch; ends the current iteration."""
        self.close()
        self.sampler.set_epoch(epoch)
        self._position = None

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last batch that was handed out."""
        epoch, *place = self._position or self.sampler.position
        # An epoch that was set in the sampler begins with its own first batch.
        return self.sampler.state_at(*place) if epoch == self.sampler.epoch else self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch of a saved state; ends the current iteration."""
        self.close()
        self.sampler.load_state_dict(state)
        self._position = None

    def close(self) -> None:
        """End the current iteration and its thread. The loader can be iterated again."""
        if self._current is not None:
            self._current.close()
            self._current = None
