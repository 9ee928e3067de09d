"""Processes that tokenize, on this machine.

    this process     reads ─▶ deals batches ┌─▶ worker ─┐ ─▶ takes blocks in order ─▶ writes
                                            └─▶ worker ─┘

Workers are interpreters of their own that speak over pipes, in JSON and safetensors: nothing is forked, the caller's
script is not run again (as multiprocessing would), and nothing is unpickled. A worker whose caller ends, however it
ends, finds its pipe closed, and ends too.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from queue import SimpleQueue
from typing import IO

from multipack.data.batches import Batch, in_order
from multipack.data.blocks import TokenBlock, documents_from_bytes, documents_to_bytes, encode
from multipack.data.sources import Source
from multipack.data.tokenizer import Tokenizer

WORTH_WORKERS = 4 << 20
"""Characters after which workers are started: about a second of work; they start in some tenths of one."""
_SIZE = struct.Struct("<Q")
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from multipack.data.workers import work; work(sys.argv[2])"
)


class LocalEngine:
    """Tokenizes on this machine: in this process, and in others where that pays.

    Args:
        tokenizer: makes the tokens.
        workers: processes beside this one; 0 = one a core after the first 4 M characters; 1 = this process alone,
            with the threads of the `tokenizers` library.
    """

    def __init__(self, tokenizer: Tokenizer, workers: int = 0) -> None:
        self._tokenizer = tokenizer
        self._count = workers or _cores()
        self._characters_left = 0 if workers else WORTH_WORKERS
        self._workers: Workers | None = None

    def reads(self, source: Source, tokenizes: bool = True) -> Source:
        """See `Engine`: this process reads."""
        return source

    def encode(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, TokenBlock]]:
        """See `Engine`.

        Raises:
            ValueError: text that the tokenizer does not know.
            ChildProcessError: a worker was killed.
        """
        for batch in batches:
            if self._count > 1 and self._characters_left <= 0:
                self._workers = self._workers or Workers(self._tokenizer, self._count)
                yield from in_order(chain([batch], batches), self._workers.submit, 2 * self._count + 1)
                return
            yield batch, encode(batch.documents, self._tokenizer)
            self._characters_left -= batch.characters

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes that tokenize.

    Args:
        tokenizer: makes the tokens.
        count: how many.
    """

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        definition = tokenizer.to_json().encode()
        self._processes = [_Worker(definition, tokenizer.name) for _ in range(count)]
        self._idle = SimpleQueue[_Worker]()
        for worker in self._processes:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, "tokenize")

    @property
    def process_ids(self) -> list[int]:
        """Of the workers."""
        return [worker.process.pid for worker in self._processes]

    def submit(self, batch: Batch) -> Future[TokenBlock]:
        """Have a batch tokenized."""
        return self._threads.submit(self._encode, batch)

    def _encode(self, batch: Batch) -> TokenBlock:
        worker = self._idle.get()  # there are as many threads as workers
        try:
            return worker.encode(batch)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End them, and what they are at."""
        for worker in self._processes:
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._processes:
            worker.close()


class _Worker:
    """One process, from this side."""

    def __init__(self, definition: bytes, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "TOKENIZERS_PARALLELISM": "false",
            },  # as many workers as cores: one thread each
        )
        self._definition: bytes | None = definition

    def encode(self, batch: Batch) -> TokenBlock:
        given, taken = self.process.stdin, self.process.stdout
        assert given is not None
        assert taken is not None
        answer = None
        try:
            if self._definition is not None:
                _send(given, self._definition)
                self._definition = None
            _send(given, documents_to_bytes(batch.documents))
            answer = _receive(taken)
        except BrokenPipeError:
            pass
        if answer is None:
            raise ChildProcessError(self._end())
        return read_answer(answer)

    def _end(self) -> str:
        status = self.process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return (
            f"a process that tokenizes {how}; this machine may be out of memory: "
            "lower data.workers, and start again: finished parts are kept"
        )

    def close(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def make_answer(request: bytes, tokenizer: Tokenizer) -> bytes:
    """Tokenize documents given as bytes, and give their block as bytes, or what is wrong with them."""
    try:
        return b"+" + encode(documents_from_bytes(request), tokenizer).to_bytes()
    except ValueError as error:
        return b"-" + str(error).encode("utf-8", "replace")


def read_answer(answer: bytes) -> TokenBlock:
    """The block that `make_answer` gave.

    Raises:
        ValueError: what it said is wrong.
    """
    if answer[:1] == b"-":
        raise ValueError(answer[1:].decode())
    return TokenBlock.from_bytes(answer[1:])


def work(name: str) -> None:
    """What a worker does: read a tokenizer, then answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, who ends us
    given, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that prints can come between the answers
    definition = _receive(given)
    if definition is None:
        return
    tokenizer = Tokenizer(definition.decode(), name)
    while (request := _receive(given)) is not None:
        try:
            _send(out, make_answer(request, tokenizer))
        except BrokenPipeError:
            os._exit(0)


def _send(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(_SIZE.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """What the other side sent; None when it has ended."""
    size = pipe.read(_SIZE.size)
    if len(size) < _SIZE.size:
        return None
    (length,) = _SIZE.unpack(size)
    content: bytes = pipe.read(length)
    return content if len(content) == length else None
