"""What a prepared corpus looks like: how many documents, how long, what was left out, what would not fit.

Computed from the store when asked: a store never changes, and ten million documents take a second.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multipack.data.store import TokenStore

CAPACITIES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Capacities of packs that are often chosen."""


class Bar(NamedTuple):
    """Documents of similar length.

    Attributes:
        first, last: the least and the greatest length, in tokens.
        documents: how many there are.
        tokens: of all of them.
    """

    first: int
    last: int
    documents: int
    tokens: int


class Excess(NamedTuple):
    """What is longer than a pack of some capacity.

    Attributes:
        capacity: in tokens.
        documents: how many are longer.
        tokens: how many tokens truncating them would cut off.
    """

    capacity: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class CorpusReport:
    """A corpus in figures.

    Attributes:
        description: one line for people.
        documents: how many, and
        tokens: of how many tokens.
        targets: tokens that are targets; the first of a document never is.
        mean, median, p99, longest: lengths in tokens.
        longest_name: the document of that length (the first, if there are several).
        duplicates: documents that were left out because an earlier one has the same text.
        skipped: everything that was left out, duplicates too: reason → how many.
        histogram: documents by length, each bar twice as wide as the one before.
        excess: for some capacities below the longest document: what is longer.
        pairs: whether documents are preference pairs.
        is_stream: whether all is one document, which training cuts into blocks.
        shards: token stores of which the corpus is made.
        is_complete: False: a folder of shards that still grows.
        bytes: size of all files.
        vocabulary_size: every token is less than this.
    """

    description: str
    documents: int
    tokens: int
    targets: int
    mean: float
    median: float
    p99: float
    longest: int
    longest_name: str
    duplicates: int
    skipped: dict[str, int]
    histogram: tuple[Bar, ...]
    excess: tuple[Excess, ...]
    pairs: bool
    is_stream: bool
    shards: int
    is_complete: bool
    bytes: int
    vocabulary_size: int

    @property
    def target_share(self) -> float:
        """Targets among the tokens."""
        return self.targets / self.tokens if self.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "target_share": self.target_share,
            "histogram": [bar._asdict() for bar in self.histogram],
            "excess": [entry._asdict() for entry in self.excess],
        }


def report_corpus(path: Path | str) -> CorpusReport:
    """The report of a token store, also of one that still grows.

    Raises:
        ValueError: there is no store at `path`, or it is damaged, or empty.
    """
    store = TokenStore(path, growing=True)
    lengths, header = store.lengths, store.header
    if not len(lengths):
        raise ValueError(f"{path} has no documents")
    at = int(np.argmax(lengths))
    median, p99 = np.percentile(lengths, (50, 99))
    return CorpusReport(
        description=header.description if store.is_complete else f"{len(header.shards):,} shards so far",
        documents=len(lengths),
        tokens=int(lengths.sum()),
        targets=int(store.target_counts.sum()),
        mean=float(lengths.mean()),
        median=float(median),
        p99=float(p99),
        longest=int(lengths[at]),
        longest_name=store.name(at),
        duplicates=header.skipped.get("duplicates", 0),
        skipped=header.skipped,
        histogram=_histogram(lengths),
        excess=_excess(lengths),
        pairs=store.has_pairs,
        is_stream=header.split_by == "position",
        shards=len(header.shards),
        is_complete=store.is_complete,
        bytes=sum(entry.bytes for entry in header.shards),
        vocabulary_size=store.vocabulary_size,
    )


def _histogram(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Bar, ...]:
    """Documents of 1, 2 to 3, 4 to 7, … tokens, from the shortest to the longest."""
    power = np.frexp(lengths)[1] - 1  # exact: 2**power <= length < 2**(power + 1)
    documents, tokens = np.bincount(power), np.bincount(power, weights=lengths)
    first = int(np.argmax(documents > 0))
    return tuple(
        Bar(1 << bar, (2 << bar) - 1, int(documents[bar]), int(tokens[bar]))
        for bar in range(first, len(documents))
    )


def _excess(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Excess, ...]:
    found = []
    for capacity in CAPACITIES:
        longer = lengths[lengths > capacity]
        if len(longer):
            found.append(Excess(capacity, len(longer), int(longer.sum()) - capacity * len(longer)))
        lengths = longer  # what is not longer than this is not longer than the next
    return tuple(found)
