"""Document lengths from where people keep them: a .npy file or a token store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multipack.planning.packing import check_lengths


def read_lengths(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Lengths in tokens, and target tokens where the source knows them.

    Args:
        path: a .npy file of whole numbers (targets then follow from lengths: all but the first token), or the
            folder of a token store.

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

        documents = Documents.whole(TokenStore(path))
        return documents.lengths, documents.target_counts
    try:
        lengths = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of lengths: {error}") from error
    return check_lengths(lengths), None
