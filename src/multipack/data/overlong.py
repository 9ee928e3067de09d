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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Pieces(NamedTuple):
    """Documents, or pieces of documents, as flat int64 arrays.

        document of 19 tokens   pppAAAAAAAAAAAAAAAA
        start 7, length 11, front (3, 5)                   [ppp aa AAAAAA]

    Attributes:
        document: (n,) number of the document.
        start: (n,) first token of the piece in its document, without the repeated first tokens.
        length: (n,) tokens of the piece, repeated ones included.
        front: (n, 2), or None for zeros. Column 0: number of the document's first tokens that are repeated in front
            of the piece. Column 1: number of the piece's first tokens that are not targets here; at least column 0.
    """

    document: Integers
    start: Integers
    length: Integers
    front: Integers | None = None

    def take(self, chosen: Integers | NDArray[np.bool_] | slice) -> Pieces:
        """The chosen pieces, in the order given."""
        return Pieces(*(None if values is None else values[chosen] for values in self))  # type: ignore[arg-type]

    def fronts(self) -> tuple[Integers, Integers]:
        """Both columns of `front`."""
        front = np.zeros((len(self.length), 2), dtype=np.int64) if self.front is None else self.front
        return front[:, 0], front[:, 1]

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """All pieces of all parts, in order."""
        document, start, length = (np.concatenate([part[field] for part in parts]) for field in range(3))
        if all(part.front is None for part in parts):
            return cls(document, start, length)
        front = np.concatenate([np.stack(part.fronts(), axis=1) for part in parts])
        return cls(document, start, length, front)

    def cut(self, cuts: Pieces) -> Pieces:
        """Pieces of these pieces: `cuts.document` numbers them, and `cuts.start` counts from their first tokens.

        Raises:
            ValueError: these pieces repeat tokens.
        """
        if self.front is not None:
            raise ValueError(
                "pieces with repeated tokens cannot be cut again: cut or split the documents once"
            )
        owner = cuts.document
        return Pieces(self.document[owner], self.start[owner] + cuts.start, cuts.length, cuts.front)


def truncate(lengths: Integers, limit: int) -> Pieces:
    """The first `limit` tokens of each document."""
    return Pieces(np.arange(len(lengths)), np.zeros_like(lengths), np.minimum(lengths, limit))


def truncate_left(lengths: Integers, limit: int) -> Pieces:
    """The last `limit` tokens of each document."""
    return Pieces(np.arange(len(lengths)), np.maximum(lengths - limit, 0), np.minimum(lengths, limit))


def drop(lengths: Integers, limit: int) -> Pieces:
    """The documents of at most `limit` tokens."""
    kept = np.flatnonzero(lengths <= limit)
    return Pieces(kept, np.zeros_like(kept), lengths[kept])


def split(lengths: Integers, limit: int, overlap: int = 0, prompt: Integers | None = None) -> Pieces:
    """Each document as pieces of at most `limit` tokens, in order; each of its targets is a target exactly once.

    The first piece has `limit` tokens. Each later piece has the prompt, the last `overlap` tokens of the piece before,
    and new tokens.

    Args:
        lengths: (n,) tokens.
        limit: most tokens of a piece.
        overlap: tokens repeated from the piece before.
        prompt: (n,) first tokens repeated in front of each later piece; None = 0. Less than `limit` − `overlap`.
    """
    prompt = np.zeros_like(lengths) if prompt is None else prompt
    fresh = limit - overlap - prompt
    counts = 1 - np.minimum((limit - lengths) // fresh, 0)
    owner = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(owner)) - np.repeat(
        np.cumsum(counts) - counts, counts
    )  # of the piece in its document
    is_first = number == 0
    begin = np.where(is_first, 0, limit + (number - 1) * fresh[owner])  # of the new tokens
    new = np.minimum(np.where(is_first, limit, fresh[owner]), lengths[owner] - begin)
    if not overlap and not prompt.any():
        return Pieces(owner, begin, new)
    prefix = np.where(is_first, 0, prompt[owner])
    context = prefix + np.where(is_first, 0, overlap)
    return Pieces(owner, begin - (context - prefix), context + new, np.stack([prefix, context], axis=1))


POLICIES: dict[str, Callable[[Integers, int], Pieces]] = {
    "truncate": truncate,
    "truncate_left": truncate_left,
    "split": split,
    "drop": drop,
}
"""Policy → function of (lengths, limit) that returns pieces whose `document` numbers the given lengths."""


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


def _report(lengths: Integers, cuts: Pieces, limit: int, policy: str) -> FitReport:
    pieces = np.bincount(cuts.document, minlength=len(lengths))
    several, one = pieces > 1, pieces == 1
    repeated = cuts.fronts()[1]
    remaining = np.bincount(cuts.document, cuts.length - repeated, len(lengths)).astype(np.int64)
    return FitReport(
        limit,
        policy,
        truncated_documents=int((one & (remaining < lengths)).sum()),
        truncated_tokens=int((lengths - remaining)[one].sum()),
        split_documents=int(several.sum()),
        pieces=int(pieces[several].sum()),
        repeated_tokens=int(repeated.sum()),
        dropped_documents=int((pieces == 0).sum()),
        dropped_tokens=int(lengths[pieces == 0].sum()),
    )


