"""Reading and tokenizing on a Ray cluster with Ray Data (`pip install "multipack[ray]"`).

    units of files ─▶ read: documents, batch after batch ─▶ tokenize: blocks ─▶ this process, in the order of the source
                      one task a unit                       one task a batch    leaves out duplicates, and writes

The functions are those of one machine, and so is the result, byte for byte. Units are contiguous ranges of files, which
all machines of the cluster must see under the same path; this process alone writes. A source that is no set of files
(the standard library, a data set of Hugging Face's library) is read by this process, and tokenized by tasks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.batches import Batch, batches, in_order
from multipack.data.blocks import TokenBlock, documents_from_bytes, documents_to_bytes, encode
from multipack.data.files import FileSource, FoundFile
from multipack.data.source import Part, Source, SourceDocument
from multipack.data.tokenizer import Tokenizer
from multipack.data.workers import make_answer, read_answer

UNIT_BYTES, MOST_UNITS = 32 << 20, 10_000
"""Bytes of files that one task reads, at least; they are more where there would be more units than these."""
_ROW_BYTES = 1 << 20
"""Rows of Ray Data that are handed on together: one batch of documents, or some small ones."""
Row = dict[str, Any]


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
        self._readings: list[Generator[Row]] = []

    def reads(self, source: Source, tokenizes: bool = True) -> Source:
        """The documents of `source`, read by tasks; itself, if it is no set of files.

        Args:
            source: the documents.
            tokenizes: whether they are tokenized on the way, for `encode`; if not, they can be counted alone.
        """
        return _RaySource(source, self, tokenizes) if isinstance(source, FileSource) else source

    def encode(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, TokenBlock]]:
        """See `Engine`.

        Raises:
            ValueError: text that the tokenizer does not know.
        """
        for first in batches:
            if isinstance(first.documents[0], TokenizedDocument):
                for batch in chain([first], batches):
                    yield _gathered(batch)
                return
            cores = int(self._ray.cluster_resources().get("CPU", 1))
            with self._failures():
                for batch, answer in in_order(chain([first], batches), self._submit, 2 * cores + 1):
                    yield batch, read_answer(answer)

    def _submit(self, batch: Batch) -> Future[Any]:
        future: Future[Any] = self._task.remote(self._encoder, documents_to_bytes(batch.documents)).future()
        return future

    def rows(self, source: FileSource, tokenizes: bool) -> Generator[Row]:
        """What `_Reader` and `_Encoder` make of the files of a source, in order."""
        dataset = self._ray.data.from_items(units := _units(source), override_num_blocks=len(units))
        options = dataset.context  # of this data set alone
        options.enable_progress_bars = options.print_on_execution_start = False
        options.execution_options.preserve_order = True
        options.target_max_block_size = _ROW_BYTES
        # Reading takes about a tenth of the time that tokenizing takes. (And of two steps that ask for as much, Ray
        # makes one task, which would tokenize all that it reads: a large file on one core.)
        shell = source.of(source.files.only([], Path.cwd()))
        dataset = dataset.flat_map(_Reader(shell, tokenizes).rows, num_cpus=0.1, max_retries=3)
        if tokenizes:
            dataset = dataset.map(self._encoder.row, num_cpus=1, max_retries=3)
        rows = _quiet_rows(dataset)
        self._readings.append(rows)
        with self._failures():
            yield from rows

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
        """End what is read, and leave the cluster, if it was joined here."""
        for rows in self._readings:
            rows.close()
        if self._is_ours:
            self._ray.shutdown()


def _quiet_rows(dataset: Any) -> Generator[Row]:
    """The rows of a data set, in order; Ray Data's notes on how it goes are not printed meanwhile."""
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.ERROR)
    rows = iter(dataset.iter_rows())
    try:
        yield from rows
    finally:
        del rows  # with its iterator, Ray Data ends what runs
        log.setLevel(level)


