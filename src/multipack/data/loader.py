"""Packs, collated ahead in the background, in the order of the sampler.

    sampler ─ numbers ─▶ documents ─▶ collator ─▶ [ batch | batch ]  ─▶ training
    └──────────── one background thread ─────────┘ └─ prefetch ──┘

The state is that of the last batch *handed out*: what waits in the queue when a checkpoint is written is
collated again after it. Nothing here draws random numbers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

from multipack.data.batch import PackedBatch


class Sampler(Protocol):
    """What the loader asks of a sampler: document numbers of one pack after the other, and a state."""

    def __iter__(self) -> Iterator[list[int]]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None:
        """Plan this epoch."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the last pack that it yielded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


Item = tuple[PackedBatch, dict[str, Any]]
"""A batch, and the sampler's state after it."""


class Worker(Protocol):
    """What makes items ahead, in a thread."""

    def items(self) -> Iterator[Item]:
        """What the thread made, in order; an exception in it is raised here."""

    def stop(self) -> None:
        """End the thread; what it made ahead is forgotten."""


class Indexed(Protocol):
    """What the loader asks of a data set."""

    def __getitem__(self, index: int, /) -> Any:
        """Document (or pair) `index`."""


class PackedLoader:
    """Iterates the batches of the sampler's current epoch.

    One iteration at a time: beginning another ends the one before.

    Args:
        documents: what the sampler's numbers mean.
        sampler: yields the document numbers of each pack.
        collator: makes a batch of documents.
        prefetch: batches collated ahead; 0 = none, and no thread.

    Attributes:
        batches_read: batches handed out since this loader was made.
        tokens_read: the real tokens in them.
        sampler: as given (accelerate and Lightning look for it here).
        batch_sampler: the same.
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
        self.batches_read = self.tokens_read = 0
        self._collator = collator
        self._prefetch = prefetch
        self._state: dict[str, Any] | None = None
        self._worker: Worker | None = None
        self._iteration = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[PackedBatch]:
        self.close()
        return self._hand_out(self._iteration)

    def _hand_out(self, iteration: int) -> Iterator[PackedBatch]:
        # Runs when the first batch is asked for: an iterator that is never used moves no sampler.
        self._check_current(iteration)
        items = self._items()
        worker = None
        if self._prefetch:
            worker = self._worker = self._ahead(items)
            items = worker.items()
        try:
            for batch, state in items:
                self._state = state
                self.batches_read += 1
                self.tokens_read += batch.num_tokens
                yield batch
                self._check_current(iteration)
        finally:
            if worker is not None:
                worker.stop()

    def _items(self) -> Iterator[Item]:
        """The batches of an iteration, each with the sampler's state after it."""
        return _collated(self.documents, self.sampler, self._collator)

    def _ahead(self, items: Iterator[Item]) -> Worker:
        """Makes items ahead of whoever takes them."""
        return _Worker(items, self._prefetch)

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError("this iteration was ended by another one, or by close()")

    def set_epoch(self, epoch: int) -> None:
        """Plan this epoch; ends an iteration that is under way."""
        self.close()
        self.sampler.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last batch that was handed out."""
        return self.sampler.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that batch; ends an iteration that is under way."""
        self.close()
        self.sampler.load_state_dict(state)
        self._state = None

    def close(self) -> None:
        """End the iteration that is under way, and its thread. The loader can be iterated again."""
        self._iteration += 1
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _collated(
    documents: Indexed, sampler: Sampler, collator: Callable[[Sequence[Any]], PackedBatch]
) -> Iterator[Item]:
    for numbers in sampler:
        state = sampler.state_dict()
        try:
            batch = collator([documents[number] for number in numbers])
        except Exception as error:
            error.add_note(f"while making a batch of the documents {', '.join(map(str, numbers[:32]))}")
            raise
        yield batch, state


class _Worker:
    """Runs an iterator in a thread, at most `size` items ahead of whoever takes them."""

    def __init__(self, items: Iterator[Item], size: int) -> None:
        self._queue: queue.Queue[Item | BaseException | None] = queue.Queue(size)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="multipack-loader", daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[Item]) -> None:
        last: BaseException | None = None
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:  # whatever it is, it is raised where the batch was wanted
            last = error
        self._put(last)

    def _put(self, item: Item | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def items(self) -> Iterator[Item]:
        """What the thread made, in order; an exception in it is raised here."""
        while True:
            try:
                item = self._queue.get(timeout=1.0)
            except queue.Empty:
                if self._thread.is_alive():
                    continue
                raise RuntimeError("the thread that prefetches batches is gone") from None
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        """End the thread; what it made ahead is forgotten."""
        self._stopped.set()
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()
