"""The token store: a folder of shards, complete when its header is there.

books/
  recipe.json                     source, settings and tokenizer; written first
  tokenizer.json
  chat_template.json              of chats only: for `tokenizer.path=books`
  shard-0000-00000.safetensors    part 0, shard 0: flat arrays (see `data/shards.py`); each appears whole, in order
  shard-0000-00001.safetensors    the last shard of a part is marked as such
  header.json                     last: all shards with their sizes and hashes, counts, and its own checksum

A store that grows has no header yet. Joined stores, a copy of a store, and documents in memory also consist of a header
and shards. No code from a store is executed or unpickled; sizes are checked before arrays are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.shards import (
    HEADER,
    TOKENIZER,
    Integers,
    Shard,
    ShardEntry,
    StoreHeader,
    damaged,
    find_shards,
    open_shard,
)
from multipack.data.tokenizer import Progress, Tokenizer


@dataclass
class _Place:
    """Where the documents of a shard are: in a file, which is mapped when it is first used, or in memory."""

    entry: ShardEntry
    file: Path | None
    shard: Shard | None = None
    label: str = ""

    def open(self) -> Shard:
        if self.shard is None:
            assert self.file is not None
            shard, entry = open_shard(self.file)
            if entry != self.entry:
                raise damaged(self.file, "it is not the shard that the header names")
            self.shard = shard
        return self.shard

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, which map the file again."""
        return vars(self) | ({"shard": None} if self.file is not None else {})


class TokenStore:
    """A token store, read-only. Opening it reads its header only; shards are mapped when they are first used.

    A preference pair is two documents here, the chosen answer and the rejected one.

    Args:
        path: folder of the store; names it in messages.
        folder: folder to read, if it is a copy elsewhere (see `data/staging.py`); None = `path`.
        growing: whether to open also an incomplete store, with the shards that can be read now.
        header: header to use instead of the folder's; None = read it.
        places: the shards of the header; None = the folder's files.

    Attributes:
        path, folder, header: as given, or read.
        first: (shards + 1,) number of the first document of each shard.
        num_documents: number of documents.
        num_tokens: number of tokens.
        vocabulary_size: every token is less than this.
        has_pairs: whether documents 2i and 2i + 1 are preference pair i.
        overlong: policy for documents longer than a pack where `data.overlong` is auto.
        chat_template: template of the chats, as JSON; empty without chats, and if joined stores differ in it.
        checksum: identifies the content, whatever its division into shards.
        bytes_asked: bytes of tokens and target ranges that this process has requested from storage; of a store in
            memory the bytes of its files. Reads for planning and by `verify` are not counted.

    Raises:
        ValueError: there is no complete store at `path`, or it is of another version, truncated or damaged.
    """

    def __init__(
        self,
        path: Path | str,
        folder: Path | str | None = None,
        *,
        growing: bool = False,
        header: StoreHeader | None = None,
        places: Sequence[_Place] | None = None,
    ) -> None:
        self.path = Path(path)
        self.folder = self.path if folder is None else Path(folder)
        if header is None:
            header = find_shards(self.folder) if growing else StoreHeader.read(self.folder / HEADER)
        if places is None:
            places = [_Place(entry, self.folder / entry.name) for entry in header.shards]
            for entry in header.shards:
                _check_size(self.folder / entry.name, entry.bytes)
        self.header, self._places = header, list(places)
        self.first = np.cumsum([0, *(entry.documents for entry in header.shards)])
        self.num_documents = int(self.first[-1])
        self.num_tokens = sum(entry.tokens for entry in header.shards)
        self.vocabulary_size, self.has_pairs = header.vocabulary_size, header.pairs
        self.overlong, self.chat_template = header.overlong, header.chat_template
        self.checksum, self.bytes_asked = header.content_hash, 0

    @classmethod
    def of_documents(cls, path: Path, shard: Shard, header: StoreHeader) -> TokenStore:
        """A store of documents that are in memory; `path` names it."""
        counts = len(shard), len(shard.tokens), len(shard)
        entry = ShardEntry("memory", 0, f"{shard.content():032x}", *counts, {})
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
        have_one_template = len({store.chat_template for store in stores}) == 1
        header = replace(
            first.header,
            shards=tuple(entry for store in stores for entry in store.header.shards),
            chat_template=first.chat_template if have_one_template else "",
        )
        places = [
            replace(place, label=f"{label}: ")
            for store, label in zip(stores, labels, strict=True)
            for place in store._places
        ]
        return cls(path, first.folder, header=header, places=places)

    def in_memory(self) -> TokenStore:
        """The same store, its arrays read into the memory of this process."""
        places = [replace(place, file=None, shard=place.open().in_memory()) for place in self._places]
        store = TokenStore(self.path, self.folder, header=self.header, places=places)
        store.bytes_asked = sum(entry.bytes for entry in self.header.shards)
        return store

    def shard(self, number: int) -> TokenStore:
        """The documents of one shard."""
        header = replace(self.header, shards=(self.header.shards[number],))
        return TokenStore(self.path, self.folder, header=header, places=[self._places[number]])

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, which compute again what can be computed."""
        return {name: value for name, value in vars(self).items() if name not in ("lengths", "tokenizer")}

    def _find(self, document: int) -> tuple[_Place, int]:
        """Where a document is, and its number there."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents:,}")
        number = int(np.searchsorted(self.first, document, "right")) - 1
        return self._places[number], document - int(self.first[number])

    @cached_property
    def lengths(self) -> Integers:
        """(documents,) tokens of each document, read-only."""
        none = np.zeros(0, dtype=np.int64)
        lengths = np.concatenate([none, *(np.diff(place.open().offsets) for place in self._places)])
        lengths.flags.writeable = False
        return lengths

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
        self.bytes_asked += 0 if place.file is None else tokens.nbytes
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
        self.bytes_asked += 0 if place.file is None else spans.nbytes
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
            if place.open().content() != int(place.entry.content, 16):
                raise damaged(place.file or self.path, "its content has changed (its hash differs)")
            done += place.entry.bytes
            if progress is not None:
                progress(done, total, "bytes verified")
        _ = self.tokenizer

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {self.num_documents:,} documents, {self.num_tokens:,} tokens)"


def _check_size(file: Path, size: int) -> None:
    if not file.is_file():
        raise damaged(file, "the file is missing")
    if (found := file.stat().st_size) != size:
        raise damaged(file, f"the file has {found:,} bytes instead of {size:,}")


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
