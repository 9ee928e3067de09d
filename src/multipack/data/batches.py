"""Units of work: the documents of a source in batches, tokenized in any order, and taken in the source's.

source ─▶ kept documents ─▶ batch batch batch … ─▶ engine (this process, processes, Ray) ─▶ block block block …
          duplicates left out, all counted        at most `window` under way                in the order of the source
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar

from multipack.data.blocks import TokenBlock
from multipack.data.source_document import SourceDocument
from multipack.data.sources import Source

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 4096
"""What is tokenized at once."""


class Batch(NamedTuple):
    """Documents that are tokenized at once.

    Attributes:
        documents: one or more.
        characters: of all their texts.
        done: how far the source was read, in its units.
    """

    documents: list[SourceDocument]
    characters: int
    done: int


class KeptDocuments:
    """The documents of a source in order, without duplicates where these are not wanted; iterated once.

    Of duplicates the first one stays. For each document that stays, 16 bytes of BLAKE2b over its texts, what of
    them are targets and where halves of pairs begin are remembered: about 100 bytes of memory a document. (That
    two of 10¹² different documents share a hash has a chance of about 10⁻¹⁵.)

    Args:
        source: the documents.
        dedup: leave out duplicates.

    Attributes:
        last_name: of the document that was given last.

    Raises:
        ValueError: duplicates of a stream, which is one document.
    """

    def __init__(self, source: Source, dedup: bool) -> None:
        if dedup and source.is_stream:
            raise ValueError(
                "data.dedup=true leaves out documents, and a stream is one: divide the text with data.documents,"
                " or set data.dedup=false"
            )
        self._source = source
        self._seen: set[bytes] | None = set() if dedup else None
        self._duplicates = 0
        self.last_name = ""
        self._has_begun = False
        self._documents = self._kept()

    def _kept(self) -> Iterator[SourceDocument]:
        self._has_begun = True
        for document in self._source:
            if self._seen is not None:
                digest = _digest(document)
                if digest in self._seen:
                    self._duplicates += 1
                    continue
                self._seen.add(digest)
            self.last_name = document.name
            yield document

    def __iter__(self) -> Iterator[SourceDocument]:
        return self._documents

    def __next__(self) -> SourceDocument:
        return next(self._documents)

    @property
    def skipped(self) -> dict[str, int]:
        """What was left out so far: reason → how many."""
        duplicates = {"duplicates": self._duplicates} if self._duplicates else {}
        skipped = self._source.skipped if self._has_begun else {}  # until then, those of an earlier iteration
        return {**skipped, **duplicates}


def _digest(document: SourceDocument) -> bytes:
    """16 bytes that only documents with the same parts share."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{document.border} {document.ended} {document.closed}".encode())
    for text, is_target, is_special in document.parts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(f"\0{len(raw)} {is_target} {is_special}\0".encode())
        digest.update(raw)
    return digest.digest()


def batches(documents: Iterable[SourceDocument], done: Callable[[], int]) -> Iterator[Batch]:
    """Documents in batches.

    Args:
        documents: in order.
        done: how far their source has been read.
    """
    batch, characters = list[SourceDocument](), 0
    for document in documents:
        batch.append(document)
        characters += document.characters
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield Batch(batch, characters, done())
            batch, characters = [], 0
    if batch:
        yield Batch(batch, characters, done())


class Engine(Protocol):
    """Tokenizes batches somewhere. What it gives does not depend on where."""

    def reads(self, source: Source, tokenizes: bool = True) -> Source:
        """The documents of `source`, read where this engine reads them; `encode` takes none of another source.

        Args:
            source: the documents.
            tokenizes: whether they are for `encode`; False: they are counted alone.
        """
        ...

    def encode(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, TokenBlock]]:
        """Each batch with its block, in order.

        Raises:
            ValueError: text that the tokenizer does not know.
        """
        ...

    def close(self) -> None:
        """End what it started."""
        ...


Answer = TypeVar("Answer")


def in_order(
    batches: Iterator[Batch], submit: Callable[[Batch], Future[Answer]], window: int
) -> Iterator[tuple[Batch, Answer]]:
    """Each batch with its answer, in order, at most `window` under way."""
    pending = deque[tuple[Batch, Future[Answer]]]()
    for batch in batches:
        pending.append((batch, submit(batch)))
        if len(pending) >= window:
            first, answer = pending.popleft()
            yield first, answer.result()
    while pending:
        first, answer = pending.popleft()
        yield first, answer.result()
