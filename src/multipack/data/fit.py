"""Documents longer than a pack: refused, or truncated, split or dropped as the user chose, and counted.

limit 8     |AAAAAAAAAAAAAAAAAAA|BBBB|
truncate    [AAAAAAAA]           [BBBB]      the first 8 tokens stay (truncate_left: the last 8)
split       [AAAAAAAA][AAAAAAAA][AAA][BBBB]  pieces of at most 8 tokens; each starts anew, at position 0
drop                             [BBBB]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

FitPolicy = Literal["error", "truncate", "truncate_left", "split", "drop"]
Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Document numbers, starts within the document, and lengths of pieces: three (n,) arrays."""


@dataclass(frozen=True)
class FitReport:
    """What fitting did.

    Attributes:
        limit: most tokens of a document.
        policy: what was done with longer ones.
        truncated_documents: documents that lost their end, and
        truncated_tokens: the tokens that they lost.
        split_documents: documents that were split, and
        pieces: the pieces that they became.
        dropped_documents: documents left out, and
        dropped_tokens: their tokens.
        without_targets: documents and pieces, of those that remain, in which no token is a target.
    """

    limit: int
    policy: FitPolicy
    truncated_documents: int = 0
    truncated_tokens: int = 0
    split_documents: int = 0
    pieces: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    without_targets: int = 0

    def describe(self) -> str:
        """One line for people; empty when nothing had to be done."""
        said = []
        if self.truncated_documents:
            said.append(
                f"{self.truncated_documents:,} documents longer than {self.limit:,} tokens truncated "
                f"({self.truncated_tokens:,} tokens)"
            )
        if self.split_documents:
            said.append(
                f"{self.split_documents:,} documents longer than {self.limit:,} tokens split "
                f"into {self.pieces:,} pieces"
            )
        if self.dropped_documents:
            said.append(
                f"{self.dropped_documents:,} documents longer than {self.limit:,} tokens dropped "
                f"({self.dropped_tokens:,} tokens)"
            )
        if self.without_targets:
            said.append(f"{self.without_targets:,} documents or pieces without a target")
        return "; ".join(said)


def cut_pieces(pieces: Pieces, size: int) -> Pieces:
    """Every piece as pieces of at most `size` tokens, in order; only the last of each may be shorter."""
    document, start, length = pieces
    counts = -(-length // size)
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    left = np.repeat(length, counts) - within * size
    return np.repeat(document, counts), np.repeat(start, counts) + within * size, np.minimum(left, size)


def fit_pieces(
    pieces: Pieces, limit: int, policy: FitPolicy, name: Callable[[int], str]
) -> tuple[Pieces, FitReport]:
    """Make every piece fit into `limit` tokens.

    Args:
        pieces: what may be too long.
        limit: most tokens of a piece.
        policy: what becomes of longer ones.
        name: the name of piece i, for errors.

    Returns:
        The pieces, and what was done to them (`without_targets` is left at 0).

    Raises:
        ValueError: an unknown policy; a limit below 1; with policy "error" a piece that is too long, with its
            number, name and length; with "drop" nothing remains.
    """
    if policy not in get_args(FitPolicy):
        raise ValueError(f"data.overlong={policy!r}: one of {', '.join(get_args(FitPolicy))}")
    if limit < 1:
        raise ValueError(f"a document cannot fit into {limit} tokens")
    document, start, length = pieces
    long = length > limit
    count, tokens = int(long.sum()), int(length[long].sum())
    if count == 0:
        return pieces, FitReport(limit, policy)
    if policy == "error":
        first = int(np.argmax(long))
        raise ValueError(
            f"document {int(document[first]):,} ({name(first)}) has {int(length[first]):,} tokens, more than "
            f"the limit of {limit:,} tokens for a document ({count:,} of {len(length):,} documents are too long, "
            f"the longest has {int(length.max()):,}): set data.overlong=truncate, split or drop, or raise "
            "plan.capacity (and model.context, where positions are learned)"
        )
    if policy in ("truncate", "truncate_left"):
        if policy == "truncate_left":
            start = start + np.maximum(length - limit, 0)
        report = FitReport(limit, policy, truncated_documents=count, truncated_tokens=tokens - count * limit)
        return (document, start, np.minimum(length, limit)), report
    if policy == "drop":
        if count == len(length):
            raise ValueError(
                f"data.overlong=drop leaves nothing: all {count:,} documents exceed {limit:,} tokens; "
                "set data.overlong=truncate or split, or raise plan.capacity"
            )
        report = FitReport(limit, policy, dropped_documents=count, dropped_tokens=tokens)
        return (document[~long], start[~long], length[~long]), report
    split = cut_pieces(pieces, limit)
    pieces_made = len(split[0]) - (len(length) - count)
    return split, FitReport(limit, policy, split_documents=count, pieces=pieces_made)
