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
from multipack.data.documents import Documents
from multipack.data.overlong import FitReport
from multipack.data.store import TokenStore
from multipack.planning.lengths import check_lengths

CAPACITIES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Common capacities of packs."""


@dataclass(frozen=True)
class Bar:
    """Documents of `first` to `last` tokens: their number, and their tokens."""

    first: int
    last: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Excess:
    """Documents longer than `capacity` tokens: their number, and the tokens that truncating them would cut off."""

    capacity: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class CorpusReport:
    """A corpus in figures.

    Attributes:
        documents: number of documents, or preference pairs (`pairs`).
        targets: tokens that are targets, and their share; the first token of a document is never one.
        mean, median, p99, longest: lengths in tokens; `longest_name` is the first document of that length.
        skipped: reason → number of entries left out, duplicates included.
        histogram: documents by length; each bar is twice as wide as the previous one.
        excess: longer documents, for common capacities below the longest one.
        is_stream: whether the store is one stream of text, which training cuts into blocks.
        is_complete: False: the store still grows.
        bytes: size of all files.
        vocabulary_size: every token is less than this.
    """

    description: str
    documents: int
    tokens: int
    targets: int
    target_share: float
    mean: float
    median: float
    p99: float
    longest: int
    longest_name: str
    duplicates: int
    skipped: dict[str, int]
    histogram: list[Bar]
    excess: list[Excess]
    pairs: bool
    is_stream: bool
    shards: int
    is_complete: bool
    bytes: int
    vocabulary_size: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def report_corpus(path: Path | str) -> CorpusReport:
    """The report of a token store, also of one that still grows.

    Raises:
        ValueError: there is no store at `path`, or it is damaged, or empty.
    """
    store = TokenStore(path, growing=True)
    documents, header = Documents.whole(store), store.header
    lengths, targets = documents.lengths, int(documents.target_counts.sum())
    if not len(lengths):
        raise ValueError(f"{path} has no documents")
    longest = int(np.argmax(lengths))
    return CorpusReport(
        description=store.description if store.is_complete else f"{len(store.shards):,} shards so far",
        documents=len(lengths),
        tokens=documents.num_tokens,
        targets=targets,
        target_share=targets / documents.num_tokens,
        mean=float(lengths.mean()),
        median=float(np.median(lengths)),
        p99=float(np.percentile(lengths, 99)),
        longest=int(lengths[longest]),
        longest_name=documents.names(longest),
        duplicates=store.skipped.get("duplicates", 0),
        skipped=store.skipped,
        histogram=_histogram(lengths),
        excess=[
            Excess(capacity, int((lengths > capacity).sum()), int(np.maximum(lengths - capacity, 0).sum()))
            for capacity in CAPACITIES
            if capacity < lengths[longest]
        ],
        pairs=store.has_pairs,
        is_stream=header.split_by == "position",
        shards=len(store.shards),
        is_complete=store.is_complete,
        bytes=store.bytes,
        vocabulary_size=store.vocabulary_size,
    )


def _histogram(lengths: NDArray[np.int64]) -> list[Bar]:
    """Documents of 1, 2 to 3, 4 to 7, … tokens, from the shortest to the longest."""
    power = np.frexp(lengths)[1] - 1  # exact: 2**power <= length < 2**(power + 1)
    documents, tokens = np.bincount(power), np.bincount(power, weights=lengths)
    return [
        Bar(1 << bar, (2 << bar) - 1, int(documents[bar]), int(tokens[bar]))
        for bar in range(int(power.min()), len(documents))
    ]


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
        store, data = TokenStore(path), data or LengthsConfig()
        documents = Documents.whole(store)
        if store.header.split_by == "position":
            documents = documents.cut(capacity)
        documents, fit = documents.fit(capacity, data.overlong, data.overlap, data.repeat_prompt)
        return Lengths(documents.lengths, documents.target_counts, fit)
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


_MOST = 1 << 32  # documents of a histogram: 32 GiB as lengths


def _of_histogram(counts: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
    is_flat = counts.ndim == 1 and counts.dtype.kind in "iu" and counts.size > 0
    if not is_flat or counts.min() < 0 or not 0 < counts.sum(dtype=np.float64) <= _MOST:
        raise ValueError(
            f"{path} is not a histogram: a flat array of counts, of 1 to {_MOST:,} documents in all; got {counts.dtype}"
            f" of shape {counts.shape}"
        )
    return np.repeat(np.arange(1, len(counts) + 1, dtype=np.int64), counts)
