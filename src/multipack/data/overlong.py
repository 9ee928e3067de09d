"""Policies for documents longer than a pack: each is one function and its row in `POLICIES`.

limit 8         |AAAAAAAAAAAAAAAAAAA|BBBB|
truncate        [AAAAAAAA]           [BBBB]      the first 8 tokens remain (truncate_left: the last 8)
split           [AAAAAAAA][AAAAAAAA][AAA][BBBB]  pieces of at most 8 tokens; positions restart in each
  overlap 2     [AAAAAAAA]
                      [aaAAAAAA]
                            [aaAAAAA]            a: context, not a target: it is a target in the piece before
  repeat_prompt [ppppAAAA][ppppAAAA] …           p: the document's prompt, in front of every piece
drop                                 [BBBB]
error           refuses, and names the first document that is too long
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Integers = NDArray[np.int64]
Pieces = NDArray[np.void]
"""Rows of type `PIECE`."""
PIECE = np.dtype([(name, "<i8") for name in ("document", "start", "length", "prefix", "context")])
"""A document, or a piece of one:

    document of 19 tokens   pppAAAAAAAAAAAAAAAA
    start 7, length 11, prefix 3, context 5            [ppp aa AAAAAA]

document: its number. start: first token of the piece in it, without the repeated first tokens. length: tokens of the
piece, repeated ones included. prefix: number of the document's first tokens that are repeated in front of the piece.
context: number of the piece's first tokens that are not targets here; at least `prefix`.
"""


def pieces_of(
    document: ArrayLike, start: ArrayLike, length: ArrayLike, prefix: ArrayLike = 0, context: ArrayLike = 0
) -> Pieces:
    """(n,) pieces from the fields of `PIECE`."""
    pieces = np.empty(len(np.asarray(document)), dtype=PIECE)
    for name, values in zip(PIECE.names or (), (document, start, length, prefix, context), strict=True):
        pieces[name] = values
    return pieces


def truncate(lengths: Integers, limit: int, *_: Any) -> Pieces:
    """The first `limit` tokens of each document."""
    return pieces_of(np.arange(len(lengths)), 0, np.minimum(lengths, limit))


def truncate_left(lengths: Integers, limit: int, *_: Any) -> Pieces:
    """The last `limit` tokens of each document."""
    return pieces_of(np.arange(len(lengths)), np.maximum(lengths - limit, 0), np.minimum(lengths, limit))


def drop(lengths: Integers, limit: int, *_: Any) -> Pieces:
    """The documents of at most `limit` tokens."""
    kept = np.flatnonzero(lengths <= limit)
    return pieces_of(kept, 0, lengths[kept])


def split(lengths: Integers, limit: int, overlap: int = 0, prompt: Integers | int = 0) -> Pieces:
    """Each document as pieces of at most `limit` tokens, in order; each of its targets is a target exactly once.

    The first piece has `limit` tokens. Each later piece has the prompt, the last `overlap` tokens of the piece before,
    and new tokens.

    Args:
        lengths: (n,) tokens.
        limit: most tokens of a piece.
        overlap: tokens repeated from the piece before.
        prompt: (n,) first tokens repeated in front of each later piece. Less than `limit` − `overlap`.
    """
    prompt = np.broadcast_to(prompt, lengths.shape)
    fresh = limit - overlap - prompt
    counts = 1 - np.minimum((limit - lengths) // fresh, 0)
    owner = np.repeat(np.arange(len(lengths)), counts)
    # Number of each piece in its document.
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_first = number == 0
    begin = np.where(is_first, 0, limit + (number - 1) * fresh[owner])  # of the new tokens
    new = np.minimum(np.where(is_first, limit, fresh[owner]), lengths[owner] - begin)
    prefix = np.where(is_first, 0, prompt[owner])
    repeated = np.where(is_first, 0, overlap)
    return pieces_of(owner, begin - repeated, prefix + repeated + new, prefix, prefix + repeated)


POLICIES: dict[str, Callable[[Integers, int, int, Integers], Pieces]] = {
    "truncate": truncate,
    "truncate_left": truncate_left,
    "split": split,
    "drop": drop,
}
"""Policy → function of (lengths, limit, overlap, prompt) that returns pieces whose `document` numbers the lengths."""


@dataclass(frozen=True)
class FitReport:
    """What a policy did.

    Attributes:
        limit: most tokens of a document.
        policy: policy for longer documents.
        truncated_documents: documents of which one shorter piece remains.
        truncated_tokens: tokens that they lost.
        split_documents: documents of which several pieces remain.
        pieces: number of these pieces.
        repeated_tokens: tokens that the pieces repeat: prompts and overlaps.
        dropped_documents: documents of which nothing remains.
        dropped_tokens: tokens that they had.
        without_targets: remaining documents and pieces without a target.
    """

    limit: int
    policy: str
    truncated_documents: int = 0
    truncated_tokens: int = 0
    split_documents: int = 0
    pieces: int = 0
    repeated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    without_targets: int = 0

    def __add__(self, other: FitReport) -> FitReport:
        """Counts of both."""
        names = [field.name for field in fields(self)[2:]]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def describe(self) -> str:
        """One line for people; empty if nothing was done."""
        longer = f"documents longer than {self.limit:,} tokens"
        where = " at their beginning" if self.policy == "truncate_left" else ""
        repeated = f" ({self.repeated_tokens:,} tokens repeated)" if self.repeated_tokens else ""
        lines = (
            (self.truncated_documents, f"{longer} truncated{where} ({self.truncated_tokens:,} tokens)"),
            (self.split_documents, f"{longer} split into {self.pieces:,} pieces{repeated}"),
            (self.dropped_documents, f"{longer} dropped ({self.dropped_tokens:,} tokens)"),
            (self.without_targets, "documents or pieces without a target"),
        )
        return "; ".join(f"{count:,} {text}" for count, text in lines if count)


def report_fit(lengths: Integers, cuts: Pieces, limit: int, policy: str, without_targets: int) -> FitReport:
    """The report of a policy that made `cuts` of documents with these lengths."""
    pieces = np.bincount(cuts["document"], minlength=len(lengths))
    several, one = pieces > 1, pieces == 1
    remaining = np.bincount(cuts["document"], cuts["length"] - cuts["context"], len(lengths)).astype(np.int64)
    return FitReport(
        limit,
        policy,
        truncated_documents=int((one & (remaining < lengths)).sum()),
        truncated_tokens=int((lengths - remaining)[one].sum()),
        split_documents=int(several.sum()),
        pieces=int(pieces[several].sum()),
        repeated_tokens=int(cuts["context"].sum()),
        dropped_documents=int((pieces == 0).sum()),
        dropped_tokens=int(lengths[pieces == 0].sum()),
        without_targets=without_targets,
    )
