"""A corpus in figures: the report of a token store, and lengths of documents for the planner.

Computed from the store when asked: a store does not change, and ten million documents take a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multipack.data.data_config import Overlong
from multipack.data.documents import Documents
from multipack.data.overlong import FitReport, Integers
from multipack.data.staging import available_memory
from multipack.data.store import TokenStore
from multipack.planning.lengths import check_lengths

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
        documents: number of documents, or preference pairs (`pairs`).
        tokens: number of tokens.
        targets: tokens that are targets, and their share; the first token of a document is never one.
        mean, median, p99, longest: lengths in tokens; `longest_name` is the first document of that length.
        skipped: reason → number of entries left out, duplicates included.
        histogram: documents of 1, 2 to 3, 4 to 7, … tokens, from the shortest to the longest.
        excess: longer documents, for common capacities below the longest one.
        pairs: whether the documents are preference pairs.
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
        documents = Documents.whole(store)
        lengths = documents.lengths
        if not len(lengths):
            raise ValueError(f"{path} has no documents")
        longest = int(np.argmax(lengths))
        self.shards, self.is_complete, self.bytes = len(store.shards), store.is_complete, store.bytes
        self.description = store.description if store.is_complete else f"{self.shards:,} shards so far"
        self.documents, self.tokens = len(lengths), documents.num_tokens
        self.targets = int(documents.target_counts.sum())
        self.target_share = self.targets / self.tokens
        self.mean, self.median = float(lengths.mean()), float(np.median(lengths))
        self.p99, self.longest = float(np.percentile(lengths, 99)), int(lengths[longest])
        self.longest_name = documents.names(longest)
        self.skipped, self.duplicates = store.skipped, store.skipped.get("duplicates", 0)
        power = np.frexp(lengths)[1] - 1  # exact: 2**power <= length < 2**(power + 1)
        number, tokens = np.bincount(power), np.bincount(power, weights=lengths)
        self.histogram = [
            Bar(1 << bar, (2 << bar) - 1, int(number[bar]), int(tokens[bar]))
            for bar in range(int(power.min()), len(number))
        ]
        self.excess = [
            Excess(capacity, int((lengths > capacity).sum()), int(np.maximum(lengths - capacity, 0).sum()))
            for capacity in CAPACITIES
            if capacity < self.longest
        ]
        self.pairs, self.is_stream = store.has_pairs, store.header.split_by == "position"
        self.vocabulary_size = store.vocabulary_size

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        lists = {name: [row._asdict() for row in getattr(self, name)] for name in ("histogram", "excess")}
        return vars(self) | lists


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


def read_lengths(
    path: Path, capacity: int, histogram: bool = False, data: LengthsConfig | None = None
) -> tuple[Integers, Integers | None, FitReport | None]:
    """Lengths of documents, for the planner.

    Args:
        path: a .npy file of whole numbers, or the folder of a token store.
        capacity: most tokens of a pack: the stream of a store is cut into documents of this length, and other
            documents are treated as in training with the same `data`.
        histogram: the file counts documents by length: entry i is the number of documents of i + 1 tokens.
        data: policy for long documents of a store; None = they keep their lengths.

    Returns:
        (documents,) tokens of each document, of a histogram in increasing order; (documents,) target tokens, or None if
        unknown: all but the first token; and what was done to documents that were too long, None for a file.

    Raises:
        ValueError: there is no array of lengths (or counts) at `path`, and no token store.
    """
    if path.is_dir():
        if histogram:
            raise ValueError(f"histogram=true reads a .npy file of counts, and {path} is a folder")
        store, fit = TokenStore(path), None
        documents = Documents.whole(store)
        if store.header.split_by == "position":
            documents = documents.cut(capacity)
        if data is not None:
            documents, fit = documents.fit(capacity, data.overlong, data.overlap, data.repeat_prompt)
        return documents.lengths, documents.target_counts, fit
    if data is not None and data != LengthsConfig():
        raise ValueError(
            f"data.overlong={data.overlong} applies to documents of a store, and {path} is a file of lengths"
        )
    try:
        if not path.is_file():
            raise FileNotFoundError("there is no such file")
        # Mapped: an array that is larger than its file is refused before memory is allocated.
        numbers = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # the file's header is an expression in Python, which fails in many ways
        raise ValueError(
            f"{path} is neither the folder of a token store nor a .npy file of lengths, as numpy.save(path, lengths)"
            f" writes one: {' '.join(str(error).split())}"
        ) from error
    return _of_histogram(numbers, path) if histogram else check_lengths(numbers), None, None


_MOST = 1 << 32  # documents of a histogram: 32 GiB as lengths


def _of_histogram(counts: Integers, path: Path) -> Integers:
    is_flat = counts.ndim == 1 and counts.dtype.kind in "iu" and counts.size > 0
    if not is_flat or counts.min() < 0 or not 0 < counts.sum(dtype=np.float64) <= _MOST:
        raise ValueError(
            f"{path} is not a histogram: a flat array of counts, of 1 to {_MOST:,} documents in all; got {counts.dtype}"
            f" of shape {counts.shape}"
        )
    needed, free = 8 * int(counts.sum(dtype=np.int64)), available_memory()
    problem = f"{path} counts documents whose lengths need {needed:,} bytes of memory"
    if free is not None and needed > free:
        raise ValueError(f"{problem}, and {free:,} are free")
    try:
        return np.repeat(np.arange(1, len(counts) + 1, dtype=np.int64), counts)
    except MemoryError as error:  # this process has a limit of its own
        raise ValueError(f"{problem}, more than this process may have") from error
