"""Documents longer than a pack: refused, or truncated, split or dropped as the user chose, and counted.

limit 8         |AAAAAAAAAAAAAAAAAAA|BBBB|
truncate        [AAAAAAAA]           [BBBB]      the first 8 tokens stay (truncate_left: the last 8)
split           [AAAAAAAA][AAAAAAAA][AAA][BBBB]  pieces of at most 8 tokens; each starts anew, at position 0
  overlap 2     [AAAAAAAA]
                      [aaAAAAAA]
                            [aaAAAAA]            a: as context, not a target: it was one in the piece before
  repeat_prompt [ppppAAAA][ppppAAAA] …           p: the document's prompt, before every piece
drop                                 [BBBB]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

FitPolicy = Literal["error", "truncate", "truncate_left", "split", "drop"]
Integers = NDArray[np.int64]


class Pieces(NamedTuple):
    """Documents, or pieces of documents, as flat arrays, each (n,) int64.

        document of 19 tokens   pppAAAAAAAAAAAAAAAA
        start 7, length 11, prefix 3, context 5            [ppp aa AAAAAA]

    Attributes:
        document: numbers of the documents.
        start: where in its document the piece begins, what is put in front of it not counted.
        length: tokens in all, those in front included.
        prefix: so many of the document's first tokens stand in front.
        context: so many of the first tokens, at least the prefix, are not targets here: they are read before or are
            targets elsewhere.
    """

    document: Integers
    start: Integers
    length: Integers
    prefix: Integers
    context: Integers

    @classmethod
    def of(cls, document: Integers, start: Integers, length: Integers) -> Pieces:
        """Pieces that repeat nothing."""
        nothing = np.broadcast_to(np.int64(0), length.shape)  # takes no memory, however many there are
        return cls(document, start, length, nothing, nothing)

    @property
    def repeats(self) -> bool:
        """Whether any piece repeats tokens of its document."""
        return self.context.strides != (0,) and bool(self.context.any())

    def take(self, chosen: Integers | NDArray[np.bool_] | slice) -> Pieces:
        """Some of them."""
        taken = Pieces.of(self.document[chosen], self.start[chosen], self.length[chosen])
        if self.context.strides == (0,):
            return taken
        return taken._replace(prefix=self.prefix[chosen], context=self.context[chosen])

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """All pieces of these, in turn."""
        made = cls.of(*(np.concatenate([part[field] for part in parts]) for field in range(3)))
        if not any(part.repeats for part in parts):
            return made
        prefix, context = (np.concatenate([part[field] for part in parts]) for field in (3, 4))
        return made._replace(prefix=prefix, context=context)

    def between(self, begin: Integers, stop: Integers) -> Pieces:
        """Of each piece its tokens `begin` to `stop`, counted from the piece's first.

        Raises:
            ValueError: a piece that is cut at its left side begins with a prompt that does not stand there.
        """
        if ((self.prefix > 0) & (begin > 0)).any():
            raise ValueError(
                "pieces that begin with a repeated prompt cannot be cut at their beginning: cut the documents first,"
                " then split them with data.repeat_prompt"
            )
        cut = Pieces.of(self.document, self.start + begin, stop - begin)
        if not self.repeats:
            return cut
        return cut._replace(
            prefix=np.minimum(self.prefix, cut.length),
            context=np.clip(self.context - begin, 0, cut.length),
        )


@dataclass(frozen=True)
class FitReport:
    """What fitting did.

    Attributes:
        limit: most tokens of a document.
        policy: what was done with longer ones.
        truncated_documents: documents that lost their end (or, with truncate_left, their beginning), and
        truncated_tokens: the tokens that they lost.
        split_documents: documents that were split, and
        pieces: the pieces that they became, and
        repeated_tokens: tokens that pieces repeat: prompts, and what overlaps.
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
    repeated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    without_targets: int = 0

    def __add__(self, other: FitReport) -> FitReport:
        """What was done to the documents of both."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return FitReport(self.limit, self.policy, **counts)

    def describe(self) -> str:
        """One line for people; empty when nothing had to be done."""
        said, than = [], f"longer than {self.limit:,} tokens"
        if self.truncated_documents:
            where = " at their beginning" if self.policy == "truncate_left" else ""
            said.append(
                f"{self.truncated_documents:,} documents {than} truncated{where} ({self.truncated_tokens:,} tokens)"
            )
        if self.split_documents:
            repeated = f" ({self.repeated_tokens:,} tokens repeated)" if self.repeated_tokens else ""
            said.append(
                f"{self.split_documents:,} documents {than} split into {self.pieces:,} pieces{repeated}"
            )
        if self.dropped_documents:
            said.append(
                f"{self.dropped_documents:,} documents {than} dropped ({self.dropped_tokens:,} tokens)"
            )
        if self.without_targets:
            said.append(f"{self.without_targets:,} documents or pieces without a target")
        return "; ".join(said)


_COUNTS = (
    "truncated_documents",
    "truncated_tokens",
    "split_documents",
    "pieces",
    "repeated_tokens",
    "dropped_documents",
    "dropped_tokens",
    "without_targets",
)


def cut_pieces(pieces: Pieces, size: int) -> Pieces:
    """Every piece as pieces of at most `size` tokens, in order; only the last of each may be shorter."""
    counts = -(-pieces.length // size)
    begin = _within(counts) * size
    return pieces.take(np.repeat(np.arange(len(counts)), counts)).between(
        begin, np.minimum(begin + size, np.repeat(pieces.length, counts))
    )


def split_pieces(pieces: Pieces, limit: int, overlap: int, prompt: Integers) -> Pieces:
    """Pieces of more than `limit` tokens as several, which repeat what they need to be understood.

    The first of them has `limit` tokens. Each that follows has the prompt, `overlap` tokens of the one before it, and
    then new ones: so that, where something is repeated, each target is a target exactly once.

    Args:
        pieces: some of them longer than `limit`.
        limit: most tokens of a piece.
        overlap: tokens that are repeated, between the prompt and the new ones.
        prompt: (n,) of each piece its first tokens that are repeated; at least its prefix, if that is not 0. Less than
            `limit − overlap`.
    """
    fresh = limit - overlap - prompt  # new tokens of each piece but the first
    counts = 1 - np.minimum((limit - pieces.length) // fresh, 0)
    owner, within = np.repeat(np.arange(len(counts)), counts), _within(counts)
    whole, first = pieces.take(owner), within == 0
    begin = np.where(first, 0, limit + (within - 1) * fresh[owner])  # of what is new, within the whole
    new = np.minimum(np.where(first, limit, fresh[owner]), whole.length - begin)
    front = np.where(first, 0, prompt[owner])
    known = front + np.where(first, 0, overlap)
    return Pieces(
        whole.document,
        np.where(first, whole.start, whole.start - whole.prefix + begin - overlap),
        known + new,
        np.where(first, np.minimum(whole.prefix, limit), front),
        known + np.clip(whole.context - begin, 0, new),  # what was no target in the whole is none here
    )


def _within(counts: Integers) -> Integers:
    """0 … count − 1 of each count, in turn."""
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class Fit:
    """What becomes of documents that are too long.

    Attributes:
        policy: of them all.
        overlap: tokens that a split piece repeats of the one before.
        repeat_prompt: whether every piece begins with the document's prompt.

    Raises:
        ValueError: an unknown policy, or an overlap below 0.
    """

    policy: FitPolicy = "error"
    overlap: int = 0
    repeat_prompt: bool = False

    def __post_init__(self) -> None:
        if self.policy not in get_args(FitPolicy):
            raise ValueError(f"data.overlong={self.policy!r}: one of {', '.join(get_args(FitPolicy))}")
        if self.overlap < 0:
            raise ValueError(f"data.overlap={self.overlap}: tokens to repeat, 0 or more")


def fit_pieces(
    pieces: Pieces,
    limit: int,
    fit: Fit,
    name: Callable[[int], str],
    prompts: Callable[[Integers], Integers],
    are_pairs: bool = False,
) -> tuple[Pieces, FitReport]:
    """Make every piece fit into `limit` tokens.

    Args:
        pieces: what may be too long.
        limit: most tokens of a piece.
        fit: what becomes of longer ones.
        name: the name of piece i, for errors.
        prompts: tokens of the prompts with which the pieces of these numbers begin.
        are_pairs: whether documents are preference pairs, which nothing shortens.

    Returns:
        The pieces, and what was done to them (`without_targets` is left at 0).

    Raises:
        ValueError: a limit below 1; with policy "error" a piece that is too long, with its number, name and length;
            a pair that would be shortened; with "drop" nothing remains; with "split" no room for anything new.
    """
    if limit < 1:
        raise ValueError(f"a document cannot fit into {limit} tokens")
    policy, length = fit.policy, pieces.length
    if policy == "split" and fit.overlap >= limit:
        raise ValueError(
            f"data.overlap={fit.overlap:,} leaves no room for new tokens in pieces of {limit:,}: lower it, or raise"
            " plan.capacity (and model.context, where positions are learned)"
        )
    long = np.flatnonzero(length > limit)
    if not len(long):
        return pieces, FitReport(limit, policy)
    count, tokens = len(long), int(length[long].sum())
    if policy == "error" or (are_pairs and policy != "drop"):
        raise _too_long(pieces, long, limit, name, policy if are_pairs else None)
    if policy == "truncate":
        report = FitReport(limit, policy, truncated_documents=count, truncated_tokens=tokens - count * limit)
        return pieces.between(np.zeros_like(length), np.minimum(length, limit)), report
    if policy == "truncate_left":
        report = FitReport(limit, policy, truncated_documents=count, truncated_tokens=tokens - count * limit)
        return pieces.between(np.maximum(length - limit, 0), length), report
    if policy == "drop":
        if count == len(length):
            raise ValueError(
                f"data.overlong=drop leaves nothing: all {count:,} documents exceed {limit:,} tokens; "
                f"{'' if are_pairs else 'set data.overlong=truncate or split, or '}raise plan.capacity"
            )
        report = FitReport(limit, policy, dropped_documents=count, dropped_tokens=tokens)
        return pieces.take(length <= limit), report
    return _split(pieces, long, limit, fit, name, prompts)


def _split(
    pieces: Pieces,
    long: Integers,
    limit: int,
    fit: Fit,
    name: Callable[[int], str],
    prompts: Callable[[Integers], Integers],
) -> tuple[Pieces, FitReport]:
    if fit.overlap or fit.repeat_prompt:
        prompt = np.zeros_like(pieces.length)
        if fit.repeat_prompt:
            prompt[long] = prompts(long)
        full = np.flatnonzero(prompt + fit.overlap >= limit)
        if len(full):
            first = int(full[0])
            raise ValueError(
                f"document {int(pieces.document[first]):,} ({name(first)}) has a prompt of {int(prompt[first]):,}"
                f" tokens, which leaves no room for new ones in pieces of {limit:,} tokens with"
                f" data.overlap={fit.overlap:,} ({len(full):,} such documents): set data.repeat_prompt=false, or raise"
                " plan.capacity (and model.context, where positions are learned)"
            )
        if (pieces.prefix > prompt)[long].any():
            raise ValueError(
                "pieces that begin with a repeated prompt are split with data.repeat_prompt=true only"
            )
        made = split_pieces(pieces, limit, fit.overlap, prompt)
    else:
        made = cut_pieces(pieces, limit)
    report = FitReport(
        limit,
        fit.policy,
        split_documents=len(long),
        pieces=len(made.length) - (len(pieces.length) - len(long)),
        repeated_tokens=int(made.length.sum() - pieces.length.sum()),
    )
    return made, report


def _too_long(
    pieces: Pieces, long: Integers, limit: int, name: Callable[[int], str], pair_policy: FitPolicy | None
) -> ValueError:
    """What is said of documents that are too long; of pairs with the policy that would have shortened them."""
    first, lengths = int(long[0]), pieces.length
    remedy = "set data.overlong=truncate, split or drop, or raise"
    if pair_policy is not None:
        remedy = "a preference pair cannot be shortened: set data.overlong=drop, or raise"
        if pair_policy != "error":
            remedy = f"data.overlong={pair_policy}, but {remedy}"
    return ValueError(
        f"document {int(pieces.document[first]):,} ({name(first)}) has {int(lengths[first]):,} tokens, more than "
        f"the limit of {limit:,} tokens for a document ({len(long):,} of {len(lengths):,} documents are too long, "
        f"the longest has {int(lengths.max()):,}): {remedy} "
        "plan.capacity (and model.context, where positions are learned)"
    )
