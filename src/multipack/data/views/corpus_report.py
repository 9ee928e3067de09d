"""A corpus in figures: the report of a token store.

Computed from the store when asked: a store does not change, and ten million documents take a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multipack.data.stores.store import TokenStore

CAPACITIES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Common capacities of packs."""


class Bar(NamedTuple):
    """Documents of `first` to `last` tokens: their number, and their tokens."""

    first: int
    last: int
    documents: int
    tokens: int


class Excess(NamedTuple):
    """Documents longer than `capacity` tokens: their number, and the tokens that truncating them would cut off."""

    capacity: int
    documents: int
    tokens: int


class CorpusReport:
    """A corpus in figures.

    Args:
        path: folder of a token store, which may be incomplete.

    Attributes:
        description: one line about the source.
        documents: number of items: documents, or two documents each (`pairs`).
        tokens: number of tokens.
        targets: tokens that are targets, and their share; the first token of a document is never one.
        mean, median, p99, longest: lengths in tokens; `longest_name` is the first document of that length.
        noted: about the records of the source.
        warnings: sentences on records that are not trained as they look.
        histogram: documents of 1, 2 to 3, 4 to 7, … tokens, from the shortest to the longest.
        excess: longer documents, for common capacities below the longest one.
        pairs: whether items are preference pairs or labeled answers.
        is_stream: whether the store is one stream of text, which training cuts into blocks.
        shards: number of shards.
        is_complete: False: the store still grows.
        bytes: size of all files.
        vocabulary_size: every token is less than this.

    Raises:
        ValueError: there is no store at `path`, or it is damaged, or empty.
    """

    def __init__(self, path: Path | str) -> None:
        store = TokenStore(path, growing=True)
        if not store.num_documents:
            raise ValueError(f"{path} has no documents")
        sizes = store.lengths.reshape(-1, store.item_size).sum(axis=1)
        longest = int(np.argmax(sizes))
        self.longest, self.longest_name = int(sizes[longest]), store.name(store.item_size * longest)
        # The first token of a document is not a target.
        self.targets = sum(int(np.diff(np.maximum(shard.spans, 1)).sum()) for shard in store.shards)
        self.shards, self.is_complete, self.bytes = len(store.shards), store.is_complete, store.bytes
        self.description = store.description if store.is_complete else f"{self.shards:,} shards so far"
        self.documents, self.tokens = store.num_items, store.num_tokens
        self.target_share = self.targets / self.tokens
        self.mean, self.median = self.tokens / self.documents, float(np.median(sizes))
        self.p99 = float(np.percentile(sizes, 99))
        self.noted, self.duplicates = store.noted, store.noted.skipped["duplicates"]
        self.warnings = store.warnings
        power = np.frexp(sizes)[1] - 1  # exact: 2**power <= size < 2**(power + 1)
        documents, tokens = np.bincount(power), np.bincount(power, weights=sizes)
        self.histogram = [
            Bar(1 << bar, (2 << bar) - 1, int(documents[bar]), int(tokens[bar]))
            for bar in range(int(power.min()), len(documents))
        ]
        self.excess = [
            Excess(capacity, len(longer), int((longer - capacity).sum()))
            for capacity in CAPACITIES
            if len(longer := sizes[sizes > capacity])
        ]
        self.pairs, self.is_stream = store.item_size > 1, store.header.split_by == "position"
        self.vocabulary_size = store.vocabulary_size

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        lists = {name: [row._asdict() for row in getattr(self, name)] for name in ("histogram", "excess")}
        figures = vars(self) | vars(self.noted) | lists
        del figures["noted"]
        return figures
