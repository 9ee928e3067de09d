"""Tokenizing on a Ray cluster (`pip install "multipack[ray]"`): the functions of `data/workers.py`, as tasks.

The driver reads the documents in order, has batches of them tokenized by stateless tasks, takes the blocks in the same
order and writes them. So the result is that of one machine, byte for byte, and no machine but the driver needs to see
source or store. (Ray Data would read the files itself, and name, count and order documents in its own way.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from multipack.data.batches import Batch, in_order
from multipack.data.blocks import TokenBlock, documents_to_bytes
from multipack.data.tokenizer import Tokenizer
from multipack.data.workers import make_answer, read_answer


class RayEngine:
    """Tokenizes in Ray tasks of one core each.

    They run on the cluster that this process is connected to, or can be (`RAY_ADDRESS`), or else on this machine.

    Args:
        tokenizer: makes the tokens.

    Raises:
        ValueError: Ray is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError('--engine ray needs the package ray: pip install "multipack[ray]"') from error
        self._ray = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
        self._definition = ray.put(tokenizer.to_json())
        self._name, self._hash = tokenizer.name, tokenizer.hash
        self._task = ray.remote(num_cpus=1, max_retries=3)(_tokenize)

    def encode(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, TokenBlock]]:
        """See `Engine`.

        Raises:
            ValueError: text that the tokenizer does not know.
        """
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        for batch, answer in in_order(batches, self._submit, 2 * cores + 1):
            yield batch, read_answer(answer)

    def _submit(self, batch: Batch) -> Future[bytes]:
        request = documents_to_bytes(batch.documents)
        future: Future[bytes] = self._task.remote(
            request, self._hash, self._name, [self._definition]
        ).future()
        return future

    def close(self) -> None:
        """Leave the cluster, if it was joined here."""
        if self._is_ours:
            self._ray.shutdown()


_tokenizers: dict[str, Tokenizer] = {}
"""What this worker of Ray has read: the tokenizer of the last task, by its hash."""


def _tokenize(request: bytes, tokenizer_hash: str, name: str, definition: list[Any]) -> bytes:
    """A task; the tokenizer comes as a reference in a list, so that it is fetched once a process, not once a task."""
    if tokenizer_hash not in _tokenizers:
        import ray

        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
        _tokenizers.clear()
        _tokenizers[tokenizer_hash] = Tokenizer(ray.get(definition[0]), name)
    return make_answer(request, _tokenizers[tokenizer_hash])
