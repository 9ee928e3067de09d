"""Lengths of documents for the planner, from a file of numbers or a token store. Imports no torch, no safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multipack.data.data_config import Overlong
from multipack.data.overlong import FitReport, Integers
from multipack.machine import available_memory
from multipack.planning.lengths import check_lengths


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
        from multipack.data.documents import Documents
        from multipack.data.store import TokenStore

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
