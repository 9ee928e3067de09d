"""Lengths of documents for the planner: from a file, without torch and safetensors, or from a token store."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from multipack.data.text.data_config import source_of
from multipack.machine import available_memory
from multipack.planning.lengths import Integers, check_lengths


def read_lengths(path: Path, capacity: int, histogram: bool = False) -> Integers:
    """(documents,) tokens of each document, for the planner; of a histogram in increasing order.

    Args:
        path: a .npy file of whole numbers, or the folder of a token store.
        capacity: the stream of a store is cut into documents of this length.
        histogram: the file counts documents by length: entry i is the number of documents of i + 1 tokens.

    Raises:
        ValueError: there is no array of lengths (or counts) at `path`, and no token store.
    """
    if path.is_dir():
        if histogram:
            raise ValueError(f"histogram=true reads a .npy file of counts, and {path} is a folder")
        from multipack.data.stores.store import TokenStore
        from multipack.data.views.documents import Documents

        store = TokenStore(path)
        documents = Documents.whole(store)
        return (documents.cut(capacity) if store.header.split_by == "position" else documents).lengths
    try:
        if not path.is_file():
            raise FileNotFoundError("there is no such file")
        # Mapped: an array that is larger than its file is refused before memory is allocated.
        numbers = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # the file's header is an expression in Python, which fails in many ways
        kind = source_of(str(path))
        command = shlex.join(["multipack", "plan", f"data={kind}", f"data.path={path}"])
        is_text = f"; to plan these documents: `{command}`" if kind else ""
        raise ValueError(
            f"{path} is neither the folder of a token store nor a .npy file of lengths, as numpy.save(path, lengths)"
            f" writes one: {' '.join(str(error).split())}{is_text}"
        ) from error
    return _of_histogram(numbers, path) if histogram else check_lengths(numbers)


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
