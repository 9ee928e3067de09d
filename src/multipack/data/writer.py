"""Text → tokens → shards: tokenizes documents, and writes a token store (see `data/store.py`) shard after shard.

documents     [part, part] [part] …            text, a batch of it
encode        |AAAAAA|BBB|CC…                  a Shard in memory
StoreWriter   collects shards until they hold SHARD_TOKENS tokens, and writes them as one
"""

from __future__ import annotations

import hashlib
import platform
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

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
    offsets_of,
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
    """

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._tokens, self._spans, self._names = array("q"), array("q"), bytearray()
        self._lengths, self._span_counts, self._name_lengths = array("q"), array("q"), array("q")

    def add(self, name: str, parts: Sequence[EncodedPart]) -> None:
        """Add a document; neighboring parts that are targets become one range.

        Raises:
            ValueError: it has no tokens.
        """
        length, first = 0, len(self._spans)
        for ids, is_target in parts:
            if is_target and ids:
                if len(self._spans) > first and self._spans[-1] == length:
                    self._spans[-1] += len(ids)
                else:
                    self._spans.extend((length, length + len(ids)))
            length += len(ids)
            self._tokens.fromlist(ids if isinstance(ids, list) else list(ids))
        if not length:
            raise ValueError(f"document {name} has no tokens")
        raw = name.encode("utf-8", "replace")
        self._names += raw
        self._lengths.append(length)
        self._span_counts.append((len(self._spans) - first) // 2)
        self._name_lengths.append(len(raw))

    def build(self) -> Shard:
        """The documents.

        Raises:
            ValueError: a token outside the vocabulary.
        """
        tokens = _numbers(self._tokens)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocabulary_size:
            raise ValueError(
                f"tokens from {tokens.min()} to {tokens.max()} for a vocabulary of {self._vocabulary_size:,} tokens"
            )
        return Shard(
            offsets=offsets_of(_numbers(self._lengths)),
            span_offsets=offsets_of(_numbers(self._span_counts)),
            name_offsets=offsets_of(_numbers(self._name_lengths)),
            spans=_numbers(self._spans).reshape(-1, 2),
            tokens=tokens.astype(token_dtype(self._vocabulary_size)),
            names=np.frombuffer(bytes(self._names), dtype=np.uint8),
        )


def _numbers(values: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.int64) if values else np.zeros(0, dtype=np.int64)


def encode(items: Sequence[Sequence[SourceDocument]], tokenizer: Tokenizer) -> Shard:
    """Tokenize documents, and add the end token to those that do not end themselves.

    Args:
        items: documents that belong together: one each, or the two answers of a preference pair. Items in which a
            document has no tokens are left out.
        tokenizer: makes the tokens.

    Raises:
        ValueError: text that the tokenizer does not know; the message names its document.
    """
    builder = ShardBuilder(tokenizer.vocabulary_size)
    encoded = iter(_encode([document for item in items for document in item], tokenizer))
    for item in items:
        found = [next(encoded) for _ in item]
        if not all(any(ids for ids, _ in parts) for parts in found):
            continue
        for document, parts in zip(item, found, strict=True):
            if document.ended and not document.closed and tokenizer.end_id is not None:
                parts.append(([tokenizer.end_id], True))
            builder.add(document.name, parts)
    return builder.build()


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
        key: identifies source, settings and tokenizer.
        description: one line for people, or a function of the number of documents that returns it.
        split_by: `position`: the documents are stretches of one text, and each shard is one document.
        overlong: policy for documents longer than a pack where `data.overlong` is auto.
        pairs: documents come two by two: the chosen and the rejected answer of a preference pair.
        replace: remove another store at `path`.
        chat_template: chat template of the documents, as JSON.
        part: number of this part, from 0.
        parts: number of parts. The writer that finishes the last one writes the header.
        shard_tokens: tokens after which a shard is written.

    Attributes:
        skipped: reason → number of entries that the source left out; may be set until the block ends.
        read: documents (or pairs) of the source that are in shards already.
        tokens: tokens written so far.
        shards: shards written so far.

    Raises:
        FileExistsError: `path` holds something else, and `replace` is not set.
    """

    def __init__(
        self,
        path: Path | str,
        tokenizer: Tokenizer,
        *,
        key: str = "",
        description: str | Callable[[int], str] = "",
        split_by: str = "document",
        overlong: str = "error",
        pairs: bool = False,
        replace: bool = False,
        chat_template: str = "",
        part: int = 0,
        parts: int = 1,
        shard_tokens: int = 0,
    ) -> None:
        self.path, self.skipped = Path(path), dict[str, int]()
        self.read = self.tokens = 0
        self.shards: list[ShardEntry] = []
        self._tokenizer, self._description, self._chat_template = tokenizer, description, chat_template
        self._part, self._replace = part, replace
        self._shard_tokens = shard_tokens or SHARD_TOKENS
        self._waiting: list[Shard] = []
        self._waiting_read = self._waiting_tokens = 0
        self.recipe = StoreHeader(
            vocabulary_size=tokenizer.vocabulary_size,
            end_id=tokenizer.end_id,
            tokenizer=tokenizer.name,
            tokenizer_hash=tokenizer.hash,
            chat_template_hash=hashlib.sha256(chat_template.encode()).hexdigest() if chat_template else "",
            key=key,
            split_by=split_by,
            overlong=overlong,
            pairs=pairs,
            parts=parts,
            python=platform.python_version(),
        )

    def __enter__(self) -> StoreWriter:
        if not self._continues():
            # Another part of the same store may have written its recipe since.
            if not (self._replace or is_free(self.path, leftovers=True) or self._continues()):
                raise FileExistsError(f"{self.path} holds something else; remove it or choose another folder")
            if self._replace:
                remove_store(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
        # Several parts may begin at once: they write the same content, the recipe first.
        self.recipe.write(self.path / RECIPE)
        write_atomically(self.path / TOKENIZER, self._tokenizer.to_json().encode())
        if self._chat_template:
            write_atomically(self.path / CHAT_TEMPLATE, self._chat_template.encode())
        for file in self.path.glob(f".{shard_name(self._part, 0)[:10]}*{PARTIAL}"):
            file.unlink(missing_ok=True)
        self._take_over()
        return self

    def _continues(self) -> bool:
        """Whether an unfinished store of the same recipe is at `path`."""
        try:
            found = StoreHeader.read(self.path / RECIPE)
        except ValueError:
            return False
        return found.is_for(self.recipe) and not (self.path / HEADER).exists()

    def _take_over(self) -> None:
        """Count the shards that are there already; those after a damaged one are removed."""
        while (file := self._next_file()).is_file():
            try:
                self._count(open_shard(file)[1])
            except ValueError:
                break
        for file in self.path.glob(f"{shard_name(self._part, 0)[:10]}*"):
            if file.name >= self._next_file().name:
                file.unlink()

    def _next_file(self) -> Path:
        return self.path / shard_name(self._part, len(self.shards))

    def _count(self, entry: ShardEntry) -> None:
        self.shards.append(entry)
        self.read += entry.read
        self.tokens += entry.tokens

    def add(self, name: str, parts: Sequence[EncodedPart]) -> None:
        """Add a document.

        Args:
            name: for messages.
            parts: its tokens in pieces, each with whether they are targets.

        Raises:
            ValueError: the document has no tokens, or a token outside the vocabulary.
        """
        builder = ShardBuilder(self._tokenizer.vocabulary_size)
        builder.add(name, parts)
        self.extend(builder.build())

    def extend(self, shard: Shard, read: int | None = None) -> None:
        """Add tokenized documents.

        Args:
            shard: the documents.
            read: documents (or pairs) of the source that they are, those without tokens included; None = all have some.
        """
        self._waiting.append(shard)
        self._waiting_read += len(shard) if read is None else read
        self._waiting_tokens += len(shard.tokens)
        if self._waiting_tokens >= self._shard_tokens and not (
            self.recipe.pairs and sum(map(len, self._waiting)) % 2
        ):
            self.end_shard()

    def end_shard(self) -> None:
        """Write the documents that were added as a shard; without any, do nothing."""
        if self._waiting_tokens:
            shard = Shard.joined(self._waiting)
            if self.recipe.split_by == "position":
                shard = shard.as_one_document(shard.name(0) if len(shard) else "")
            self._count(write_shard(self._next_file(), shard, self._waiting_read))
            self._waiting, self._waiting_read, self._waiting_tokens = [], 0, 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end_shard()
            replace(self.recipe, skipped=self.skipped, shards=tuple(self.shards)).write(
                self.path / part_name(self._part)
            )
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
        parts, skipped = [StoreHeader.read(file) for file in files], dict[str, int]()
    except ValueError:
        if (path / HEADER).is_file():  # the writer of another part has finished the store meanwhile
            return True
        raise
    for part in parts:
        for reason, count in part.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    header = replace(recipe, skipped=skipped, shards=tuple(shard for part in parts for shard in part.shards))
    text = description if isinstance(description, str) else description(header.documents)
    replace(header, description=text).write(path / HEADER)
    for file in files:
        file.unlink(missing_ok=True)
    return True


def remove_store(path: Path) -> None:
    """Remove the files of a store, its header first, and the folder if nothing else is in it."""
    if not path.is_dir():
        return
    names = (HEADER, "part-*.json", RECIPE, "shard-*.safetensors", ".*" + PARTIAL, TOKENIZER, CHAT_TEMPLATE)
    for name in names:
        for file in path.glob(name):
            if file.is_file():
                file.unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()
