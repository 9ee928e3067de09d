"""Groups of documents for `balance`, and the tokens that they have in common."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from multipack.planning.lengths import Integers, check_integers, short


def repeated_tokens(shared: ArrayLike, members: Integers, tokens: Integers) -> Integers:
    """(documents,) tokens of each document that the first one of its group computes, too."""
    given = check_integers("shared", shared)
    first = np.full(int(members.max()) + 1, -1, dtype=np.int64)
    first[members[::-1]] = np.arange(len(members))[::-1]
    if (
        given.shape != tokens.shape
        or (given < 0).any()
        or (given > tokens).any()
        or (given != given[first[members]]).any()
    ):
        raise ValueError(
            f"shared must be {len(tokens):,} whole numbers, one a document, at most its tokens, and equal in a group"
        )
    return np.where(np.arange(len(members)) == first[members], 0, given)


def check_groups(groups: ArrayLike, documents: int) -> Integers:
    """(documents,) number of each document's group, from 0."""
    given = np.asarray(groups)
    if given.shape != (documents,):
        raise ValueError(f"groups must be {documents:,} values, one a document, got shape {given.shape}")
    try:
        return np.unique(given, return_inverse=True)[1].astype(np.int64)
    except TypeError:
        raise ValueError(f"groups must be integers or strings, got {short(groups)}") from None
