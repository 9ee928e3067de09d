"""The token store: a folder of shards, complete when its header is there.

books/
  recipe.json                     source, settings and tokenizer; written first
  tokenizer.json
  chat_template.json              of chats only
  shard-0000-00000.safetensors    part 0, shard 0: flat arrays (see `data/shards.py`); each appears whole, in order
  shard-0000-00001.safetensors
  part-0000.json                  part 0 is finished; removed with the other parts' files when all are
  header.json                     last: all shards with their sizes and hashes, counts, and its own checksum

A store that grows has no header yet. Joined stores, a copy of a store, and documents in memory also consist of a header
and shards. No code from a store is executed or unpickled; sizes are checked before arrays are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.shards import (
    CHAT_TEMPLATE,
    HEADER,
    TOKENIZER,
    Integers,
    Shard,
    ShardEntry,
    StoreHeader,
    add_skipped,
    damaged,
    find_shards,
    open_shard,
)
from multipack.data.tokenizer import Tokenizer

Progress = Callable[[int, int | None, str], None]


@dataclass
class _Place:
    """Where the documents of a shard are: in a file, which is opened when it is first used, or in memory."""

    entry: ShardEntry
    file: Path | None
    shard: Shard | None = None
    label: str = ""
    in_memory: bool = False

    def open(self) -> Shard:
        if self.shard is None:
            assert self.file is not None
            shard, entry = open_shard(self.file, self.in_memory)
            if entry != self.entry:
                raise damaged(self.file, "it is not the shard that the header names")
            self.shard = shard
        return self.shard

    def check_size(self) -> None:
        """Check that the file exists and has the size in the header."""
        if self.file is None or not self.file.is_file():
            raise damaged(self.file, "the file is missing")
        if (size := self.file.stat().st_size) != self.entry.bytes:
            raise damaged(self.file, f"the file has {size:,} bytes instead of {self.entry.bytes:,}")

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, which open the file again."""
        return vars(self) | ({"shard": None} if self.file is not None else {})


