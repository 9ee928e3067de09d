"""The fewest packs as a linear program over patterns, solved by generating its columns (Gilmore and Gomory 1961).

Let a_vp be the documents of length v in a pack of pattern p, n_v the documents of length v that there are, and x_p
how many packs have the pattern:

    primal   minimize Σ_p x_p       with Σ_p a_vp x_p ≥ n_v  for every length v,   x ≥ 0
    dual     maximize Σ_v n_v u_v   with Σ_v a_vp u_v ≤ 1    for every pattern p,  u ≥ 0

There are far too many patterns to write down, so the primal begins with some, and its dual values u price the
others: the pattern of greatest Σ a_v u_v is a knapsack, solved exactly by dynamic programming. Above 1 it
enters the primal; at 1 the primal is solved over all patterns.

The bound is *proven*, whatever the solver's rounding: the dual values are rounded to integers U, the knapsack is solved
with them exactly, and if no pattern weighs more than Z, then no packing has fewer than ⌈Σ n_v U_v / Z⌉ packs
(Farley 1990): each pack weighs Z at most, and all together weigh Σ n_v U_v. That holds after every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csc_array, hstack

from multipack.planning.kernels import patterns as kernels
from multipack.planning.lengths import Histogram

SCALE = 1 << 40
"""Dual values, which are at most 1, times this are rounded to integers. Packs that a knapsack's table of 2^26 entries
can hold have less than 2^22 documents, so sums stay below 2^63."""

_SMOOTHING = 0.7  # share of the best dual values so far in those that are priced (Wentges 1997): fewer rounds
_COLUMNS_KEPT = 6  # times the number of lengths, when there are twice as many
_TOLERANCE = 1e-9  # a pattern enters if it prices above 1 by this: the solver's own is not smaller


class Solution(NamedTuple):
    """What column generation ends with.

    Attributes:
        columns: (distinct, columns) documents of each length in each pattern, int64.
        packs: (columns,) float, how many packs of each pattern.
        bound: fewest packs that these documents need (proven).
    """

    columns: csc_array
    packs: NDArray[np.float64]
    bound: int


class Knapsack:
    """The pricing problem: which pack of these documents weighs most?"""

    def __init__(self, histogram: Histogram, capacity: int, max_documents: int) -> None:
        self.values, self.counts = histogram
        self.items, self.copies = _items(histogram, capacity, max_documents)
        self.slots = max_documents if max_documents < capacity // int(self.values[-1]) else 0
        self.shape = (self.slots + 1, capacity + 1)

    @property
    def entries(self) -> int:
        """Entries of its table, which its memory and its time are proportional to."""
        return len(self.items) * math.prod(self.shape)

    def heaviest(self, weights: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """The most that a pack weighs (exactly), and for each length a heaviest pack that holds it.

        Args:
            weights: (distinct,) of a document of each length, integers of at least 0.

        Returns:
            The weight, and (distinct + 1, distinct) documents of each length in each pack; the last is heaviest.
        """
        table = np.zeros(self.shape, dtype=np.int64)
        taken = np.zeros((len(self.items), *self.shape), dtype=np.bool_)
        kernels.knapsack(self.items, self.copies, self.values, weights, table, taken)
        packs = kernels.heaviest_packs(self.items, self.copies, self.values, self.counts, weights, taken)
        return int(table[-1, -1]), packs


def _items(
    histogram: Histogram, capacity: int, max_documents: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths as things to take or leave: 1, 2, 4, … documents at once make every number up to the most."""
    numbers, copies = [], []
    most = np.minimum(np.minimum(histogram.counts, capacity // histogram.values), max_documents)
    for number, left in enumerate(most.tolist()):
        size = 1
        while left > 0:
            numbers.append(number)
            copies.append(min(size, left))
            left, size = left - copies[-1], 2 * size
    return np.array(numbers, dtype=np.int64), np.array(copies, dtype=np.int64)


class _Prices:
    """Dual values that were priced so far: the best of them, and the bound that they prove."""

    def __init__(self, histogram: Histogram, capacity: int, max_documents: int) -> None:
        self.counts = histogram.counts.tolist()
        self.knapsack = Knapsack(histogram, capacity, max_documents)
        self.bound, self.best_sum = 0, 0.0
        self.best = histogram.values / capacity  # proves the token bound
        self.heaviest(self.best)

    def heaviest(self, duals: NDArray[np.float64]) -> csc_array:
        """Price dual values: patterns that weigh much, and a bound that is better or not."""
        weights = np.floor(duals * SCALE).astype(np.int64)
        heaviest, packs = self.knapsack.heaviest(weights)
        total = sum(map(int.__mul__, self.counts, weights.tolist()))  # Python's integers have no end
        self.bound = max(self.bound, -(-total // heaviest))
        if total / heaviest > self.best_sum:
            self.best_sum, self.best = total / heaviest, duals * (SCALE / heaviest)
        return csc_array(packs.T)

    def improving(self, duals: NDArray[np.float64]) -> csc_array:
        """Patterns that the primal with these dual values lacks; none are left where it is solved."""
        for share in (_SMOOTHING, 0.0):  # what lies on the way to the best values is often enough
            packs = self.heaviest(share * self.best + (1 - share) * duals)
            missing = np.flatnonzero(packs.T @ duals > 1 + _TOLERANCE)
            if len(missing):
                break
        return distinct_columns(packs[:, missing])


def generate(
    histogram: Histogram,
    capacity: int,
    max_documents: int,
    columns: csc_array,
    enough: int,
    seconds_left: Callable[[], float],
) -> Solution | None:
    """Solve the pattern LP, beginning with some columns.

    It ends when the LP is solved as far as whole packs go, when the bound reaches `enough`, or after the time.

    Args:
        histogram: the documents.
        capacity: most tokens of a pack.
        max_documents: most documents of a pack.
        columns: (distinct, columns) patterns to begin with, among which every length occurs.
        enough: a bound that leaves nothing to do, since a packing with as many packs is known.
        seconds_left: what is left of the time budget.

    Returns:
        The solution; None if the time was over before the first LP was solved.
    """
    prices = _Prices(histogram, capacity, max_documents)
    solution: Solution | None = None
    while (left := seconds_left()) > 0:
        primal = linprog(
            np.ones(columns.shape[1]),
            A_ub=-columns.astype(np.float64),
            b_ub=-histogram.counts.astype(np.float64),
            method="highs-ds",
            options={"time_limit": left},
        )
        if primal.status != 0:
            break
        duals = np.maximum(-primal.ineqlin.marginals, 0)
        fresh = prices.improving(duals)
        solution = Solution(columns, primal.x, prices.bound)
        if fresh.shape[1] == 0 or prices.bound >= min(enough, math.ceil(primal.fun - 1e-6)):
            break
        columns = hstack([_trimmed(solution, duals), fresh], format="csc")
    return solution


def distinct_columns(columns: csc_array) -> csc_array:
    """Each column once, in order of first appearance."""
    columns.sum_duplicates()  # also sorts
    first: dict[bytes, int] = {}
    for column in range(columns.shape[1]):
        rows = slice(columns.indptr[column], columns.indptr[column + 1])
        first.setdefault(columns.indices[rows].tobytes() + columns.data[rows].tobytes(), column)
    return columns[:, list(first.values())]


def _trimmed(solution: Solution, duals: NDArray[np.float64]) -> csc_array:
    """Without the columns that price worst, when there are many; those in use stay, so that it can be solved."""
    columns = solution.columns
    most = _COLUMNS_KEPT * columns.shape[0]
    if columns.shape[1] <= 2 * most:
        return columns
    order = np.lexsort((-(columns.T @ duals), solution.packs <= 0))
    return columns[:, np.sort(order[:most])]
