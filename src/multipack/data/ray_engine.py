"""Tokenizing on a Ray cluster (`pip install "multipack[ray]"`).

    source ─▶ this process: batches of documents ─▶ tasks: blocks ─▶ this process, in the order of the source

The result is that of one machine, byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from multipack.data.batches import Batch, in_order
from multipack.data.blocks import TokenBlock, documents_to_bytes
from multipack.data.sources import Source
from multipack.data.tokenizer import Tokenizer
from multipack.data.workers import make_answer, read_answer


class RayEngine:
    """Reads and tokenizes in Ray's tasks.

    They run on the cluster to which this process is connected; or else on one that it can join (`RAY_ADDRESS`, or one
    that `ray start` began on this machine: what `ray.init` calls `address="auto"`); or else on this machine.

    Args:
        tokenizer: makes the tokens.

    Raises:
        ValueError: Ray Data is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise ValueError(
                f'--engine ray needs the package ray, with Ray Data: pip install "multipack[ray]" ({error})'
            ) from error
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        self._encoder = _Encoder(tokenizer.hash, tokenizer.name, [ray.put(tokenizer.to_json())])
        self._task = ray.remote(num_cpus=1, max_retries=3)(_answer)

    def reads(self, source: Source, tokenizes: bool = True) -> Source:
        """The documents of `source`, read by this process."""
        return source

    def encode(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, TokenBlock]]:
        """See `Engine`.

        Raises:
            ValueError: text that the tokenizer does not know.
        """
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        with self._failures():
            for batch, answer in in_order(batches, self._submit, 2 * cores + 1):
                yield batch, read_answer(answer)

    def _submit(self, batch: Batch) -> Future[Any]:
        future: Future[Any] = self._task.remote(self._encoder, documents_to_bytes(batch.documents)).future()
        return future

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What kills a task more often than Ray tries again is an error that says so."""
        errors = self._ray.exceptions
        try:
            yield
        except (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ChildProcessError(
                f"a task of Ray was killed ({reason}); a machine may be out of memory:"
                " start again: finished parts are kept"
            ) from error

    def close(self) -> None:
        """Leave the cluster, if it was joined here."""
        if self._is_ours:
            self._ray.shutdown()


_tokenizers: dict[str, Tokenizer] = {}
"""What this worker of Ray has read: the tokenizer of the last task, by its hash."""


@dataclass(frozen=True)
class _Encoder:
    """Tokenizes documents that come as bytes.

    Attributes:
        hash: of the tokenizer.
        name: of the tokenizer.
        definition: a reference to its JSON; in a list, so that it is fetched once a process, not once a task.
    """

    hash: str
    name: str
    definition: list[Any]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which is read once a process."""
        if self.hash not in _tokenizers:
            import ray

            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
            _tokenizers.clear()
            _tokenizers[self.hash] = Tokenizer(ray.get(self.definition[0]), self.name)
        return _tokenizers[self.hash]

    def answer(self, request: bytes) -> bytes:
        """See `make_answer`."""
        return make_answer(request, self.tokenizer())


def _answer(encoder: _Encoder, request: bytes) -> bytes:
    return encoder.answer(request)
