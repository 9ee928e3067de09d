"""The token store: a folder of shards, complete when the last shard of each part is there.

books/
  header.json                     source, settings and tokenizer; written first
  tokenizer.json
  chat_template.json              of chats only: for `tokenizer.path=books`
  shard-0000-00000.safetensors    part 0, shard 0: flat arrays (see shards.py); each appears whole, in order
  shard-0000-00001.safetensors    the last shard of a part says that it is the last

Growing, joined and copied stores, and documents in memory, also consist of a header and shards. No code from a store is
executed or unpickled; sizes are checked before arrays are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.stores.shards import (
    TOKENIZER,
    Shard,
    StoreHeader,
    chain,
    damaged,
    find_shards,
)
from multipack.data.text.data_config import ITEM_NAMES
from multipack.data.text.skipped import Noted
from multipack.data.text.tokenizer import Progress, Tokenizer, silent
from multipack.planning.lengths import Integers

_COMPUTED = ("lengths", "weights", "labels", "tokenizer")  # cached properties


class TokenStore:
    """A token store, read-only; its shards are mapped.

    Neighboring documents may be one item, such as the answers of a preference pair; see `ItemKind`.

    Args:
        path: folder of the store; names it in messages.
        folder: folder to read, if it is a copy elsewhere (see staging.py); None = `path`.
        growing: whether to open also an incomplete store, with the shards that can be read now.
        header: header to use instead of the folder's; None = read it.
        shards: shards to use instead of the folder's, complete or not; None = open them.

    Attributes:
        path, folder, header, shards: as given, or read.
        first: (shards + 1,) number of the first document of each shard, and `num_documents`.
        num_documents: number of documents.
        num_tokens: number of tokens.
        vocabulary_size: every token is less than this.
        kind: what an item is, see `ItemKind`.
        item_size: number of documents of an item.
        num_items: number of items.
        checksum: identifies tokens, targets, names, weights, kind and tokenizer, however divided into shards.
        is_complete: whether the last shard of each part is there.
        noted: about the records of the source.
        warnings: sentences on records that are not trained as they look.
        description: one line about the source.
        bytes_asked: bytes of tokens and target ranges that this process has requested from storage. Reads for planning
            and by `verify` are not counted.

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
        shards: Sequence[Shard] | None = None,
    ) -> None:
        self.path = Path(path)
        self.folder = self.path if folder is None else Path(folder)
        self.header = header or StoreHeader.read(self.folder)
        self.shards = list(find_shards(self.folder, range(self.header.parts)) if shards is None else shards)
        self.noted, ended = Noted(), 0
        for shard in self.shards:
            if shard.noted is not None:
                self.noted.add(shard.noted, shard.label)
                ended += 1
        self.is_complete = ended == self.header.parts
        if shards is None and not (growing or self.is_complete):
            raise ValueError(
                f"{self.folder} is not a complete token store ({len(self.shards):,} shards are there, and the last one"
                " is missing): continue with the same `multipack prepare`, or train on it with data.stream=true"
            )
        self.first = np.cumsum([0, *map(len, self.shards)])
        self.num_documents = int(self.first[-1])
        self.num_tokens = sum(len(shard.tokens) for shard in self.shards)
        self.vocabulary_size = self.header.vocabulary_size
        self.kind, self.item_size = self.header.kind, self.header.item_size
        self.num_items = self.num_documents // self.item_size
        self.description = self.header.description.replace("{documents}", f"{self.num_items:,}")
        content = chain((shard.content, len(shard)) for shard in self.shards)
        kinds = {"documents": False, "pairs": True, "labels": "labels"}
        decisive = [self.header.tokenizer_hash, self.header.split_by, kinds[self.kind], content]
        self.checksum = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
        self.bytes_asked = 0

    @classmethod
    def joined(cls, path: Path, stores: Sequence[TokenStore], labels: Sequence[str]) -> TokenStore:
        """The documents of several stores, in order; names begin with their store's label.

        Raises:
            ValueError: the stores have different tokenizers, or items of different kinds.
        """
        first = stores[0]
        for other in stores[1:]:
            if other.header.tokenizer_hash != first.header.tokenizer_hash:
                raise ValueError(
                    f"{first.path} with {first.header.tokenizer} and {other.path} with {other.header.tokenizer} have"
                    " different tokenizers: prepare one of them again with tokenizer.kind=file and the other's path"
                )
            if other.kind != first.kind:
                raise ValueError(
                    f"{first.path} holds {ITEM_NAMES[first.kind]}, and {other.path} {ITEM_NAMES[other.kind]}: train on"
                    " one kind"
                )
        templates = {store.header.chat_template for store in stores}
        header = replace(first.header, chat_template=templates.pop() if len(templates) == 1 else "")
        shards = [
            replace(shard, label=f"{label}: ")
            for store, label in zip(stores, labels, strict=True)
            for shard in store.shards
        ]
        return cls(path, first.folder, header=header, shards=shards)

    @property
    def warnings(self) -> list[str]:
        """Sentences on records that are not trained as they look, with the name of the first."""
        kind = "conversations" if self.header.chat_template else "documents"
        return [
            f"{count:,} of {self.num_items:,} {kind} with {text} (the first: {first})"
            for text, (count, first) in self.noted.notes.items()
        ]

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def shard(self, number: int) -> TokenStore:
        """The documents of one shard."""
        return TokenStore(self.path, self.folder, header=self.header, shards=[self.shards[number]])

    def __getstate__(self) -> dict[str, Any]:
        """State for other processes, without cached values, which they compute again."""
        return {name: value for name, value in vars(self).items() if name not in _COMPUTED}

    def _find(self, document: int) -> tuple[Shard, int]:
        """The shard of a document, and its number there."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents:,}")
        number = int(np.searchsorted(self.first, document, "right")) - 1
        return self.shards[number], document - int(self.first[number])

    @cached_property
    def lengths(self) -> Integers:
        """(documents,) tokens of each document, read-only."""
        none = np.zeros(0, dtype=np.int64)
        lengths = np.concatenate([none, *(np.diff(shard.offsets) for shard in self.shards)])
        lengths.flags.writeable = False
        return lengths

    @cached_property
    def weights(self) -> NDArray[np.float64] | None:
        """(documents,) weight of each document in the loss; None = all are 1."""
        if not any(len(shard.weights) for shard in self.shards):
            return None
        return np.abs(self._signed_weights)

    @cached_property
    def labels(self) -> NDArray[np.bool_]:
        """(documents,) whether each is desirable, or the answer beside a desirable one; all true of other items."""
        return ~np.signbit(self._signed_weights)

    @property
    def _signed_weights(self) -> NDArray[np.float64]:
        """(documents,) weights as shards have them: the sign is the label."""
        signed = (shard.weights if len(shard.weights) else np.ones(len(shard)) for shard in self.shards)
        return np.concatenate([np.zeros(0), *signed])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens; `ValueError` if its file has changed."""
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
        shard, number = self._find(document)
        whole = shard.tokens_of(number)
        stop = len(whole) if length is None else start + length
        if not 0 <= start <= stop <= len(whole):
            raise IndexError(f"tokens {start} to {stop} of document {document}, which has {len(whole)}")
        tokens = whole[start:stop]
        self.bytes_asked += 0 if shard.file is None else tokens.nbytes
        if len(tokens) and int(tokens.max()) >= self.vocabulary_size:
            found = f"document {document} holds token {int(tokens.max()):,}"
            raise damaged(self.path, f"{found}, and the vocabulary has {self.vocabulary_size:,} tokens")
        return tokens

    def spans_of(self, document: int) -> Integers:
        """(k, 2) ranges of targets of a document."""
        shard, number = self._find(document)
        spans = shard.spans_of(number)
        self.bytes_asked += 0 if shard.file is None else spans.nbytes
        if len(spans) and not 0 <= int(spans.min()) <= int(spans.max()) <= len(shard.tokens_of(number)):
            raise damaged(self.path, f"document {document} has targets outside of its tokens")
        return spans

    def count_targets(self, documents: Integers, starts: Integers, stops: Integers) -> Integers:
        """(n,) number of targets among tokens `starts[i]` to `stops[i]` of document `documents[i]`, for n ranges."""
        counts, order = np.zeros(len(documents), dtype=np.int64), np.argsort(documents, kind="stable")
        cuts = np.searchsorted(documents[order], self.first)
        for shard, first, begin, end in zip(self.shards, self.first, cuts, cuts[1:], strict=False):
            mine = order[begin:end]
            if len(mine):
                begins = shard.offsets[documents[mine] - first]
                counts[mine] = shard.count_targets(begins + starts[mine], begins + stops[mine])
        return counts

    def name(self, document: int) -> str:
        """Name of a document."""
        shard, number = self._find(document)
        return shard.name(number)

    def verify(self, progress: Progress = silent) -> None:
        """Compare all content with the hashes in the shards; `ValueError` if a file has changed."""
        done = 0
        for shard in self.shards:
            if shard.hash() != shard.content:
                raise damaged(shard.file or self.path, "its content has changed (its hash differs)")
            done += shard.bytes
            progress(done, self.bytes, "bytes verified")
        _ = self.tokenizer

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {self.num_documents:,} documents, {self.num_tokens:,} tokens)"
