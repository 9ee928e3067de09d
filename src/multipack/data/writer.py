"""Text → tokens → shards: tokenizes documents, and writes a token store (see `data/store.py`) shard after shard.

documents     [part, part] [part] …            text, a batch of it
ShardBuilder  |AAAAAA|BBB|CC…                  their tokens
StoreWriter   writes a shard when the builder holds SHARD_TOKENS tokens
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from multipack.atomic import PARTIAL, is_free, write_atomically
from multipack.data.shards import (
    CHAT_TEMPLATE,
    HEADER,
    SHARDS,
    TOKENIZER,
    Notes,
    Shard,
    StoreHeader,
    find_shards,
    open_shard,
    shard_name,
    write_shard,
)
from multipack.data.skipped import Places
from multipack.data.texts import SourceDocument
from multipack.data.tokenizer import Tokenizer

SHARD_TOKENS = 1 << 25
"""Tokens after which a shard is written: what a kill costs at most, and what is held in memory (2 or 4 bytes each)."""


class ShardBuilder:
    """Collects tokenized documents.

    Args:
        vocabulary_size: every token is less than this.
        is_stream: whether all texts are stretches of one document, which has the name of the first one.

    Attributes:
        read: number of documents (or pairs) of the source so far, including those without tokens.
    """

    def __init__(self, vocabulary_size: int, is_stream: bool = False) -> None:
        self._vocabulary_size, self._is_stream = vocabulary_size, is_stream
        self._tokens, self._spans, self._names = array("I"), array("q"), bytearray()
        self._weights = array("d")
        self._offsets, self._span_offsets, self._name_offsets = (array("q", [0]) for _ in range(3))
        self.read = 0

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return len(self._tokens)

    def add(self, name: str, parts: Sequence[tuple[Sequence[int], bool]], weight: float = 1.0) -> None:
        """Add a document from its tokens in parts, each with whether they are targets; see `Shard` for its weight.

        Raises:
            ValueError: it has no tokens.
            OverflowError: a token below 0.
        """
        if not any(len(ids) for ids, _ in parts):
            raise ValueError(f"document {name} has no tokens")
        if self._is_stream and len(self):  # the document before continues
            self._offsets.pop()
            self._span_offsets.pop()
        else:
            self._names += name.encode("utf-8", "replace")
            self._name_offsets.append(len(self._names))
            self._weights.append(weight)
        begin, first_span = self._offsets[-1], self._span_offsets[-1]
        for ids, is_target in parts:
            start = len(self._tokens) - begin
            self._tokens.extend(ids)
            stop = len(self._tokens) - begin
            if not is_target or start == stop:
                continue
            if len(self._spans) > 2 * first_span and self._spans[-1] == start:
                self._spans[-1] = stop
            else:
                self._spans.extend((start, stop))
        self._offsets.append(len(self._tokens))
        self._span_offsets.append(len(self._spans) // 2)

    def add_batch(self, items: Sequence[Sequence[SourceDocument]], tokenizer: Tokenizer) -> None:
        """Tokenize and add documents, and an end token to those that take one.

        An item is one document, or the two answers of a preference pair; one without tokens is left out.

        Raises:
            ValueError: text that the tokenizer does not know; the message names its document.
        """
        self.read += len(items)
        encoded = iter(_encode([document for item in items for document in item], tokenizer))
        for item in items:
            parts = [next(encoded) for _ in item]
            if not all(any(ids for ids, _ in each) for each in parts):
                continue
            for document, each in zip(item, parts, strict=True):
                if document.takes_end and tokenizer.end_id is not None:
                    each.append(([tokenizer.end_id], True))
                self.add(document.name, each, document.weight)

    def build(
        self, skipped: dict[str, int] | None = None, notes: Notes | None = None, places: Places | None = None
    ) -> Shard:
        """The documents as a shard, see there; `ValueError` for a token outside the vocabulary."""
        tokens = np.array(self._tokens, dtype=np.uint32)
        if len(tokens) and int(tokens.max()) >= self._vocabulary_size:
            raise ValueError(
                f"token {tokens.max():,} is outside the vocabulary of {self._vocabulary_size:,} tokens"
            )
        weights = np.array(self._weights, dtype=np.float64)
        shard = Shard(
            offsets=np.array(self._offsets, dtype=np.int64),
            span_offsets=np.array(self._span_offsets, dtype=np.int64),
            name_offsets=np.array(self._name_offsets, dtype=np.int64),
            spans=np.array(self._spans, dtype=np.int64).reshape(-1, 2),
            tokens=tokens.astype("<u2" if self._vocabulary_size <= 1 << 16 else "<u4"),
            names=np.frombuffer(bytes(self._names), dtype=np.uint8),
            weights=weights if (weights != 1.0).any() else weights[:0],
            read=self.read,
            skipped=skipped,
            notes=notes or {},
            places=places or {},
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
    continues after the shards that an interrupted one left (`read` says after which documents); a ValueError
    in the block removes the shards, since the same input would fail again.

    Args:
        path: folder of the store.
        tokenizer: makes the tokens.
        part: number of this part, from 0.
        **header: other fields of `StoreHeader`: chat_template, key, split_by, overlong, pairs, labels, parts,
            description.

    Attributes:
        skipped: reason → number of entries that the source left out; may be set until the block ends.
        notes: what people should know about records, see `Shard`; may be set until the block ends.
        places: reason → names of the first of them.
        shards: shards written so far, those of an interrupted writer among them.

    Raises:
        ValueError: `path` holds something else.
        RuntimeError: documents are added to a part that is finished.
    """

    def __init__(self, path: Path | str, tokenizer: Tokenizer, *, part: int = 0, **header: Any) -> None:
        self.path, self.skipped, self.shards = Path(path), dict[str, int](), list[Shard]()
        self.notes: Notes = {}
        self.places = Places()
        self._tokenizer, self._part = tokenizer, part
        self.header = StoreHeader(tokenizer.vocabulary_size, tokenizer.name, tokenizer.hash, **header)
        self._begin_shard()

    @property
    def read(self) -> int:
        """Number of documents (or pairs) of the source that are in shards already."""
        return sum(shard.read for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Number of documents so far; a preference pair counts as two."""
        return sum(map(len, self.shards)) + len(self._builder)

    @property
    def is_finished(self) -> bool:
        """Whether the last shard of this part is there."""
        return bool(self.shards) and self.shards[-1].skipped is not None

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
                self.shards.append(shard)
        except ValueError:  # a damaged shard: it and those after it are made again
            pass
        own = shard_name(self._part, 0)[:10]
        for file in self.path.glob(f"{own}-*"):
            if file.name >= self._next_file().name:
                file.unlink(missing_ok=True)
        # What killed writers left; of several parts, others may be writing the header now.
        for file in self.path.glob(f".*{PARTIAL}" if self.header.parts == 1 else f".{own}-*{PARTIAL}"):
            file.unlink(missing_ok=True)
        return self

    def _next_file(self) -> Path:
        return self.path / shard_name(self._part, len(self.shards))

    def _begin_shard(self) -> None:
        self._builder = ShardBuilder(self.header.vocabulary_size, self.header.split_by == "position")

    def add(self, name: str, parts: Sequence[tuple[Sequence[int], bool]], weight: float = 1.0) -> None:
        """Add a document: its name, its tokens in pieces, each with whether they are targets, and its weight.

        Raises:
            ValueError: the document has no tokens, or a token outside the vocabulary.
        """
        self._builder.add(name, parts, weight)
        self._builder.read += 1
        self._end_full_shard()

    def add_batch(self, items: Sequence[Sequence[SourceDocument]]) -> None:
        """Tokenize and add documents, or preference pairs; see `ShardBuilder.add_batch`."""
        self._builder.add_batch(items, self._tokenizer)
        self._end_full_shard()

    def _end_full_shard(self) -> None:
        is_open_pair = self.header.pairs and len(self._builder) % 2
        if self._builder.num_tokens >= SHARD_TOKENS and not is_open_pair:
            self.end_shard()

    def end_shard(self, skipped: dict[str, int] | None = None) -> None:
        """Write the documents that were added, if any, as a shard; with `skipped` it is the last one of this part."""
        if not len(self._builder) and (skipped is None or self.is_finished):
            return
        if self.is_finished:
            raise RuntimeError(f"{self.path}: this part of the store is complete; choose another folder")
        file = self._next_file()
        last = () if skipped is None else (self.notes, self.places)
        write_shard(file, self._builder.build(skipped, *last))
        self.shards.append(open_shard(file))
        self._begin_shard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end_shard(self.skipped)
        elif issubclass(kind, ValueError) and self.header.parts == 1 and not self.is_finished:
            remove_store(self.path)


def remove_store(path: Path) -> None:
    """Remove the files of a store, its header first, and the folder if nothing else is in it."""
    for pattern in (HEADER, SHARDS, f".*{PARTIAL}", TOKENIZER, CHAT_TEMPLATE):
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