def _units(source: FileSource) -> list[Row]:
    """Contiguous ranges of the files of a source, in order, as rows of plain data."""
    files = source.files
    least = max(UNIT_BYTES, files.total_bytes // MOST_UNITS)
    ranges, size = list[list[FoundFile]](), least
    for file in files.found:
        if size >= least:
            ranges.append([])
            size = 0
        ranges[-1].append(file)
        size += file.size
    ignored = [files.ignored] + [0] * (len(ranges) - 1)  # they are counted once
    return [{"unit": json.dumps(unit)} for unit in zip(ranges, ignored, strict=True)]


# ── in the tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Reader:
    """Reads units.

    Args:
        shell: the source, without its files.
        keeps_text: whether documents are to be tokenized.
    """

    def __init__(self, shell: FileSource, keeps_text: bool) -> None:
        self._shell, self._keeps_text = shell, keeps_text

    def rows(self, row: Row) -> Iterator[Row]:
        """A row for each batch of documents of a unit, `about` which it says what `_Answer` holds; then a last one."""
        found, ignored = json.loads(row["unit"])
        files = self._shell.files
        unit = _Watched(self._shell.of(files.only([FoundFile(*file) for file in found], files.here, ignored)))
        problem = ""
        try:
            for batch in batches(unit, lambda: unit.source.done):
                text = documents_to_bytes(batch.documents) if self._keeps_text else b""
                yield {"about": unit.about(batch.documents, batch.done), "documents": text}
        except ValueError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error}; with --engine ray, each machine of the cluster must see the files"
        yield {"about": unit.about([], unit.source.done, True, problem), "documents": b""}


