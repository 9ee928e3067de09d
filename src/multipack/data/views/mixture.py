"""A mixture: documents of several sources in the shares of given weights, exactly, as one view.

    weights 3 : 1, documents of one size  an epoch that shows all of B once
    A  a0 a1                              a0 a1 a1 a0 a0 a1   (three times)
    B  b0 b1                              b0 b1
                                          a0 a1 b0 a1 a0 a0 b1 a1

A mixture is a view of joined stores in which a document may occur several times, so that planning and resuming need no
knowledge of it. The number of documents of each source follows from the weights in exact fractions; the choice of
documents that are repeated follows from the seed, and is the same in every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from multipack.data.views.documents import Documents
from multipack.planning.lengths import Integers
from multipack.planning.steps import permutation

MOST_DOCUMENTS = 1 << 30
"""Maximum number of documents of an epoch: a larger plan would not fit into memory."""
_REPEATS = 1 << 21  # + number of a source: in place of an epoch, for an order that no epoch has


@dataclass(frozen=True)
class Share:
    """The part of one source in an epoch of a mixture."""

    name: str  # of the source
    available: int  # its training documents (pieces, where long ones were split)
    documents: int  # documents in the epoch; repetitions count
    tokens: int  # their tokens
    requested: float  # share of the tokens that the weights request
    actual: float  # share in the epoch

    def describe(self) -> str:
        """One line for the console."""
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens: {self.actual:.2%} of the mixture (requested"
            f" {self.requested:.2%}), {self.documents / self.available:.2f} times its {self.available:,} documents"
        )


def mix(
    sources: Sequence[Documents],
    names: Sequence[str],
    weights: Sequence[float] = (),
    seed: int = 0,
) -> tuple[Documents, tuple[Share, ...]]:
    """One epoch of a mixture, its sources evenly interleaved, and the share of each source.

    `sources` are views of one store, none of them empty; `weights` are positive shares of tokens. The epoch is the
    shortest that shows every document; `seed` chooses those that are repeated. Without weights each is shown once.

    Each source gives documents until its share of the epoch's tokens is reached; the last document exceeds the share by
    less than its own size.

    Raises:
        ValueError: weights for an epoch of more than `MOST_DOCUMENTS` documents.
    """
    available = [source.num_tokens for source in sources]
    # A weight is the decimal number that was written: 0.1 is a tenth.
    exact = [Fraction(str(weight)) for weight in weights or available]
    requested = [weight / sum(exact) for weight in exact]
    total = max(size / share for size, share in zip(available, requested, strict=True))
    counts = [
        _count_until(source.lengths, total * share, seed, number)
        for number, (source, share) in enumerate(zip(sources, requested, strict=True))
    ]
    if sum(counts) > MOST_DOCUMENTS:
        most = max(range(len(counts)), key=lambda number: counts[number] / len(sources[number]))
        raise ValueError(
            f"data.weights request an epoch of {sum(counts):,} documents, in which {names[most]} is seen"
            f" {counts[most] / len(sources[most]):,.0f} times; at most {MOST_DOCUMENTS:,} can be planned: give larger"
            " weights to large stores"
        )
    chosen = [_repeated(len(sources[number]), count, seed, number) for number, count in enumerate(counts)]
    views = [source.take(documents) for source, documents in zip(sources, chosen, strict=True)]
    places = [(np.arange(count) + 0.5) / count for count in counts]
    mixed = Documents.joined(views).take(np.argsort(np.concatenate(places), kind="stable"))
    tokens = [view.num_tokens for view in views]
    shares = tuple(
        Share(
            name=names[number],
            available=len(source),
            documents=len(view),
            tokens=view.num_tokens,
            requested=float(requested[number]),
            actual=tokens[number] / sum(tokens),
        )
        for number, (source, view) in enumerate(zip(sources, views, strict=True))
    )
    return mixed, shares


def _repeated(count: int, wanted: int, seed: int, source: int) -> Integers:
    """(wanted,) document numbers: 0 … count − 1 in each whole round, then a random choice of them."""
    rounds, rest = divmod(wanted, count)
    drawn = permutation(seed, _REPEATS + source, count)[:rest]
    return np.concatenate([np.tile(np.arange(count), rounds), np.sort(drawn)])


def _count_until(sizes: Integers, wanted: Fraction, seed: int, source: int) -> int:
    """Least number of documents of these sizes that `_repeated` needs to reach a sum of `wanted`."""
    rounds, rest = divmod(wanted, int(sizes.sum()))
    sums = np.cumsum(sizes[permutation(seed, _REPEATS + source, len(sizes))])
    least = math.ceil(rest)
    return int(rounds) * len(sizes) + (int(np.searchsorted(sums, least)) + 1 if least else 0)
