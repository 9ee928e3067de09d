"""Document lengths from a .npy file or a token store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multipack.data.data_config import Overlong
from multipack.data.overlong import Fit, FitReport
from multipack.planning.lengths import check_lengths


@dataclass
class LengthsConfig:
    """Policy for long documents of a store, as in `DataConfig`."""

    overlong: Overlong = "auto"
    """Documents longer than a pack; auto: the store's own policy, mostly an error."""
    overlap: int = 0
    """Tokens that a split piece repeats from the one before, as context."""
    repeat_prompt: bool = False
    """Whether each piece of a split document begins with the document's prompt."""


class Lengths(NamedTuple):
    """Documents as a planner takes them.

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
        ValueError: the file is not an array of lengths (or counts), or the folder is no token store.
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
            f"data.overlong={data.overlong} is about a store's documents, and {path} is a file of lengths"
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
    from multipack.data.store import TokenStore

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
            f"{path} is no histogram: counts of documents are a flat array of whole numbers, got {counts.dtype} of"
            f" shape {counts.shape}"
        )
    if counts.min() < 0:
        raise ValueError(
            f"{path} is no histogram: it counts {counts.min()} documents of {int(np.argmin(counts)) + 1} tokens"
        )
    documents = int(counts.sum(dtype=np.float64))
    if not 0 < documents <= _MOST:
        raise ValueError(f"{path} counts {documents:,} documents; 1 … {_MOST:,} can be packed")
    return np.repeat(np.arange(1, len(counts) + 1, dtype=np.int64), counts)
