"""`PackedLoader`: packs of documents, collated ahead in a background thread, in the order of a sampler.

    sampler ─ numbers ─▶ documents ─▶ collator ─▶ [ batch | batch ]  ─▶ training
    └──────────── one background thread ─────────┘ └─ prefetch ──┘

The state is that of the last batch *handed out*: batches that wait in the queue when a checkpoint is written are
collated again after it. Nothing here draws random numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from multipack.data.batch import PackedBatch


class Sampler(Protocol):
    """Yields the document numbers of one pack after another, and has a state; see `PackedBatchSampler`."""

    def __iter__(self) -> Iterator[list[int]]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None:
        """Plan this epoch."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the last pack that was yielded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that pack."""


class Indexed(Protocol):
    """Documents (or pairs) by number."""

    def __getitem__(self, index: int, /) -> Any:
        """Document `index`."""


Item = tuple[PackedBatch, dict[str, Any]]
"""A batch, and the sampler's state after it."""
Made = TypeVar("Made")


class PackedLoader:
    """Iterates the batches of the sampler's current epoch.

    One iteration at a time: a new iteration ends the previous one.

    Args:
        documents: indexed by the sampler's numbers.
        sampler: yields the document numbers of each pack.
        collator: makes a batch of documents.
        prefetch: batches collated ahead; 0 = none, and no thread.

    Attributes:
        sampler, batch_sampler: the sampler (accelerate and Lightning look for it under these names).
    """

    def __init__(
        self,
        documents: Indexed,
        sampler: Sampler,
        collator: Callable[[Sequence[Any]], PackedBatch],
        prefetch: int = 2,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: batches to collate ahead, 0 or more")
        self.documents = documents
        self.sampler = self.batch_sampler = sampler
        self._collator = collator
        self._prefetch = prefetch
        self._state: dict[str, Any] | None = None
        self._thread: PrefetchThread[Item] | None = None
        self._iteration = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[PackedBatch]:
        self.close()
        return self._hand_out(self._iteration)

    def _hand_out(self, iteration: int) -> Iterator[PackedBatch]:
        # Runs when the first batch is requested: an iterator that is never used does not move the sampler.
        self._check_current(iteration)
        items = self._items()
        thread = None
        if self._prefetch:
            thread = self._thread = PrefetchThread(items, self._prefetch)
            items = thread.items()
        try:
            for batch, state in items:
                self._state = state
                yield batch
                self._check_current(iteration)
        finally:
            if thread is not None:
                thread.stop()

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

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError("this iteration was ended by another one, or by close()")

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
        self._iteration += 1
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PrefetchThread(Generic[Made]):
    """Makes items in a thread: as many as were requested, and `size` more.

    The number of items that were begun does not depend on the speed of the thread, so that it is equal on all ranks
    that requested equally many.
    """

    NAME = "multipack-loader"

    def __init__(self, items: Iterator[Made], size: int) -> None:
        self._items, self._size = items, size
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=self.NAME)

    def items(self) -> Iterator[Made]:
        """The items in order; an exception in the thread is raised here."""
        begun = deque(self._executor.submit(next, self._items, None) for _ in range(self._size))
        while True:
            begun.append(self._executor.submit(next, self._items, None))
            item = begun.popleft().result()
            if item is None:
                return
            yield item

    def stop(self) -> None:
        """Finish the items that were begun, and end the thread."""
        # Garbage collection may call this in the thread itself, which cannot wait for itself.
        self._executor.shutdown(wait=not threading.current_thread().name.startswith(self.NAME))
