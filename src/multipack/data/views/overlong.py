"""Policies for documents longer than a pack: functions of `CUTS`, and dropping.

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
from dataclasses import astuple, dataclass
from operator import add
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.data.text.skipped import counted
from multipack.planning.lengths import Integers

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


def split(lengths: Integers, limit: int, overlap: int = 0, prompt: Integers | int = 0) -> Pieces:
    """Each document as pieces of at most `limit` tokens, in order; each of its targets is a target exactly once.

    The first piece has `limit` tokens. Each later piece has the prompt, the last `overlap` tokens of the piece before,
    and new tokens. `prompt` (n,) is the number of tokens of each document's prompt, less than `limit` − `overlap`.
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


CUTS: dict[str, Callable[[Integers, int, int, Integers], Pieces]] = {
    "truncate": truncate,
    "truncate_left": truncate_left,
    "split": split,
}
"""`data.overlong` → function of (lengths, limit, overlap, prompt) that returns pieces, whose `document` is an index
into the lengths."""
EFFECTS = {
    "truncate": "truncated ({tokens:,} tokens)",
    "truncate_left": "truncated at their beginning ({tokens:,} tokens)",
    "split": "split into {pieces:,} pieces ({tokens:,} tokens repeated)",
    "drop": "dropped ({tokens:,} tokens)",
}
"""`data.overlong` → its effect on longer documents as text, with `{pieces}` and `{tokens}` of the `FitReport`."""


@dataclass(frozen=True)
class FitReport:
    """Counts of the documents that a policy cut or dropped."""

    limit: int  # most tokens of a document
    policy: str  # policy for longer documents
    documents: int = 0  # number of longer documents
    pieces: int = 0  # number of documents and pieces that remain of them
    tokens: int = 0  # tokens that were cut off or dropped; of `split`, tokens that pieces repeat
    without_targets: int = 0  # remaining documents and pieces without a target
    cut_answers: int = 0  # truncated documents that lost targets

    def __add__(self, other: FitReport) -> FitReport:
        """Counts of both; one without longer documents may have another policy."""
        policy = other.policy if other.documents else self.policy
        counts = map(add, astuple(self)[2:], astuple(other)[2:])
        return FitReport(self.limit, policy, *counts)

    def describe(self) -> str:
        """One line for the console; empty if nothing was done."""
        found = []
        if self.documents:
            result = EFFECTS[self.policy].format(pieces=self.pieces, tokens=self.tokens)
            if self.cut_answers:
                result = f"{result.removesuffix(')')}; targets cut off in {self.cut_answers:,})"
            found.append(counted(self.documents, f"documents longer than {self.limit:,} tokens {result}"))
        if self.without_targets:
            noun = "pieces" if self.policy == "split" else "documents"
            found.append(counted(self.without_targets, f"{noun} without a target"))
        return "; ".join(found)
