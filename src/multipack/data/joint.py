"""Several token stores as one: the shards of a folder, or the sources of a mixture.

    shard-00000  |AAAA|BB|           documents 0 1
    shard-00001  |CCC|DDDDD|E|       documents 2 3 4

Nothing is copied: a document is found in its store when it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multipack.data.fit import FitPolicy
from multipack.data.header import HEADER, StoreHeader
from multipack.data.memory import MemoryStore
from multipack.data.shards import ShardsHeader, is_shards, list_shards
from multipack.data.store import TokenStore
from multipack.data.tokenizer import Tokenizer

Integers = NDArray[np.int64]


class JointStore:
    """The documents of several stores, numbered through, behind the interface of a `TokenStore`.

    Args:
        path: where they are, for people.
        stores: at least one, all of one tokenizer.
        labels: what the names of each store's documents begin with; empty = nothing.

    Attributes:
        path: as given.
        stores: as given.
        header: that of one store which held all these documents; its `files` are the stores.
        first: (stores + 1,) number of each store's first document.

    Raises:
        ValueError: stores of different tokenizers, or some of preference pairs and some not; no store at all.
    """

    def __init__(self, path: Path, stores: Sequence[Store], labels: Sequence[str] = ()) -> None:
        if not stores:
            raise ValueError(f"{path} holds no token store")
        self.path, self.stores = path, tuple(stores)
        self._labels = tuple(labels)
        for store in self.stores[1:]:
            _check_alike(self.stores[0], store)
        self.first = np.cumsum([0, *(store.num_documents for store in self.stores)])
        self.header = _joint_header(self.stores)

    @property
    def num_documents(self) -> int:
        """Documents in all stores."""
        return self.header.documents

    @property
    def num_tokens(self) -> int:
        """Tokens in all stores."""
        return self.header.tokens

    @property
    def vocabulary_size(self) -> int:
        """Every token is less than this."""
        return self.header.vocabulary_size

    @property
    def overlong(self) -> FitPolicy:
        """What becomes of documents longer than a pack, where nobody says otherwise."""
        return self.header.overlong

    @property
    def has_pairs(self) -> bool:
        """Whether the documents are preference pairs."""
        return self.stores[0].has_pairs

    @property
    def chat_template(self) -> str:
        """The chat template with which the documents were written; empty = none, or not the same one in all stores."""
        templates = {store.chat_template for store in self.stores}
        return templates.pop() if len(templates) == 1 else ""

    @property
    def checksum(self) -> str:
        """Identifies the content of all stores, and their order."""
        return self.header.checksum

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer whose tokens these are."""
        return self.stores[0].tokenizer

    @cached_property
    def lengths(self) -> Integers:
        """(documents,) tokens of each document, read-only."""
        lengths = np.concatenate([store.lengths for store in self.stores])
        lengths.flags.writeable = False
        return lengths

    @cached_property
    def target_counts(self) -> Integers:
        """(documents,) tokens of each document that are targets, read-only."""
        counts = np.concatenate([store.target_counts for store in self.stores])
        counts.flags.writeable = False
        return counts

    def _find(self, document: int) -> tuple[Store, int]:
        """The store of a document, and its number there."""
        number = int(np.searchsorted(self.first, document, "right")) - 1
        return self.stores[number], document - int(self.first[number])

    def tokens_of(self, document: int, start: int, length: int) -> NDArray[np.unsignedinteger]:
        """(length,) tokens of a document from `start` on."""
        store, number = self._find(document)
        return store.tokens_of(number, start, length)

    def spans_of(self, document: int) -> Integers:
        """(k, 2) ranges of targets of a document."""
        store, number = self._find(document)
        return store.spans_of(number)

    def border(self, document: int) -> int:
        """Where the rejected half of a preference pair begins; 0 = the document is no pair."""
        store, number = self._find(document)
        return store.border(number)

    def name(self, document: int) -> str:
        """The name of a document, after the label of its store."""
        number = int(np.searchsorted(self.first, document, "right")) - 1
        name = self.stores[number].name(document - int(self.first[number]))
        return f"{self._labels[number]}: {name}" if self._labels else name

    def verify(self, progress: Callable[[int, int | None, str], None] | None = None) -> None:
        """Read everything and compare it with the stores' headers.

        Raises:
            ValueError: a file was edited.
        """
        for number, store in enumerate(self.stores):
            store.verify()
            if progress is not None:
                progress(number + 1, len(self.stores), "stores verified")

    def __repr__(self) -> str:
        return (
            f"JointStore({str(self.path)!r}, {len(self.stores):,} stores, {self.num_documents:,} documents,"
            f" {self.num_tokens:,} tokens)"
        )


