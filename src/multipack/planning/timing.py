"""Measured seconds of micro-batches → what a token, a pair and a document take, by non-negative least squares.

    t = t₀ + α·Σ l + β·Σ l(l+1) + γ·documents

FLOPs are not time: attention runs at a lower share of the peak than matrix products, short documents waste
parts of tiles, and every document costs a few launches. Four numbers describe that well enough to balance by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

FINEST = 1 << 10
"""Units of a token's time where attention takes none: 1,024ths keep a document's constant exact enough."""

LARGEST_RATIO = 1 << 28
"""Tokens at which attention takes as long as the rest, above which it is taken to be free: no document is that long."""

_TERMS = ("a constant", "tokens", "squares of lengths", "documents")


@dataclass(frozen=True)
class Seconds:
    """What a micro-batch's forward and backward pass takes, in seconds.

    Attributes:
        micro_batch: t₀, whatever is in it.
        token: α, of a token.
        pair: β, of l(l+1), which is two query-key pairs.
        document: γ, of a document.
        error: root mean square of measured minus predicted, over the mean of the measured times.
    """

    micro_batch: float
    token: float
    pair: float
    document: float
    error: float = 0.0

    def __post_init__(self) -> None:
        """Check what may come from a file."""
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"measured seconds must be finite and not negative; {field.name} is {value!r}"
                )

    def of(self, lengths: NDArray[np.int64]) -> float:
        """Predicted seconds of one micro-batch of documents of these lengths."""
        tokens, squares, documents = _terms(lengths)
        return self.micro_batch + self.token * tokens + self.pair * squares + self.document * documents


def fit_seconds(timings: Sequence[tuple[NDArray[np.int64], float]]) -> Seconds:
    """The four coefficients, none below 0 (Lawson and Hanson 1974, ch. 23), that fit measured times best.

    Columns are scaled to a largest entry of 1 first: squares are 10^9 where documents are 10.

    Raises:
        ValueError: fewer than four timings, seconds that are no positive numbers, or timings in which
            tokens, squares and documents change together, so that their times cannot be told apart.
    """
    from scipy.optimize import nnls  # half a second, which only a fit needs

    if len(timings) < len(_TERMS):
        raise ValueError(
            f"a fit has {len(_TERMS)} coefficients and needs at least as many timings, got {len(timings)};"
            " time about 20 micro-batches of different documents"
        )
    seconds = np.array([float(time) for _, time in timings])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError(
            f"timings must be positive seconds, got {seconds[~(seconds > 0)][:3].tolist() or 'inf'}"
        )
    rows = np.array([(1.0, *_terms(lengths)) for lengths, _ in timings])
    largest = rows.max(axis=0)
    scaled = rows / largest
    if np.linalg.matrix_rank(scaled, tol=1e-6 * math.sqrt(len(rows))) < len(_TERMS):
        raise ValueError(
            f"these {len(timings)} timings cannot tell {', '.join(_TERMS)} apart: time micro-batches of different"
            " numbers of tokens, some of one long document and some of many short ones"
        )
    solution, residual = nnls(scaled, seconds / seconds.max())
    solution[solution < 1e-10] = 0.0  # of the largest time: rounding, not seconds
    if not solution[1:].any():
        raise ValueError(
            "the measured seconds do not grow with tokens, squares or documents: time larger micro-batches"
        )
    found = solution * seconds.max() / largest
    error = float(residual) * seconds.max() / math.sqrt(len(seconds)) / seconds.mean()
    return Seconds(*(float(value) for value in (*found, error)))


def integer_weights(seconds: Seconds) -> tuple[int, int, int]:
    """(linear, quadratic, constant) of a document's cost, in the proportions of its seconds.

    In units of β; of α / 1,024 where attention takes no time worth its name; of γ where nothing else takes any.
    """
    token, pair, document = seconds.token, seconds.pair, seconds.document
    if pair > 0 and max(token, document / FINEST) <= pair * LARGEST_RATIO:
        return round(token / pair), 1, round(document / pair)
    if token > 0 and document <= token * LARGEST_RATIO:
        return FINEST, 0, round(document / token * FINEST)
    return 0, 0, 1


def _terms(lengths: NDArray[np.int64]) -> tuple[float, float, float]:
    """Tokens, Σ l(l+1), and documents."""
    exact = lengths.astype(np.float64)
    return float(exact.sum()), float((exact * (exact + 1)).sum()), float(len(exact))
