"""Text → tokens → shards: tokenizes documents, and writes a token store (see store.py) shard after shard.

documents     [part, part] [part] …            text, a batch of it
ShardBuilder  |AAAAAA|BBB|CC…                  their tokens
StoreWriter   writes a shard when the builder holds SHARD_TOKENS tokens
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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

SHARD_TOKENS = 1 << 25
"""Tokens after which a shard is written: a killed process loses at most as many."""
PIECE_TOKENS, PIECE_DOCUMENTS = 1 << 21, 1 << 14
"""Size after which documents leave the memory: some 8 MiB. (A stream is one document, and waits for its shard.)"""
EncodedPart = tuple[Sequence[int], bool]
"""Tokens, and whether they are targets."""


class WrittenShard(NamedTuple):
    """Figures of a shard that is on disk, and whether it is the last one of its part."""

    documents: int
    tokens: int
    read: int
    is_last: bool


class ShardBuilder:
    """Collects tokenized documents for one shard.

    Args:
        vocabulary_size: every token is less than this.
        is_stream: whether all texts are stretches of one document, which has the name of the first one.

    Attributes:
        read: number of documents (or pairs) of the source so far, including those without tokens.
    """

    def __init__(self, vocabulary_size: int, is_stream: bool = False) -> None:
        self._vocabulary_size, self._is_stream = vocabulary_size, is_stream
        self._tokens = array("H" if vocabulary_size <= 1 << 16 else "I")
        self._spans, self._names, self._weights = array("q"), bytearray(), array("d")
        self._offsets, self._span_offsets, self._name_offsets = (array("q", [0]) for _ in range(3))
        self.read = 0

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return len(self._tokens)

    def add(self, name: str, parts: Sequence[EncodedPart], weight: float = 1.0) -> None:
        """Add a document from its tokens in parts, each with whether they are targets; see `Shard` for its weight.

        Raises:
            ValueError: it has no tokens, or a token outside the vocabulary.
            OverflowError: a token below 0.
        """
        if not any(len(ids) for ids, _ in parts):
            raise ValueError(f"document {name} has no tokens")
        self._extend([(name, parts, weight)])

    def add_batch(self, items: Sequence[Sequence[SourceDocument]], tokenizer: Tokenizer) -> None:
        """Tokenize and add documents, and an end token to those that take one.

        An item is one document, or the two answers of a preference pair; one without tokens is left out.

        Raises:
            ValueError: text that the tokenizer does not know; the message names its document.
        """
        self.read += len(items)
        encoded = iter(_encode([document for item in items for document in item], tokenizer))
        end = [] if tokenizer.end_id is None else [([tokenizer.end_id], True)]
        added = list[tuple[str, Sequence[EncodedPart], float]]()
        for item in items:
            parts = [next(encoded) for _ in item]
            if all(any(ids for ids, _ in each) for each in parts):
                for document, each in zip(item, parts, strict=True):
                    own = each + end if document.takes_end else each
                    added.append((document.name, own, document.weight))
        self._extend(added)

    def _extend(self, documents: Sequence[tuple[str, Sequence[EncodedPart], float]]) -> None:
        """Add documents, each with tokens: their names, parts and weights."""
        if not documents:
            return
        parts = [part for _, each, _ in documents for part in each]
        sizes = np.fromiter((len(ids) for ids, _ in parts), np.int64, len(parts))
        tokens = np.asarray(array("I", chain.from_iterable(ids for ids, _ in parts)))
        if (largest := int(tokens.max())) >= self._vocabulary_size:
            raise ValueError(
                f"token {largest:,} is outside the vocabulary of {self._vocabulary_size:,} tokens"
            )
        counts = [len(parts)] if self._is_stream else [len(each) for _, each, _ in documents]
        documents = documents[:1] if self._is_stream else documents
        owner = np.repeat(np.arange(len(counts)), counts)
        stops = len(self._tokens) + np.cumsum(sizes)
        chosen = np.fromiter((is_target for _, is_target in parts), np.bool_, len(parts)) & (sizes > 0)
        ranges = np.stack((stops - sizes, stops), axis=1)[chosen]
        owner, ends = owner[chosen], stops[np.cumsum(counts) - 1]
        if self._is_stream and len(self):  # the document before continues, and so may its last range
            self._offsets.pop()
            self._span_offsets.pop()
            if self._span_offsets[-1] < len(self._spans) // 2:
                last = self._offsets[-1] + np.asarray(self._spans[-2:])
                del self._spans[-2:]
                owner, ranges = np.append(0, owner), np.vstack((last, ranges))
        else:
            names = [name.encode("utf-8", "replace") for name, _, _ in documents]
            self._names += b"".join(names)
            _append(self._name_offsets, self._name_offsets[-1] + np.cumsum(list(map(len, names))))
            self._weights.extend(weight for _, _, weight in documents)
        # Ranges that follow one another in a document become one.
        begins = np.ones(len(owner), dtype=np.bool_)
        begins[1:] = (ranges[1:, 0] != ranges[:-1, 1]) | (owner[1:] != owner[:-1])
        spans = np.stack((ranges[begins, 0], ranges[np.roll(begins, -1), 1]), axis=1)
        first = np.append(self._offsets[-1], ends[:-1])
        numbers = np.cumsum(np.bincount(owner[begins], minlength=len(counts)))
        _append(self._span_offsets, len(self._spans) // 2 + numbers)
        _append(self._spans, spans - first[owner[begins], None])
        _append(self._offsets, ends)
        _append(self._tokens, tokens)

    def build(self) -> Shard:
        """The documents as a `Shard`. Nothing can be added afterwards."""
        weights = np.asarray(self._weights, dtype="<f8")
        shard = Shard(
            offsets=np.asarray(self._offsets, dtype="<i8"),
            span_offsets=np.asarray(self._span_offsets, dtype="<i8"),
            name_offsets=np.asarray(self._name_offsets, dtype="<i8"),
            spans=np.asarray(self._spans, dtype="<i8").reshape(-1, 2),
            tokens=np.asarray(self._tokens, dtype=f"<u{self._tokens.itemsize}"),
            names=np.frombuffer(self._names, dtype=np.uint8),
            weights=weights if (weights != 1.0).any() else weights[:0],
            read=self.read,
        )
        return replace(shard, content=shard.hash())


def _append(values: array[Any], more: NDArray[Any]) -> None:
    values.frombytes(more.astype(values.typecode).tobytes())


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
        self._builder = self._new_builder()

    @property
    def read(self) -> int:
        """Number of documents (or pairs) of the source that are in shards already."""
        return sum(shard.read for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Number of documents so far; a preference pair counts as two."""
        return sum(shard.documents for shard in self.shards) + self._file.documents + len(self._builder)

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

    def _new_builder(self) -> ShardBuilder:
        return ShardBuilder(self.header.vocabulary_size, self.header.split_by == "position")

    def _next_file(self) -> Path:
        return self.path / shard_name(self._part, len(self.shards))

    def add(self, name: str, parts: Sequence[EncodedPart], weight: float = 1.0) -> None:
        """Add a document: its name, its tokens in pieces, each with whether they are targets, and its weight.

        Raises:
            ValueError: the document has no tokens, or a token outside the vocabulary.
        """
        self._builder.add(name, parts, weight)
        self._builder.read += 1
        self._move_on()

    def add_batch(self, items: Sequence[Sequence[SourceDocument]]) -> None:
        """Tokenize and add documents, or preference pairs; see `ShardBuilder.add_batch`."""
        self._builder.add_batch(items, self._tokenizer)
        self._move_on()

    def _move_on(self) -> None:
        """Move documents from memory to the shard's file, and end the shard, when they are many."""
        own, is_stream = self._builder, self.header.split_by == "position"
        is_open_item = (self._file.documents + len(own)) % self.header.item_size > 0
        if self._file.tokens + own.num_tokens >= SHARD_TOKENS and not is_open_item:
            self.end_shard()
        elif not is_stream and (own.num_tokens >= PIECE_TOKENS or len(own) >= PIECE_DOCUMENTS):
            self._file.append(own.build())
            self._builder = self._new_builder()

    def end_shard(self, noted: Noted | None = None) -> None:
        """Write the documents that were added, if any, as a shard; with `noted` it is the last one of this part."""
        file = self._file
        if not file.documents + len(self._builder) and (noted is None or self.is_finished):
            return
        if self.is_finished:
            raise RuntimeError(f"{self.path}: this part of the store is complete; choose another folder")
        file.append(self._builder.build())
        file.write(noted)
        file.close()
        self.shards.append(WrittenShard(file.documents, file.tokens, file.read, noted is not None))
        self._builder, self._file = self._new_builder(), ShardFile(self._next_file())

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
