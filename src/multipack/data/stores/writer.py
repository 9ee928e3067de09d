"""Text → tokens → shards: tokenizes documents, and writes a token store (see store.py) shard after shard.

documents     [part, part] [part] …            text, a batch of it
encoded       [AAA, AAA] [BBB] …               their tokens, which wait in memory
shard_of      |AAAAAA|BBB|CC…                  many of them as arrays, which StoreWriter appends to its file
StoreWriter   writes a shard when it has SHARD_TOKENS tokens
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from multipack.atomic import PARTIAL, is_free, write_atomically
from multipack.data.stores.shards import (
    HEADER,
    SHARDS,
    TOKENIZER,
    Shard,
    ShardFile,
    StoreHeader,
    find_shards,
    shard_name,
)
from multipack.data.text.skipped import Noted
from multipack.data.text.texts import CHAT_TEMPLATE, SourceDocument
from multipack.data.text.tokenizer import Tokenizer
from multipack.planning.lengths import offsets_of

SHARD_TOKENS = 1 << 25
"""Tokens after which a shard is written: a killed process loses at most as many."""
PIECE_TOKENS, PIECE_DOCUMENTS = 1 << 18, 1 << 12
"""Size after which documents leave the memory: some 10 MiB. (A stream is one document, and waits for its shard.)"""
EncodedPart = tuple[Sequence[int], bool]
"""Tokens, and whether they are targets."""


class WrittenShard(NamedTuple):
    """Figures of a shard that is on disk, and whether it is the last one of its part."""

    documents: int
    tokens: int
    read: int
    is_last: bool


class Encoded(NamedTuple):
    """A document as tokens: its name, parts, and weight (see `Shard`)."""

    name: str
    parts: Sequence[EncodedPart]
    weight: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all parts."""
        return sum(len(ids) for ids, _ in self.parts)


def encoded(items: Sequence[Sequence[SourceDocument]], tokenizer: Tokenizer) -> list[Encoded]:
    """The documents of items as tokens, with an end token where they take one.

    An item is one document, or the two answers of a preference pair; one without tokens is left out.

    Raises:
        ValueError: text that the tokenizer does not know; the message names its document.
    """
    parts = iter(_encode([document for item in items for document in item], tokenizer))
    end = [] if tokenizer.end_id is None else [([tokenizer.end_id], True)]
    found = list[Encoded]()
    for item in items:
        own = [next(parts) for _ in item]
        if all(any(ids for ids, _ in each) for each in own):
            found += [
                Encoded(document.name, each + end if document.takes_end else each, document.weight)
                for document, each in zip(item, own, strict=True)
            ]
    return found


def _compact(parts: Iterable[EncodedPart]) -> list[EncodedPart]:
    """The same parts, with 4 bytes for each token."""
    return [(array("I", ids), is_target) for ids, is_target in parts]


