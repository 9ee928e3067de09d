"""Text → tokens → shards: tokenizes documents, and writes a token store (see `data/store.py`) shard after shard.

documents     [part, part] [part] …            text, a batch of it
encode        |AAAAAA|BBB|CC…                  added to a ShardBuilder
StoreWriter   writes a shard when the builder holds SHARD_TOKENS tokens
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.atomic import PARTIAL, is_free, write_atomically
from multipack.data.shards import (
    CHAT_TEMPLATE,
    HEADER,
    RECIPE,
    TOKENIZER,
    Shard,
    ShardEntry,
    StoreHeader,
    add_skipped,
    open_shard,
    part_name,
    shard_name,
    token_dtype,
    write_shard,
)
from multipack.data.texts import SourceDocument
from multipack.data.tokenizer import Tokenizer

SHARD_TOKENS = 1 << 25
"""Tokens after which a shard is written: what a kill costs at most, and what is held in memory (2 or 4 bytes each)."""
EncodedPart = tuple[Sequence[int], bool]
"""Tokens, and whether they are targets."""


class ShardBuilder:
    """Collects tokenized documents.

    Args:
        vocabulary_size: every token is less than this.
        is_stream: whether all texts are stretches of one document, which has the name of the first one.
    """

    def __init__(self, vocabulary_size: int, is_stream: bool = False) -> None:
        self._vocabulary_size, self._is_stream = vocabulary_size, is_stream
        self._tokens, self._spans, self._names = array("I"), array("q"), bytearray()
        self._lengths, self._span_counts, self._name_lengths = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return len(self._tokens)

    def add(self, name: str, parts: Sequence[EncodedPart]) -> None:
        """Add a document; neighboring parts that are targets become one range.

        Raises:
            ValueError: it has no tokens, or one outside the vocabulary.
        """
        if not any(len(ids) for ids, _ in parts):
            raise ValueError(f"document {name} has no tokens")
        if not (self._is_stream and self._lengths):
            raw = name.encode("utf-8", "replace")
            self._names += raw
            self._name_lengths.append(len(raw))
            self._lengths.append(0)
            self._span_counts.append(0)
        for ids, is_target in parts:
            length = self._lengths[-1]
            if is_target and len(ids):
                if self._span_counts[-1] and self._spans[-1] == length:
                    self._spans[-1] += len(ids)
                else:
                    self._spans.extend((length, length + len(ids)))
                    self._span_counts[-1] += 1
            try:
                self._tokens.extend(ids)
            except OverflowError:
                raise ValueError(f"document {name} has a token below 0 or above 4,294,967,295") from None
            self._lengths[-1] += len(ids)

    def build(self) -> Shard:
        """The documents.

        Raises:
            ValueError: a token outside the vocabulary.
        """
        tokens = np.array(self._tokens, dtype=np.uint32)
        if len(tokens) and int(tokens.max()) >= self._vocabulary_size:
            raise ValueError(
                f"token {tokens.max():,} is outside the vocabulary of {self._vocabulary_size:,} tokens"
            )
        return Shard(
            offsets=_offsets(self._lengths),
            span_offsets=_offsets(self._span_counts),
            name_offsets=_offsets(self._name_lengths),
            spans=np.array(self._spans, dtype=np.int64).reshape(-1, 2),
            tokens=tokens.astype(token_dtype(self._vocabulary_size)),
            names=np.frombuffer(bytes(self._names), dtype=np.uint8),
        )


def _offsets(lengths: array[int]) -> NDArray[np.int64]:
    """(n + 1,) 0 and the cumulative sums of n lengths."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def encode(
    items: Sequence[Sequence[SourceDocument]], tokenizer: Tokenizer
) -> Iterator[list[tuple[str, list[tuple[list[int], bool]]]]]:
    """Tokenize documents, and add the end token to those that do not end themselves.

    Args:
        items: documents that belong together: one each, or the two answers of a preference pair.
        tokenizer: makes the tokens.

    Yields:
        For each item its documents as (name, parts). Items in which a document has no tokens are left out.

    Raises:
        ValueError: text that the tokenizer does not know; the message names its document.
    """
    encoded = iter(_encode([document for item in items for document in item], tokenizer))
    for item in items:
        found = [(document.name, next(encoded)) for document in item]
        if not all(any(ids for ids, _ in parts) for _, parts in found):
            continue
        for document, (_, parts) in zip(item, found, strict=True):
            if document.ended and not document.closed and tokenizer.end_id is not None:
                parts.append(([tokenizer.end_id], True))
        yield found


