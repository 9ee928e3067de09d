"""Document lengths from where people keep them: a .npy file or a token store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multipack.planning.packing import check_lengths


def read_lengths(path: Path, capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Lengths in tokens, and target tokens where the source knows them.

    Args:
        path: a .npy file of whole numbers (targets then follow from lengths: all but the first token), or the
            folder of a token store.
        capacity: most tokens of a pack: a store's stream is cut into documents of this length, and its other
            documents are treated as training would by default.

    Raises:
        ValueError: the file is not an array of lengths, or the folder is no token store.
        FileNotFoundError: there is nothing at `path`.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; give lengths as a .npy file or a token store's folder"
        )
    if path.is_dir():
        from multipack.data.documents import Documents
        from multipack.data.store import TokenStore

        store = TokenStore(path)
        documents = Documents.whole(store)
        if store.header.split_by == "position":
            documents = documents.cut(capacity)
        documents, _ = documents.fit(capacity, store.overlong)
        return documents.lengths, documents.target_counts
    try:
        lengths = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} is not a .npy file of lengths: numpy.save(path, lengths) writes one, of whole numbers"
        ) from error
    return check_lengths(lengths), None
