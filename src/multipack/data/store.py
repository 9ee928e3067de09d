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
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    check_sizes,
    damaged,
    find_shards,
    open_shard,
    token_dtype,
)
from multipack.data.tokenizer import Tokenizer

Progress = Callable[[int, int | None, str], None]
_COUNTING = threading.Lock()


class TokenStore:
    """A token store, read-only. Opening it reads its header only; shards are mapped when they are first used.

    A preference pair counts as one document here: its length is the sum of both answers' lengths.

    Args:
        path: folder of the store; names it in messages.
        folder: folder to read, if it is a copy elsewhere (see `data/staging.py`); None = `path`.
        in_memory: read all arrays into memory now, instead of mapping them.
        growing: whether to open also an incomplete store, with the shards that can be read now.
        header: header to use instead of the folder's; None = read it.
        shards: file of each shard, or the shard in memory; None = the folder's files.
        labels: prefix of the names in each shard; empty = none.

    Attributes:
        path, folder, in_memory: as given.
        header: the header, given or read.
        is_complete: whether no more shards follow.
        first: (shards + 1,) number of the first document of each shard.

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
        shards: Sequence[Path | Shard] | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        self.path, self.in_memory, self.is_complete = Path(path), in_memory, True
        self.folder = self.path if folder is None else Path(folder)
        if header is None and growing:
            header, self.is_complete = find_shards(self.folder)
        self.header = header or StoreHeader.read(self.folder / HEADER)
        if shards is None:
            check_sizes(self.folder, self.header.shards)
            shards = [self.folder / shard.name for shard in self.header.shards]
        self._files = [None if isinstance(shard, Shard) else shard for shard in shards]
        self._opened = [shard if isinstance(shard, Shard) else None for shard in shards]
        self._labels = tuple(labels) or ("",) * len(shards)
        self._step = 2 if self.header.pairs else 1
        counts = [entry.documents // self._step for entry in self.header.shards]
        self.first = np.cumsum([0, *counts])
        self._bytes_asked = 0
        if in_memory:
            for number in range(len(shards)):
                self._count(sum(values.nbytes for values in vars(self._shard(number)).values()))

    @classmethod
    def of_documents(cls, path: Path, shard: Shard, header: StoreHeader) -> TokenStore:
        """A store of documents that are in memory; `path` names it."""
        entry = ShardEntry("memory", 0, shard.sha256(), len(shard), len(shard.tokens), len(shard))
        return cls(path, header=replace(header, shards=(entry,)), shards=[shard])

    @classmethod
    def joined(cls, path: Path, stores: Sequence[TokenStore], labels: Sequence[str]) -> TokenStore:
        """The documents of several stores, in order; names begin with their store's label.

        Raises:
            ValueError: the stores have different tokenizers, or only some hold preference pairs.
        """
        first = stores[0]
        for other in stores[1:]:
            _check_joinable(first, other)
        skipped: dict[str, int] = {}
        for store in stores:
            for reason, count in store.header.skipped.items():
                skipped[reason] = skipped.get(reason, 0) + count
        templates = {store.header.chat_template_hash for store in stores}
        header = replace(
            first.header,
            shards=tuple(entry for store in stores for entry in store.header.shards),
            skipped=skipped,
            chat_template_hash=first.header.chat_template_hash if len(templates) == 1 else "",
        )
        named = [label for store, label in zip(stores, labels, strict=True) for _ in store._files]
        shards: list[Any] = [
            opened if store.in_memory or file is None else file
            for store in stores
            for file, opened in zip(store._files, store._opened, strict=True)
        ]
        return cls(path, first.folder, header=header, shards=shards, labels=[f"{label}: " for label in named])

    def shard(self, number: int) -> TokenStore:
        """The documents of one shard."""
        header = replace(self.header, shards=(self.header.shards[number],))
        shards: list[Any] = [self._files[number] or self._opened[number]]
        return TokenStore(self.path, self.folder, header=header, shards=shards, labels=[self._labels[number]])

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, which open the files again."""
        state = {name: value for name, value in vars(self).items() if name not in _CACHED}
        opened = zip(self._files, self._opened, strict=True)
        return state | {"_opened": [None if file else shard for file, shard in opened]}

    def _shard(self, number: int) -> Shard:
        opened, file = self._opened[number], self._files[number]
        if opened is None and file is not None:
            opened, entry, _ = open_shard(file, self.in_memory)
            if entry != self.header.shards[number]:
                raise damaged(file, "it is not the shard that the header names")
            if opened.tokens.dtype != np.dtype(token_dtype(self.vocabulary_size)):
                raise damaged(file, f"tokens of type {opened.tokens.dtype}")
            self._opened[number] = opened
        assert opened is not None
        return opened

    def _find(self, document: int) -> tuple[Shard, int]:
        """The shard of a document, and its number there; of a pair the number of its first answer."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents:,}")
        number = int(np.searchsorted(self.first, document, "right")) - 1
        return self._shard(number), (document - int(self.first[number])) * self._step

    def _count(self, size: int) -> None:
        with _COUNTING:  # the thread that prefetches counts too
            self._bytes_asked += size

    @property
    def bytes_asked(self) -> int:
        """Number of bytes of tokens and target ranges that this process has requested from storage.

        With `in_memory` it is the size of all arrays, read once. Reads for planning and by `verify` are not counted.
        """
        return self._bytes_asked

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return int(self.first[-1])

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.header.tokens

    @property
    def vocabulary_size(self) -> int:
        """Every token is less than this."""
        return self.header.vocabulary_size

    @property
    def overlong(self) -> str:
        """Policy for documents longer than a pack where `data.overlong` is auto."""
        return self.header.overlong

    @property
    def has_pairs(self) -> bool:
        """Whether the documents are preference pairs."""
        return self.header.pairs

    @property
    def checksum(self) -> str:
        """Identifies the content."""
        return self.header.content_hash

    @cached_property
    def lengths(self) -> Integers:
        """(documents,) tokens of each document, read-only."""
        shards = range(len(self._files))
        return _frozen([np.diff(self._shard(number).offsets[:: self._step]) for number in shards])

    @cached_property
    def target_counts(self) -> Integers:
        """(documents,) targets of each document, read-only; the first token of a document never is one."""
        counts = [self._shard(number).target_counts() for number in range(len(self._files))]
        return _frozen([each.reshape(-1, self._step).sum(axis=1) for each in counts])

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
        shard, number = self._find(document)
        first, end = int(shard.offsets[number]), int(shard.offsets[number + self._step])
        stop = end - first if length is None else start + length
        if not 0 <= start <= stop <= end - first:
            raise IndexError(f"tokens {start} to {stop} of document {document}, which has {end - first}")
        tokens = shard.tokens[first + start : first + stop]
        if not self.in_memory:
            self._count(tokens.nbytes)
        if len(tokens) and int(tokens.max()) >= self.vocabulary_size:
            raise damaged(
                self.path,
                f"document {document} holds token {int(tokens.max()):,}, and the vocabulary has"
                f" {self.vocabulary_size:,} tokens",
            )
        return tokens

    def spans_of(self, document: int) -> Integers:
        """(k, 2) ranges of targets of a document; of a pair those of the chosen answer."""
        return self.spans_of_pair(document)[0]

    def spans_of_pair(self, document: int) -> list[Integers]:
        """(k, 2) ranges of targets of each answer of a pair, counted from its first token; of others one array."""
        shard, number = self._find(document)
        ends = shard.span_offsets[number : number + self._step + 1]
        spans = [shard.spans[ends[answer] : ends[answer + 1]] for answer in range(self._step)]
        if not self.in_memory:
            self._count(sum(each.nbytes for each in spans))
        return spans

    def border(self, document: int) -> int:
        """Tokens of the chosen answer of a pair."""
        shard, number = self._find(document)
        return int(shard.offsets[number + 1] - shard.offsets[number])

    def spans_of_each(self, documents: Integers) -> tuple[Integers, Integers]:
        """Ranges of targets of many documents, in their order; of pairs those of the chosen answers.

        Returns:
            (n,) number of ranges of each document, and (their sum, 2) the ranges.
        """
        owner = np.searchsorted(self.first, documents, "right") - 1
        counts = np.zeros(len(documents), dtype=np.int64)
        found: list[tuple[Integers, Integers, Integers]] = []  # places in the result, counts, ranges
        for shard_number in np.unique(owner):
            shard, mine = self._shard(int(shard_number)), np.flatnonzero(owner == shard_number)
            numbers = (documents[mine] - self.first[shard_number]) * self._step
            first = np.asarray(shard.span_offsets[numbers])
            counts[mine] = shard.span_offsets[numbers + 1] - first
            found.append((mine, counts[mine], shard.spans[_ranges(first, counts[mine])]))
        begins = np.cumsum(counts) - counts
        spans = np.empty((int(counts.sum()), 2), dtype=np.int64)
        for mine, own, values in found:
            spans[_ranges(begins[mine], own)] = values
        return counts, spans

    def name(self, document: int) -> str:
        """Name of a document."""
        number = int(np.searchsorted(self.first, document, "right")) - 1
        shard, own = self._find(document)
        return self._labels[number] + shard.name(own)

    def verify(self, progress: Progress | None = None) -> None:
        """Read everything, and compare it with the hashes in the header.

        Raises:
            ValueError: a file has changed.
        """
        done, total = 0, sum(entry.bytes for entry in self.header.shards)
        for file, entry in zip(self._files, self.header.shards, strict=True):
            if file is None:
                continue
            data = open_shard(file)[2]
            if hashlib.sha256(data.data).hexdigest() != entry.sha256:
                raise damaged(file, "its content has changed (its sha256 differs)")
            done += entry.bytes
            if progress is not None:
                progress(done, total, "bytes verified")
        _ = self.tokenizer, self.chat_template

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {self.num_documents:,} documents, {self.num_tokens:,} tokens)"


_CACHED = ("lengths", "target_counts", "tokenizer", "chat_template")


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