def _encode(documents: Sequence[SourceDocument], tokenizer: Tokenizer) -> list[list[tuple[list[int], bool]]]:
    try:
        return tokenizer.encode_parts([document.parts for document in documents])
    except ValueError:
        for document in documents:  # finds the one to name
            try:
                tokenizer.encode_parts([document.parts])
            except ValueError as error:
                raise ValueError(f"{document.name}: {error}") from error
        raise


class StoreWriter:
    """Writes a token store, or one part of it.

        with StoreWriter(path, tokenizer) as writer:
            writer.add("a.txt", [(tokenizer.encode(text), True)])

    Shards appear while the block runs, and the header when it has ended without an exception. A writer of the same
    recipe continues after the shards that an interrupted one left (`read` says after which documents); a ValueError
    in the block removes the shards, since the same input would fail again.

    Args:
        path: folder of the store.
        tokenizer: makes the tokens.
        description: one line for people, or a function of the number of documents (or pairs) that returns it.
        chat_template: chat template of the documents, as JSON.
        part: number of this part, from 0. The writer that finishes the last part writes the header.
        shard_tokens: tokens after which a shard is written; 0 = `SHARD_TOKENS`.
        **recipe: other fields of `StoreHeader`: key, split_by, overlong, pairs, parts.

    Attributes:
        skipped: reason → number of entries that the source left out; may be set until the block ends.
        read: documents (or pairs) of the source that are in shards already.
        shards: shards written so far.

    Raises:
        ValueError: `path` holds something else.
    """

    def __init__(
        self,
        path: Path | str,
        tokenizer: Tokenizer,
        *,
        description: str | Callable[[int], str] = "",
        chat_template: str = "",
        part: int = 0,
        shard_tokens: int = 0,
        **recipe: Any,
    ) -> None:
        self.path, self.read = Path(path), 0
        self.skipped, self.shards = dict[str, int](), list[ShardEntry]()
        self._tokenizer, self._description, self._chat_template = tokenizer, description, chat_template
        self._part, self._shard_tokens = part, shard_tokens or SHARD_TOKENS
        self.recipe = StoreHeader(
            tokenizer.vocabulary_size,
            tokenizer.name,
            tokenizer.hash,
            hashlib.sha256(chat_template.encode()).hexdigest() if chat_template else "",
            **recipe,
        )
        self._begin_shard()

    def __enter__(self) -> StoreWriter:
        # Another part of the same store may write its recipe between the first look and the second.
        if not (self._continues() or is_free(self.path, leftovers=True) or self._continues()):
            raise ValueError(
                f"{self.path} holds a token store of other documents, another tokenizer or other parts, a damaged one,"
                " or something else; remove it or choose another folder"
            )
        # Several parts may begin at once: they write the same content, the recipe first.
        self.recipe.write(self.path / RECIPE)
        write_atomically(self.path / TOKENIZER, self._tokenizer.to_json().encode())
        if self._chat_template:
            write_atomically(self.path / CHAT_TEMPLATE, self._chat_template.encode())
        self._take_over()
        return self

    def _continues(self) -> bool:
        """Whether an unfinished store of the same recipe is at `path`."""
        found = StoreHeader.find(self.path / RECIPE)
        return found is not None and found.is_for(self.recipe) and not (self.path / HEADER).exists()

    def _take_over(self) -> None:
        """Count the shards that are there already; unfinished ones, and those after a damaged one, are removed."""
        while self._next_file().is_file():
            try:
                self.shards.append(open_shard(self._next_file())[1])
            except ValueError:
                break
        self.read = sum(shard.read for shard in self.shards)
        for file in self.path.glob(f"*{shard_name(self._part, 0)[:10]}-*"):
            if file.name.endswith(PARTIAL) or file.name >= self._next_file().name:
                file.unlink(missing_ok=True)

    def _next_file(self) -> Path:
        return self.path / shard_name(self._part, len(self.shards))

    def _begin_shard(self) -> None:
        self._builder = ShardBuilder(self.recipe.vocabulary_size, self.recipe.split_by == "position")
        self._builder_read = 0

    def add(self, name: str, parts: Sequence[EncodedPart]) -> None:
        """Add a document.

        Args:
            name: for messages.
            parts: its tokens in pieces, each with whether they are targets.

        Raises:
            ValueError: the document has no tokens, or a token outside the vocabulary.
        """
        self._builder.add(name, parts)
        self._count(1)

    def add_batch(self, items: Sequence[Sequence[SourceDocument]]) -> None:
        """Tokenize and add documents, or preference pairs; see `encode`."""
        for item in encode(items, self._tokenizer):
            for name, parts in item:
                self._builder.add(name, parts)
        self._count(len(items))

    def _count(self, read: int) -> None:
        """Count `read` documents (or pairs) of the source, and write the shard if it is large enough."""
        self._builder_read += read
        is_open_pair = self.recipe.pairs and len(self._builder) % 2
        if self._builder.num_tokens >= self._shard_tokens and not is_open_pair:
            self.end_shard()

    def end_shard(self) -> None:
        """Write the documents that were added as a shard; without any, do nothing."""
        if len(self._builder):
            self.shards.append(write_shard(self._next_file(), self._builder.build(), self._builder_read))
            self.read += self._builder_read
            self._begin_shard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end_shard()
            finished = replace(self.recipe, skipped=self.skipped, shards=tuple(self.shards))
            finished.write(self.path / part_name(self._part))
            finish_store(self.path, self._description)
        elif issubclass(kind, ValueError) and self.recipe.parts == 1:
            remove_store(self.path)