Store = TokenStore | JointStore


def open_store(path: Path) -> Store:
    """The token store at `path`, or the shards of the complete folder of shards that is there, as one.

    Raises:
        ValueError: neither is there, or shards that still arrive.
    """
    if not is_shards(path):
        return TokenStore(path)
    shards, is_complete = list_shards(path)
    if not is_complete:
        raise ValueError(
            f"{path} is a folder of shards that still grows: {len(shards):,} are there, and no {HEADER} says that it is"
            " complete; wait for it, or train on what arrives with data.stream=true"
        )
    store, whole = JointStore(path, [TokenStore(shard) for shard in shards]), ShardsHeader.read(path)
    store.header = replace(
        store.header, source_hash=whole.source_hash, description=whole.description, skipped=whole.skipped
    )
    return store


def spans_of_each(store: Store | MemoryStore, documents: Integers) -> tuple[Integers, Integers]:
    """Ranges of targets of many documents, in their order.

    Returns:
        (len(documents),) how many ranges each document has, and (their sum, 2) the ranges.
    """
    if not isinstance(store, JointStore):
        first = store.span_offsets[documents]
        counts = store.span_offsets[documents + 1] - first
        return counts, store.spans[_ranges(first, counts)]
    owner = np.searchsorted(store.first, documents, "right") - 1
    if len(owner) and owner[0] == owner[-1] and (owner == owner[0]).all():
        return spans_of_each(store.stores[owner[0]], documents - store.first[owner[0]])
    counts = np.zeros(len(documents), dtype=np.int64)
    found: list[tuple[Integers, Integers]] = []  # documents of one store, and their ranges
    for number in np.unique(owner):
        own = np.flatnonzero(owner == number)
        counts[own], spans = spans_of_each(store.stores[number], documents[own] - store.first[number])
        found.append((own, spans))
    ends = np.cumsum(counts)
    joined = np.empty((int(counts.sum()), 2), dtype=np.int64)
    for own, spans in found:
        joined[_ranges((ends - counts)[own], counts[own])] = spans
    return counts, joined


def _ranges(first: Integers, counts: Integers) -> Integers:
    """The numbers first, first + 1, … of each range of so many, in turn."""
    return np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)


def _check_alike(one: Store, other: Store) -> None:
    if one.header.tokenizer_hash != other.header.tokenizer_hash:
        names = [
            f"{store.path} was tokenized with {store.header.tokenizer} (hash {store.header.tokenizer_hash[:12]})"
            for store in (one, other)
        ]
        raise ValueError(
            f"{names[0]}, but {names[1]}: documents that are trained on together need one tokenizer; prepare one of"
            " them again with tokenizer.kind=file and the other's tokenizer.json"
        )
    if one.has_pairs != other.has_pairs:
        pairs, plain = (one, other) if one.has_pairs else (other, one)
        raise ValueError(
            f"{pairs.path} holds preference pairs and {plain.path} does not: a run trains on one or the other"
        )


def _joint_header(stores: Sequence[Store]) -> StoreHeader:
    """The header that one store of all these documents would have."""
    headers = [store.header for store in stores]
    digest = hashlib.sha256(" ".join(header.source_hash for header in headers).encode()).hexdigest()
    skipped: dict[str, int] = {}
    for header in headers:
        for reason, count in header.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    described = list(dict.fromkeys(header.description for header in headers))
    more = f" and {len(described) - 3} more" if len(described) > 3 else ""
    return replace(
        headers[0],
        documents=sum(header.documents for header in headers),
        tokens=sum(header.tokens for header in headers),
        spans=sum(header.spans for header in headers),
        source_hash=digest,
        description="; ".join(described[:3]) + more,
        skipped=skipped,
        files={
            f"{number} {store.path.name}": {"bytes": 0, "sha256": store.checksum}
            for number, store in enumerate(stores)
        },
    )
