"""A mixture: documents of several sources in the shares that the user asks for, exactly, as one view.

    weights 3 : 1, by documents           an epoch that shows all of B once
    A  a0 a1                              a0 a1 a1 a0 a0 a1   (three times; each time in another order)
    B  b0 b1                              b0 b1
                                          a0 a1 b0 a1 a0 a0 b1 a1

A mixture is a view of the joint store, in which a document may stand several times; so planning, resuming and
fingerprints need to know nothing of it. How many documents of a source an epoch has follows from the weights in exact
fractions; which ones are repeated, or left out, follows from the seed, and is the same in every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from multipack.data.documents import Documents
from multipack.planning.order import permutation

Integers = NDArray[np.int64]
Unit = Literal["documents", "tokens"]
Ends = Literal["all", "first"]

MOST_DOCUMENTS = 1 << 30
"""Documents of an epoch; more would hardly fit into memory, and are not meant."""
_ROUNDS = 1 << 21  # a stream of keys of its own for which documents are repeated


@dataclass(frozen=True)
class Share:
    """What a mixture has of one source, in an epoch.

    Attributes:
        name: of the source.
        available: documents that it has to train on (pieces, where long ones were split).
        available_tokens: their tokens.
        documents: that the epoch has of it; what is seen twice counts twice.
        tokens: their tokens.
        asked: share of the mixture that it should have, of documents or tokens as the weights say.
        got: share that it has, of the same.
        left_out: documents that the epoch does not show.
    """

    name: str
    available: int
    available_tokens: int
    documents: int
    tokens: int
    asked: float
    got: float
    left_out: int

    @property
    def times(self) -> float:
        """How many times the epoch shows a document of this source, on average."""
        return self.documents / self.available

    def describe(self) -> str:
        """One line for people."""
        text = (
            f"{self.documents:,} documents, {self.tokens:,} tokens: {self.got:.2%} of the mixture (asked"
            f" {self.asked:.2%}), {self.times:.2f} times its {self.available:,} documents"
        )
        return text + (f"; {self.left_out:,} documents left out" if self.left_out else "")


def mix(
    sources: Sequence[Documents],
    names: Sequence[str],
    weights: Sequence[float] = (),
    weigh_by: Unit = "tokens",
    ends: Ends = "all",
    seed: int = 0,
) -> tuple[Documents, tuple[Share, ...]]:
    """One epoch of a mixture, its sources evenly interleaved.

    By documents, the epoch's number of documents is divided in proportion to the weights, and what is left by rounding
    goes to the largest remainders (Hamilton's method). By tokens, each source gives documents until its share is
    reached; the last one goes beyond it by less than its own tokens.

    Args:
        sources: views of one store, none of them empty.
        names: of the sources.
        weights: positive, in any unit; empty = every document once.
        weigh_by: what the weights are shares of.
        ends: `all`: as short an epoch as shows every document at least once; `first`: as long a one as repeats nothing.
        seed: of the choice of documents that are repeated or left out.

    Returns:
        The view, and what it has of each source.

    Raises:
        ValueError: a source without documents; weights which ask for an epoch of more than 2³⁰ documents.
    """
    for source, name in zip(sources, names, strict=True):
        if not len(source):
            raise ValueError(f"{name} has no documents to train on: leave it out of data.paths")
    sizes = [len(source) if weigh_by == "documents" else source.num_tokens for source in sources]
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"data.weights={list(weights)}: positive numbers")
    # A weight is the decimal number that was written: 0.1 is a tenth.
    exact = [Fraction(str(weight)) for weight in weights] if weights else [Fraction(size) for size in sizes]
    asked = [weight / sum(exact) for weight in exact]
    bound = max if ends == "all" else min
    total = bound(size / share for size, share in zip(sizes, asked, strict=True))
    if weigh_by == "documents":
        # Where all shall be seen, up: then no source gets fewer than it has; else down.
        whole = -(-total.numerator // total.denominator) if ends == "all" else int(total)
        counts = largest_remainders(whole, asked)
        _check_size(counts, sources, names)
        chosen = [
            _repeated(len(source), count, seed, number)
            for number, (source, count) in enumerate(zip(sources, counts, strict=True))
        ]
    else:
        wanted = [total * share for share in asked]
        times = [want / size for want, size in zip(wanted, sizes, strict=True)]
        _check_size([int(a * len(b)) for a, b in zip(times, sources, strict=True)], sources, names)
        chosen = [
            _until(source.lengths, want, seed, number)
            for number, (source, want) in enumerate(zip(sources, wanted, strict=True))
        ]
    views = [source.take(numbers) for source, numbers in zip(sources, chosen, strict=True)]
    return _interleaved(views), _shares(sources, names, views, asked, weigh_by)


def largest_remainders(total: int, shares: Sequence[Fraction]) -> list[int]:
    """`total` divided in proportion to `shares`, which sum to 1; equal remainders are served in order."""
    counts = [int(total * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: counts[number] - total * shares[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


def _check_size(counts: Sequence[int], sources: Sequence[Documents], names: Sequence[str]) -> None:
    if sum(counts) <= MOST_DOCUMENTS:
        return
    most = max(range(len(counts)), key=lambda number: counts[number] / len(sources[number]))
    raise ValueError(
        f"data.weights ask for an epoch of {sum(counts):,} documents, in which {names[most]} is seen"
        f" {counts[most] / len(sources[most]):,.0f} times; at most {MOST_DOCUMENTS:,} can be planned: give larger"
        " weights to large stores, or set data.mixture_ends=first"
    )


def _repeated(count: int, wanted: int, seed: int, source: int) -> Integers:
    """(wanted,) document numbers: every one of 0 … count − 1 in each whole round, then some of them, drawn."""
    rounds, rest = divmod(wanted, count)
    drawn = permutation(seed, rounds, count, _ROUNDS + source)[:rest]
    return np.concatenate([np.tile(np.arange(count), rounds), np.sort(drawn)])


def _until(lengths: Integers, wanted: Fraction, seed: int, source: int) -> Integers:
    """Document numbers: whole rounds, and of another one as many as are needed to reach so many tokens."""
    rounds, rest = divmod(wanted, int(lengths.sum()))
    ends = np.cumsum(lengths[permutation(seed, int(rounds), len(lengths), _ROUNDS + source)])
    least = -(-rest.numerator // rest.denominator)  # tokens are whole
    more = int(np.searchsorted(ends, least)) + 1 if least else 0
    return _repeated(len(lengths), int(rounds) * len(lengths) + more, seed, source)


def _interleaved(views: Sequence[Documents]) -> Documents:
    """All documents of these views, each view spread evenly over the whole; within a view in its order."""
    places = [(np.arange(len(view)) + 0.5) / len(view) for view in views]
    return Documents.joined(views).take(np.argsort(np.concatenate(places), kind="stable"))


def _shares(
    sources: Sequence[Documents],
    names: Sequence[str],
    views: Sequence[Documents],
    asked: Sequence[Fraction],
    weigh_by: Unit,
) -> tuple[Share, ...]:
    sizes = [len(view) if weigh_by == "documents" else view.num_tokens for view in views]
    return tuple(
        Share(
            name=names[number],
            available=len(source),
            available_tokens=source.num_tokens,
            documents=len(views[number]),
            tokens=views[number].num_tokens,
            asked=float(asked[number]),
            got=sizes[number] / sum(sizes),
            left_out=max(len(source) - len(views[number]), 0),
        )
        for number, source in enumerate(sources)
    )