class TokenStore:
    """A token store, read-only. Opening it reads its header only; shards are mapped when they are first used.

    A preference pair is two documents here, the chosen answer and the rejected one.

    Args:
        path: folder of the store; names it in messages.
        folder: folder to read, if it is a copy elsewhere (see `data/staging.py`); None = `path`.
        in_memory: read all arrays into memory now, instead of mapping them.
        growing: whether to open also an incomplete store, with the shards that can be read now.
        header: header to use instead of the folder's; None = read it.
        places: the shards of the header; None = the folder's files.

    Attributes:
        path, folder, in_memory: as given.
        header: the header, given or read.
        is_complete: whether no more shards follow.
        first: (shards + 1,) number of the first document of each shard.
        num_documents: number of documents.
        num_tokens: number of tokens.
        vocabulary_size: every token is less than this.
        has_pairs: whether documents 2i and 2i + 1 are preference pair i.
        overlong: policy for documents longer than a pack where `data.overlong` is auto.
        checksum: identifies the content, whatever its division into shards.
        bytes_asked: bytes of tokens and target ranges that this process has requested from storage. With `in_memory`
            it is the size of all arrays, read once. Reads for planning and by `verify` are not counted.

    Raises:
        ValueError: there is no complete store at `path`, or it is of another version, truncated or damaged.
    """

    def __init__(
        self,
        path: Path | str,
        folder: Path | str | None = None,
        *,
        in_memory: bool = False,
        growing: bool = False,
        header: StoreHeader | None = None,
        places: Sequence[_Place] | None = None,
    ) -> None:
        self.path, self.in_memory, self.is_complete = Path(path), in_memory, True
        self.folder = self.path if folder is None else Path(folder)
        if header is None and growing:
            header, self.is_complete = find_shards(self.folder)
        self.header = header or StoreHeader.read(self.folder / HEADER)
        if places is None:
            places = [
                _Place(entry, self.folder / entry.name, in_memory=in_memory) for entry in self.header.shards
            ]
            for place in places:
                place.check_size()
        self._places = list(places)
        self.first = np.cumsum([0, *(place.entry.documents for place in places)])
        self.num_documents = int(self.first[-1])
        self.num_tokens = sum(place.entry.tokens for place in places)
        self.vocabulary_size, self.has_pairs = self.header.vocabulary_size, self.header.pairs
        self.overlong, self.checksum = self.header.overlong, self.header.content_hash
        self.bytes_asked = 0
        if in_memory:
            shards = [place.open() for place in places]
            self.bytes_asked = sum(values.nbytes for shard in shards for values in vars(shard).values())

    @classmethod
    def of_documents(cls, path: Path, shard: Shard, header: StoreHeader) -> TokenStore:
        """A store of documents that are in memory; `path` names it."""
        counts = len(shard), len(shard.tokens), len(shard)
        entry = ShardEntry("memory", 0, f"{shard.content():032x}", *counts)
        return cls(path, header=replace(header, shards=(entry,)), places=[_Place(entry, None, shard)])

    @classmethod
    def joined(cls, path: Path, stores: Sequence[TokenStore], labels: Sequence[str]) -> TokenStore:
        """The documents of several stores, in order; names begin with their store's label.

        Raises:
            ValueError: the stores have different tokenizers, or only some hold preference pairs.
        """
        first = stores[0]
        for other in stores[1:]:
            _check_joinable(first, other)
        templates = {store.header.chat_template_hash for store in stores}
        header = replace(
            first.header,
            shards=tuple(entry for store in stores for entry in store.header.shards),
            skipped=add_skipped([store.header for store in stores]),
            chat_template_hash=first.header.chat_template_hash if len(templates) == 1 else "",
        )
        places = [
            replace(place, label=f"{label}: ")
            for store, label in zip(stores, labels, strict=True)
            for place in store._places
        ]
        return cls(path, first.folder, header=header, places=places)

    def shard(self, number: int) -> TokenStore:
        """The documents of one shard."""
        header = replace(self.header, shards=(self.header.shards[number],))
        return TokenStore(self.path, self.folder, header=header, places=[self._places[number]])

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, which compute again what can be computed."""
        computed = ("lengths", "target_counts", "tokenizer", "chat_template")
        return {name: value for name, value in vars(self).items() if name not in computed}

    def _find(self, document: int) -> tuple[_Place, int]:
        """Where a document is, and its number there."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents:,}")
        number = int(np.searchsorted(self.first, document, "right")) - 1
        return self._places[number], document - int(self.first[number])

    @cached_property
    def lengths(self) -> Integers:
        """(documents,) tokens of each document, read-only."""
        return _frozen([np.diff(place.open().offsets) for place in self._places])

    @cached_property
    def target_counts(self) -> Integers:
        """(documents,) targets of each document, read-only; the first token of a document never is one."""
        return _frozen([place.open().target_counts() for place in self._places])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens.

        Raises:
            ValueError: its file has changed.
        """
        tokenizer = Tokenizer.load(self.folder / TOKENIZER, self.header.tokenizer)
        if tokenizer.hash != self.header.tokenizer_hash:
            raise damaged(self.folder, f"{TOKENIZER} has changed")
        return tokenizer

    @cached_property
    def chat_template(self) -> str:
        """The chat template of the documents, as JSON; empty without chats, and if joined stores differ in it.

        Raises:
            ValueError: its file has changed.
        """
        if not self.header.chat_template_hash:
            return ""
        content = (self.folder / CHAT_TEMPLATE).read_bytes()
        if hashlib.sha256(content).hexdigest() != self.header.chat_template_hash:
            raise damaged(self.folder, f"{CHAT_TEMPLATE} has changed")
        return content.decode("utf-8", "replace")

    def tokens_of(
        self, document: int, start: int = 0, length: int | None = None
    ) -> NDArray[np.unsignedinteger]:
        """(length,) tokens of a document from `start`, not copied; None = all that follow.

        Raises:
            IndexError: they are outside the document.
            ValueError: a token is outside the vocabulary: the store is damaged.
        """
        place, number = self._find(document)
        whole = place.open().tokens_of(number)
        stop = len(whole) if length is None else start + length
        if not 0 <= start <= stop <= len(whole):
            raise IndexError(f"tokens {start} to {stop} of document {document}, which has {len(whole)}")
        tokens = whole[start:stop]
        self.bytes_asked += 0 if place.in_memory else tokens.nbytes
        if len(tokens) and int(tokens.max()) >= self.vocabulary_size:
            raise damaged(
                self.path,
                f"document {document} holds token {int(tokens.max()):,}, and the vocabulary has"
                f" {self.vocabulary_size:,} tokens",
            )
        return tokens

    def spans_of(self, document: int) -> Integers:
        """(k, 2) ranges of targets of a document."""
        place, number = self._find(document)
        spans = place.open().spans_of(number)
        self.bytes_asked += 0 if place.in_memory else spans.nbytes
        return spans

    def spans_of_each(self, documents: Integers) -> tuple[Integers, Integers]:
        """Ranges of targets of many documents, in their order.

        Returns:
            (n,) number of ranges of each document, and (their sum, 2) the ranges.
        """
        owner = np.searchsorted(self.first, documents, "right") - 1
        counts = np.zeros(len(documents), dtype=np.int64)
        found: list[tuple[Integers, Integers]] = []  # places in the result, ranges
        for shard_number in np.unique(owner):
            shard, mine = self._places[shard_number].open(), np.flatnonzero(owner == shard_number)
            numbers = documents[mine] - self.first[shard_number]
            first = np.asarray(shard.span_offsets[numbers])
            counts[mine] = shard.span_offsets[numbers + 1] - first
            found.append((mine, shard.spans[_ranges(first, counts[mine])]))
        begins = np.cumsum(counts) - counts
        spans = np.empty((int(counts.sum()), 2), dtype=np.int64)
        for mine, values in found:
            spans[_ranges(begins[mine], counts[mine])] = values
        return counts, spans

    def name(self, document: int) -> str:
        """Name of a document."""
        place, number = self._find(document)
        return place.label + place.open().name(number)

    def verify(self, progress: Progress | None = None) -> None:
        """Read everything, and compare it with the hashes in the header.

        Raises:
            ValueError: a file has changed.
        """
        done, total = 0, sum(entry.bytes for entry in self.header.shards)
        for place in self._places:
            if place.file is not None and open_shard(place.file)[0].content() != int(place.entry.content, 16):
                raise damaged(place.file, "its content has changed (its hash differs)")
            done += place.entry.bytes
            if progress is not None:
                progress(done, total, "bytes verified")
        _ = self.tokenizer, self.chat_template

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {self.num_documents:,} documents, {self.num_tokens:,} tokens)"


def _frozen(parts: list[Integers]) -> Integers:
    values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    values.flags.writeable = False
    return values


def _ranges(first: Integers, counts: Integers) -> Integers:
    """The numbers first, first + 1, … of each range of `counts` numbers, in turn."""
    return np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)


def _check_joinable(one: TokenStore, other: TokenStore) -> None:
    if one.header.tokenizer_hash != other.header.tokenizer_hash:
        used = " and ".join(
            f"{store.path} with {store.header.tokenizer} (hash {store.header.tokenizer_hash[:12]})"
            for store in (one, other)
        )
        raise ValueError(
            f"stores of different tokenizers cannot be trained on together: {used}; prepare one of them again with"
            " tokenizer.kind=file and the other's tokenizer.json"
        )
    if one.has_pairs != other.has_pairs:
        pairs, plain = (one, other) if one.has_pairs else (other, one)
        raise ValueError(f"{pairs.path} holds preference pairs and {plain.path} does not: train on one kind")