@dataclass(frozen=True)
class Fit:
    """Policy for documents that are too long.

    Attributes:
        policy: `error`, or a name in `POLICIES`.
        overlap: tokens that a piece of a split document repeats from the piece before.
        repeat_prompt: whether each piece of a split document begins with the document's prompt.

    Raises:
        ValueError: an unknown policy, or a negative overlap.
    """

    policy: str = "error"
    overlap: int = 0
    repeat_prompt: bool = False

    def __post_init__(self) -> None:
        if self.policy not in ("error", *POLICIES):
            raise ValueError(f"data.overlong={self.policy!r}: one of {', '.join(('error', *POLICIES))}")
        if self.overlap < 0:
            raise ValueError(f"data.overlap={self.overlap}: tokens to repeat, 0 or more")


class Named(Protocol):
    """What `fit_pieces` asks of the view that it fits."""

    def names(self, index: int) -> str:
        """Name of document `index`, for errors."""

    def prompts(self, numbers: Integers) -> Integers:
        """Tokens of the prompts of these documents."""


def fit_pieces(
    pieces: Pieces, limit: int, fit: Fit, view: Named, are_pairs: bool = False
) -> tuple[Pieces, FitReport]:
    """Pieces of at most `limit` tokens, and a report of what was done (`without_targets` is left at 0).

    Args:
        pieces: documents.
        limit: most tokens of a piece.
        fit: policy for longer documents.
        view: names the documents, and knows their prompts.
        are_pairs: whether they are preference pairs, which cannot be shortened.

    Raises:
        ValueError: a limit below 1; a document too long with policy `error`; a pair that would be shortened; `drop`
            leaves no document; `split` leaves no room for new tokens.
    """
    if limit < 1:
        raise ValueError(f"a document cannot fit into {limit} tokens")
    if fit.policy == "split" and fit.overlap >= limit:
        raise ValueError(
            f"data.overlap={fit.overlap:,} leaves no room for new tokens in pieces of {limit:,}: lower it, or raise"
            " plan.capacity (and model.context, where positions are learned)"
        )
    lengths = pieces.length
    long = np.flatnonzero(lengths > limit)
    if not len(long):
        return pieces, FitReport(limit, fit.policy)
    if fit.policy == "error" or (are_pairs and fit.policy != "drop"):
        raise ValueError(_too_long(lengths, long, limit, fit.policy, view, are_pairs))
    policy = POLICIES[fit.policy]
    if fit.policy == "split":
        policy = partial(split, overlap=fit.overlap, prompt=_prompts(lengths, long, limit, fit, view))
    cuts = policy(lengths, limit)
    if not len(cuts.length):
        others = "" if are_pairs else "set data.overlong=truncate or split, or "
        raise ValueError(
            f"data.overlong={fit.policy} leaves nothing: all {len(long):,} documents exceed {limit:,} tokens; {others}"
            "raise plan.capacity"
        )
    return pieces.cut(cuts), _report(lengths, cuts, limit, fit.policy)


def _prompts(lengths: Integers, long: Integers, limit: int, fit: Fit, view: Named) -> Integers:
    """(n,) tokens that pieces of each document repeat in front; 0 without `repeat_prompt`."""
    prompt = np.zeros_like(lengths)
    if fit.repeat_prompt:
        prompt[long] = view.prompts(long)
    full = np.flatnonzero(prompt + fit.overlap >= limit)
    if len(full):
        first = int(full[0])
        raise ValueError(
            f"{view.names(first)} has a prompt of {int(prompt[first]):,} tokens, which leaves no room for new tokens in"
            f" pieces of {limit:,} with data.overlap={fit.overlap:,} ({len(full):,} such documents): set"
            " data.repeat_prompt=false, or raise plan.capacity (and model.context, where positions are learned)"
        )
    return prompt


def _too_long(
    lengths: Integers, long: Integers, limit: int, policy: str, view: Named, are_pairs: bool
) -> str:
    first = int(long[0])
    remedy = "set data.overlong=truncate, split or drop, or raise"
    if are_pairs:
        remedy = "a preference pair cannot be shortened: set data.overlong=drop, or raise"
        if policy != "error":
            remedy = f"data.overlong={policy}, but {remedy}"
    return (
        f"document {first:,} ({view.names(first)}) has {int(lengths[first]):,} tokens, more than the limit of {limit:,}"
        f" tokens for a document ({len(long):,} of {len(lengths):,} documents are too long, the longest has"
        f" {int(lengths.max()):,}): {remedy} plan.capacity (and model.context, where positions are learned)"
    )