def shard_of(documents: Sequence[Encoded], vocabulary_size: int, read: int = 0) -> Shard:
    """Documents, each with tokens, as a shard in memory.

    Args:
        documents: made by `encoded`.
        vocabulary_size: every token is less than this.
        read: number of documents (or pairs) of the source, including those without tokens.

    Raises:
        ValueError: a token outside the vocabulary.
    """
    parts = [part for document in documents for part in document.parts]
    sizes = np.array([len(ids) for ids, _ in parts], dtype=np.int64)
    tokens = np.asarray(array("I", chain.from_iterable(ids for ids, _ in parts)))
    if (largest := int(tokens.max(initial=0))) >= vocabulary_size:
        raise ValueError(f"token {largest:,} is outside the vocabulary of {vocabulary_size:,} tokens")
    owner = np.repeat(np.arange(len(documents)), [len(document.parts) for document in documents])
    offsets = offsets_of(np.bincount(owner, sizes, len(documents)).astype(np.int64))
    stops = np.cumsum(sizes)
    chosen = np.array([is_target for _, is_target in parts], dtype=np.bool_) & (sizes > 0)
    owner, ranges = owner[chosen], np.stack((stops - sizes, stops), axis=1)[chosen]
    # Ranges that follow one another in a document become one.
    begins = np.ones(len(owner), dtype=np.bool_)
    begins[1:] = (ranges[1:, 0] != ranges[:-1, 1]) | (owner[1:] != owner[:-1])
    owner, spans = owner[begins], np.stack((ranges[begins, 0], ranges[np.roll(begins, -1), 1]), axis=1)
    names = [document.name.encode("utf-8", "replace") for document in documents]
    weights = np.array([document.weight for document in documents], dtype=np.float64)
    shard = Shard(
        offsets=offsets,
        span_offsets=offsets_of(np.bincount(owner, minlength=len(documents))),
        name_offsets=offsets_of(np.array([len(name) for name in names], dtype=np.int64)),
        spans=spans - offsets[owner, None],
        tokens=tokens.astype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32),
        names=np.frombuffer(b"".join(names), dtype=np.uint8),
        weights=weights if (weights != 1.0).any() else weights[:0],
        read=read,
    )
    return replace(shard, content=shard.hash())


def _encode(documents: Sequence[SourceDocument], tokenizer: Tokenizer) -> list[list[tuple[list[int], bool]]]:
    """See `Tokenizer.encode_parts`; an error names its document."""
    try:
        return tokenizer.encode_parts([document.parts for document in documents])
    except ValueError:
        for document in documents:
            try:
                tokenizer.encode_parts([document.parts])
            except ValueError as error:
                raise ValueError(f"{document.name}: {error}") from error
        raise


