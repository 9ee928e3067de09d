"""Lengths of documents for the planner: from a file, without torch and safetensors, or from a token store."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from multipack.data.text.data_config import source_of
from multipack.planning.lengths import Integers, check_lengths


def read_lengths(path: Path, capacity: int) -> Integers:
    """(documents,) tokens of each document, for the planner.

    Args:
        path: a .npy file of whole numbers, or the folder of a token store.
        capacity: the stream of a store is cut into documents of this length.

    Raises:
        ValueError: there is no array of lengths at `path`, and no token store.
    """
    if path.is_dir():
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
    return check_lengths(numbers)