def finish_store(path: Path, description: str | Callable[[int], str] = "") -> bool:
    """Write the header of a store of which all parts are finished; returns whether they are.

    Raises:
        ValueError: a file of the store is damaged.
    """
    recipe = StoreHeader.read(path / RECIPE)
    files = [path / part_name(part) for part in range(recipe.parts)]
    if (path / HEADER).is_file() or not all(file.is_file() for file in files):
        return (path / HEADER).is_file()  # the writer of another part may have been faster
    try:
        parts = [StoreHeader.read(file) for file in files]
    except ValueError:
        if (path / HEADER).is_file():  # the writer of another part has finished the store meanwhile
            return True
        raise
    header = replace(
        recipe, skipped=add_skipped(parts), shards=tuple(shard for part in parts for shard in part.shards)
    )
    count = sum(shard.documents for shard in header.shards) // (2 if header.pairs else 1)
    text = description if isinstance(description, str) else description(count)
    replace(header, description=text).write(path / HEADER)
    for file in files:
        file.unlink(missing_ok=True)
    return True


def store_files(path: Path) -> list[Path]:
    """The files of a store at `path`, its header first."""
    patterns = (
        HEADER,
        "part-*.json",
        RECIPE,
        "shard-*.safetensors",
        ".*" + PARTIAL,
        TOKENIZER,
        CHAT_TEMPLATE,
    )
    return [file for pattern in patterns for file in path.glob(pattern) if file.is_file()]


def remove_store(path: Path) -> None:
    """Remove the files of a store, its header first, and the folder if nothing else is in it."""
    for file in store_files(path):
        file.unlink(missing_ok=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