class StoreWriter:
    """Writes a token store, or one part of it.

        with StoreWriter(path, tokenizer) as writer:
            writer.add("a.txt", [(tokenizer.encode(text), True)])

    Shards appear while the block runs, the last one when it ends without an exception. A writer with the same header
    continues after the shards that an interrupted one left (`read` says after how many documents); a
    ValueError in the block removes an unfinished store of one part, since the same input would fail again.

    Args:
        path: folder of the store.
        tokenizer: makes the tokens.
        part: number of this part, from 0.
        **header: other fields of `StoreHeader`: chat_template, key, split_by, overlong, pairs, labels, parts,
            description.

    Attributes:
        noted: about the records of the source; may be set until the block ends.
        shards: figures of the shards written so far, also by an interrupted writer.

    Raises:
        ValueError: `path` holds something else.
        RuntimeError: documents are added to a part that is finished.
    """

    def __init__(self, path: Path | str, tokenizer: Tokenizer, *, part: int = 0, **header: Any) -> None:
        self.path, self.noted, self.shards = Path(path), Noted(), list[WrittenShard]()
        self._tokenizer, self._part = tokenizer, part
        self.header = StoreHeader(tokenizer.vocabulary_size, tokenizer.name, tokenizer.hash, **header)
        self._is_stream = self.header.split_by == "position"
        self._waiting, self._waiting_tokens, self._waiting_read = list[Encoded](), 0, 0

    @property
    def read(self) -> int:
        """Number of documents (or pairs) of the source that are in shards already."""
        return sum(shard.read for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Number of documents so far; a preference pair counts as two, and each stretch of a stream that waits."""
        return sum(shard.documents for shard in self.shards) + self._file.documents + len(self._waiting)

    @property
    def is_finished(self) -> bool:
        """Whether the last shard of this part is there."""
        return bool(self.shards) and self.shards[-1].is_last

    def __enter__(self) -> StoreWriter:
        if not is_free(self.path, leftovers=True) and StoreHeader.find(self.path) != self.header:
            raise ValueError(
                f"{self.path} holds a token store of other documents, another tokenizer or other parts, or something"
                " else; remove it or choose another folder"
            )
        self.header.write(self.path)  # several parts may begin at once: they write the same content
        write_atomically(self.path / TOKENIZER, self._tokenizer.to_json().encode())
        if self.header.chat_template:
            write_atomically(self.path / CHAT_TEMPLATE, self.header.chat_template.encode())
        try:
            for shard in find_shards(self.path, [self._part]):
                numbers = len(shard), len(shard.tokens), shard.read
                self.shards.append(WrittenShard(*numbers, is_last=shard.noted is not None))
        except ValueError:  # a damaged shard: it and all later ones are made again
            pass
        own = shard_name(self._part, 0)[:10]
        for file in self.path.glob(f"{own}-*"):
            if file.name >= self._next_file().name:
                file.unlink(missing_ok=True)
        # What killed writers left; of several parts, others may be writing the header now.
        for file in self.path.glob(f".*{PARTIAL}" if self.header.parts == 1 else f".{own}-*{PARTIAL}"):
            file.unlink(missing_ok=True)
        self._file = ShardFile(self._next_file())
        return self

    def _next_file(self) -> Path:
        return self.path / shard_name(self._part, len(self.shards))

    def add(self, name: str, parts: Sequence[EncodedPart], weight: float = 1.0) -> None:
        """Add a document: its name, its tokens in pieces, each with whether they are targets, and its weight.

        Raises:
            ValueError: the document has no tokens; or, once many wait, one has a token outside the vocabulary.
        """
        document = Encoded(name, _compact(parts), weight)
        if not document.num_tokens:
            raise ValueError(f"document {name} has no tokens")
        self._take([document], 1)

    def add_batch(self, items: Sequence[Sequence[SourceDocument]]) -> None:
        """Tokenize and add documents, or preference pairs; see `encoded`."""
        self._take(encoded(items, self._tokenizer), len(items))

    def _take(self, documents: Sequence[Encoded], read: int) -> None:
        """Add documents; when they are many, move them from memory to the shard's file, and end the shard."""
        if self._is_stream:  # its stretches wait for the whole shard
            documents = [document._replace(parts=_compact(document.parts)) for document in documents]
        self._waiting += documents
        self._waiting_tokens += sum(document.num_tokens for document in documents)
        self._waiting_read += read
        count = len(self._waiting)
        is_open_item = (self._file.documents + count) % self.header.item_size > 0
        if self._file.tokens + self._waiting_tokens >= SHARD_TOKENS and not is_open_item:
            self.end_shard()
        elif not self._is_stream and (self._waiting_tokens >= PIECE_TOKENS or count >= PIECE_DOCUMENTS):
            self._move()

    def _move(self) -> None:
        """Move the documents that wait in memory to the shard's file; stretches of a stream are one document."""
        documents = self._waiting
        if self._is_stream and documents:
            parts = [part for document in documents for part in document.parts]
            documents = [documents[0]._replace(parts=parts)]
        self._file.append(shard_of(documents, self.header.vocabulary_size, self._waiting_read))
        self._waiting, self._waiting_tokens, self._waiting_read = [], 0, 0

    def end_shard(self, noted: Noted | None = None) -> None:
        """Write the documents that were added, if any, as a shard; with `noted` it is the last one of this part."""
        file = self._file
        if not file.documents + len(self._waiting) and (noted is None or self.is_finished):
            return
        if self.is_finished:
            raise RuntimeError(f"{self.path}: this part of the store is complete; choose another folder")
        self._move()
        file.write(noted)
        file.close()
        self.shards.append(WrittenShard(file.documents, file.tokens, file.read, noted is not None))
        self._file = ShardFile(self._next_file())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.end_shard(self.noted)
        finally:
            self._file.close()
        if isinstance(error, ValueError) and self.header.parts == 1 and not self.is_finished:
            remove_store(self.path)


def remove_store(path: Path) -> None:
    """Remove the files of a store, its header first, and the folder if nothing else is in it."""
    for pattern in (HEADER, SHARDS, f".*{PARTIAL}", TOKENIZER, CHAT_TEMPLATE):
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
