"""A corpus in figures: the report of a token store, and lengths of documents for the planner.

Computed from the store when asked: a store does not change, and ten million documents take a second.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multipack.data.data_config import Overlong
from multipack.data.overlong import Fit, FitReport
from multipack.data.store import TokenStore
from multipack.planning.lengths import check_lengths

CAPACITIES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Common capacities of packs."""


class Bar(NamedTuple):
    """Documents of similar length.

    Attributes:
        first, last: smallest and largest length, in tokens.
        documents: number of documents.
        tokens: their tokens.
    """

    first: int
    last: int
    documents: int
    tokens: int


class Excess(NamedTuple):
    """Documents longer than a pack of some capacity.

    Attributes:
        capacity: in tokens.
        documents: number of longer documents.
        tokens: tokens that truncating them would cut off.
    """

    capacity: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class CorpusReport:
    """A corpus in figures.

    Attributes:
        description: one line for people.
        documents: number of documents.
        tokens: their tokens.
        targets: tokens that are targets; the first of a document is never one.
        mean, median, p99, longest: lengths in tokens.
        longest_name: name of the first document of that length.
        duplicates: documents that were left out as duplicates.
        skipped: reason → number of entries left out, duplicates included.
        histogram: documents by length; each bar is twice as wide as the previous one.
        excess: longer documents, for common capacities below the longest one.
        pairs: whether documents are preference pairs.
        is_stream: whether the store is one document, which training cuts into blocks.
        shards: number of shards.
        is_complete: False: the store still grows.
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
        """Share of targets among the tokens."""
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


# --- lengths for the planner --------------------------------------------------------------------------


@dataclass
class LengthsConfig:
    """Policy for long documents of a store, as in `DataConfig`."""

    overlong: Overlong = "auto"
    """Documents longer than a pack; auto: the store's own policy, mostly an error."""
    overlap: int = 0
    """Tokens that a split piece repeats from the previous one, as context."""
    repeat_prompt: bool = False
    """Begin each piece of a split document with the document's prompt."""


class Lengths(NamedTuple):
    """Lengths of documents, for the planner.

    Attributes:
        lengths: (documents,) int64 tokens.
        targets: (documents,) int64 target tokens; None if unknown: all but the first token.
        fit: what was done to documents that were too long; None for a file of lengths.
    """

    lengths: NDArray[np.int64]
    targets: NDArray[np.int64] | None
    fit: FitReport | None


def read_lengths(
    path: Path, capacity: int, histogram: bool = False, data: LengthsConfig | None = None
) -> Lengths:
    """Lengths in tokens, and target tokens where they are known.

    Args:
        path: a .npy file of whole numbers, or the folder of a token store.
        capacity: most tokens of a pack: the stream of a store is cut into documents of this length, and other
            documents are treated as in training with the same `data`.
        histogram: the file counts documents by length: entry i is the number of documents of i + 1 tokens.
        data: policy for long documents of a store; None = the default.

    Returns:
        The documents; those of a histogram in increasing length.

    Raises:
        ValueError: the file is not an array of lengths (or counts), or the folder is not a token store.
        FileNotFoundError: there is nothing at `path`.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; give lengths as a .npy file or a token store's folder"
        )
    if path.is_dir():
        if histogram:
            raise ValueError(f"histogram=true reads a .npy file of counts, and {path} is a folder")
        return _of_store(path, capacity, data or LengthsConfig())
    if data is not None and data != LengthsConfig():
        raise ValueError(
            f"data.overlong={data.overlong} applies to documents of a store, and {path} is a file of lengths"
        )
    try:
        numbers = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} is not a .npy file of lengths: numpy.save(path, lengths) writes one, of whole numbers"
        ) from error
    return Lengths(_of_histogram(numbers, path) if histogram else check_lengths(numbers), None, None)


def _of_store(path: Path, capacity: int, data: LengthsConfig) -> Lengths:
    from multipack.data.documents import Documents

    store = TokenStore(path)
    documents = Documents.whole(store)
    if store.header.split_by == "position":
        documents = documents.cut(capacity)
    policy = store.overlong if data.overlong == "auto" else data.overlong
    documents, fit = documents.fit(capacity, Fit(policy, data.overlap, data.repeat_prompt))
    return Lengths(documents.lengths, documents.target_counts, fit)


_MOST = 1 << 32  # documents of a histogram: 32 GiB as lengths


def _of_histogram(counts: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or counts.size == 0:
        raise ValueError(
            f"{path} is not a histogram: counts of documents are a flat array of whole numbers, got {counts.dtype} of"
            f" shape {counts.shape}"
        )
    if counts.min() < 0:
        raise ValueError(
            f"{path} is not a histogram: it counts {counts.min()} documents of {int(np.argmin(counts)) + 1} tokens"
        )
    documents = int(counts.sum(dtype=np.float64))
    if not 0 < documents <= _MOST:
        raise ValueError(f"{path} counts {documents:,} documents; 1 … {_MOST:,} can be packed")
    return np.repeat(np.arange(1, len(counts) + 1, dtype=np.int64), counts)