class _Watched:
    """The documents of a source, and what it skipped between them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._skipped: list[tuple[int, dict[str, int]]] = []
        self._last: dict[str, int] = {}
        self._documents = 0

    def __iter__(self) -> Iterator[SourceDocument]:
        for document in self.source:
            self._note()
            self._documents += 1
            yield document

    def _note(self) -> None:
        if self.source.skipped != self._last:
            self._last = dict(self.source.skipped)
            self._skipped.append((self._documents, self._last))

    def about(
        self, documents: list[SourceDocument], done: int, is_last: bool = False, problem: str = ""
    ) -> str:
        """The documents since the last call, as `_Answer` reads them."""
        if is_last:
            self._note()
        skipped, self._skipped, self._documents = self._skipped, [], 0
        return json.dumps(
            {
                "names": [document.name for document in documents],
                "characters": [sum(len(part.text) for part in document.parts) for document in documents],
                "digests": [_digest(document) for document in documents],
                "skipped": skipped,
                "done": done,
                "is_last": is_last,
                "problem": problem,
            }
        )


def _digest(document: SourceDocument) -> str:
    """16 bytes that only documents share which differ in nothing but their names."""
    return hashlib.blake2b(documents_to_bytes([replace(document, name="")]), digest_size=16).hexdigest()


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

    def row(self, row: Row) -> Row:
        """A row of `_Reader` with the `answer` to its documents, and which of them have tokens."""
        if not row["documents"]:
            return {"about": row["about"], "answer": b"", "has_tokens": b""}
        answer, has_tokens = self.answer(row["documents"]), b""
        if answer[:1] == b"+" and read_answer(answer).num_left_out:
            documents = documents_from_bytes(row["documents"])
            has_tokens = bytes(
                not encode([document], self.tokenizer()).num_left_out for document in documents
            )
        return {"about": row["about"], "answer": answer, "has_tokens": has_tokens}


def _answer(encoder: _Encoder, request: bytes) -> bytes:
    return encoder.answer(request)


# ── in this process ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Answer:
    """What has become of a batch of documents.

    Attributes:
        names: of each document.
        characters: of each document.
        digests: of each document: what only its duplicates share.
        skipped: what was skipped before a document, by its number: reason → how many, since the unit began.
        done: how far the source was read, in its units.
        is_last: whether the unit ends here.
        problem: what is wrong with the unit after these documents; empty = nothing.
        block: the documents; None = they were read only.
        rows: (documents,) where each is in the block; −1 = it has no tokens.
    """

    names: list[str]
    characters: list[int]
    digests: list[str]
    skipped: list[tuple[int, dict[str, int]]]
    done: int
    is_last: bool
    problem: str
    block: TokenBlock | None
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, row: Row, done: int) -> _Answer:
        """What a row says, of a unit before which as much was `done`.

        Raises:
            ValueError: text that the tokenizer does not know.
        """
        about = json.loads(row["about"])
        has_tokens = np.ones(len(about["names"]), dtype=bool)
        if row.get("has_tokens"):
            has_tokens = np.frombuffer(row["has_tokens"], dtype=bool)
        rows = np.where(has_tokens, np.cumsum(has_tokens) - 1, -1)
        about["done"] += done
        return cls(**about, block=read_answer(row["answer"]) if row.get("answer") else None, rows=rows)


@dataclass(frozen=True, eq=False)
class TokenizedDocument(SourceDocument):
    """Stands for a document that was read and tokenized elsewhere; its one part says what its duplicates say, too.

    Attributes:
        answer: the batch that it was in.
        number: its place there.
    """

    answer: _Answer = field(kw_only=True)
    number: int = field(kw_only=True)

    @property
    def characters(self) -> int:
        """Of its text, which is not here."""
        return self.answer.characters[self.number]


class _RaySource(Source):
    """The documents of a source, each as a `TokenizedDocument`."""

    def __init__(self, source: FileSource, engine: RayEngine, tokenizes: bool) -> None:
        super().__init__()
        self._source, self._engine, self._tokenizes = source, engine, tokenizes
        self.is_stream, self.unit, self.total = source.is_stream, source.unit, source.total
        self.overlong = source.overlong
        self._done = 0

    @property
    def hash(self) -> str:
        """See `Source`."""
        return self._source.hash

    @property
    def done(self) -> int:
        """See `Source`."""
        return self._done

    def __iter__(self) -> Iterator[SourceDocument]:
        self.skipped, self._done = {}, 0
        skipped, done = self.skipped, 0  # of the units before
        for row in self._engine.rows(self._source, self._tokenizes):
            answer = _Answer.of(row, done)
            self._done = answer.done
            events = iter([*answer.skipped, (len(answer.names) + 1, {})])
            at, since = next(events)
            for number, (name, digest) in enumerate(zip(answer.names, answer.digests, strict=True)):
                while at <= number:
                    self.skipped = _added(skipped, since)
                    at, since = next(events)
                yield TokenizedDocument(name, (Part(digest, True),), answer=answer, number=number)
            if answer.problem:
                raise ValueError(answer.problem)
            if answer.is_last:
                self.skipped = _added(skipped, answer.skipped[-1][1]) if answer.skipped else self.skipped
                skipped, done = self.skipped, self._done

    def describe(self, documents: int) -> str:
        """See `Source`."""
        return self._source.describe(documents)


def _added(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {reason: first.get(reason, 0) + second.get(reason, 0) for reason in {**first, **second}}


def _gathered(batch: Batch) -> tuple[Batch, TokenBlock]:
    """A batch of documents that are tokenized already, and their block."""
    documents: list[Any] = batch.documents
    blocks = list[TokenBlock]()
    for _, group in groupby(documents, key=lambda document: id(document.answer)):
        mine = list(group)
        answer: _Answer = mine[0].answer
        assert answer.block is not None  # this source tokenizes
        blocks.append(_taken(answer.block, answer.rows[[document.number for document in mine]]))
    return batch._replace(done=documents[-1].answer.done), TokenBlock.joined(blocks)


def _taken(block: TokenBlock, rows: NDArray[np.int64]) -> TokenBlock:
    """Some documents of a block, by their numbers; −1 = one without tokens."""
    kept = rows[rows >= 0]
    left_out = np.array([len(rows) - len(kept)], dtype=np.int64)
    if len(kept) == len(block.lengths):
        return replace(block, left_out=left_out)
    return TokenBlock(
        tokens=_pieces(block.tokens, block.lengths, kept),
        lengths=block.lengths[kept],
        spans=_pieces(block.spans, block.span_counts, kept),
        span_counts=block.span_counts[kept],
        borders=block.borders[kept],
        names=_pieces(block.names, block.name_lengths, kept),
        name_lengths=block.name_lengths[kept],
        left_out=left_out,
    )


def _pieces(values: NDArray[Any], counts: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[Any]:
    """Of values that lie one piece behind the other, `counts` in each, the pieces that are kept."""
    mine = np.zeros(len(counts), dtype=bool)
    mine[kept] = True  # documents stay in order
    return values[np.repeat(mine, counts)]
