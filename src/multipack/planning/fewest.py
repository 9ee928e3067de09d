"""The fewest packs, and a proven lower bound on their number.

The search goes from cheap to expensive methods and stops as soon as a packing has as many packs as the bound:

 1. best fit, and the simple bounds of `histogram.py`: milliseconds;
 2. `fill`: packs filled to the last token, one after another; enough where packs hold many documents;
 3. the linear program over patterns, whose dual proves what no simple bound finds: that lengths do not combine well.
    Its solution x_p is rounded down, the remaining documents are packed by 1 and 2, and the program is solved
    again for them.

Example: the lengths of SQuAD (at most 384). Their tokens would fill 39,713 packs and best fit needs 40,631; 40,195 are
necessary and sufficient, because too many documents fit only in pairs.

**Linear program** (Gilmore and Gomory 1961). Let a_vp be the documents of length v in a pack of pattern p, n_v the
documents of length v, and x_p the number of packs with the pattern:

    primal   minimize Σ_p x_p       with Σ_p a_vp x_p ≥ n_v  for every length v,   x ≥ 0
    dual     maximize Σ_v n_v u_v   with Σ_v a_vp u_v ≤ 1    for every pattern p,  u ≥ 0

There are too many patterns to list, so columns are generated: the dual values u of the columns so far price all others,
and the pattern of greatest Σ a_v u_v is a knapsack, solved exactly by dynamic programming. Patterns above 1 enter the
primal; when there are none, the primal is optimal.

The bound does not depend on the solver's rounding: the dual values are rounded to integers U, the knapsack is solved
with them exactly, and if no pattern exceeds Z, then no packing has fewer than ⌈Σ n_v U_v / Z⌉ packs (Farley 1990). That
holds after every round.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csc_array, hstack

from multipack.planning.histogram import Histogram, Patterns, best_fit, simple_bound
from multipack.planning.kernels import search as kernels

QUICK = ((50, 10**8), (1_000, 10**8))
THOROUGH = ((10_000, 10**9), (10_000, 4 * 10**9))
"""Efforts of `fill`: documents tried per pack, and total work. A unit of work takes about a nanosecond."""

MAX_LENGTHS = 2_000
"""Maximum number of distinct lengths for which the linear program is solved; it has one row per length."""

MAX_ENTRIES = 1 << 26
"""Most entries (bytes) of the knapsack's table."""

SCALE = 1 << 40
"""Dual values (at most 1) are multiplied by this and rounded to integers. A knapsack of 2^26 entries holds fewer than
2^22 documents, so that sums stay below 2^63."""

SMOOTHING = 0.7
"""Weight of the best dual values so far in the values that are priced (Wentges 1997): fewer rounds."""

COLUMNS_PER_LENGTH = 6  # columns that stay in the program, once there are twice as many
TOLERANCE = 1e-9  # a pattern enters the primal if its price exceeds 1 by this
ROUND_UP = 0.6  # where no x_p reaches 1, those above this value count as one pack


def fewest(
    histogram: Histogram, capacity: int, max_documents: int, time_budget: float
) -> tuple[Patterns, int]:
    """Search for the fewest packs.

    The result is a function of the arguments alone as long as the time budget is not exhausted.

    Args:
        histogram: the documents.
        capacity: tokens of a pack.
        max_documents: most documents of a pack.
        time_budget: CPU seconds of this process, checked between rounds.

    Returns:
        The packs, never more than best fit makes, and a proven lower bound on their number.
    """
    search = _Search(histogram, capacity, max_documents, time.process_time() + time_budget)
    if search.fill(QUICK):
        search.fill(THOROUGH)
    if not search.is_over and len(histogram.values) <= MAX_LENGTHS:
        knapsack = Knapsack(histogram, capacity, max_documents)
        if knapsack.entries <= MAX_ENTRIES:
            _solve(search)
    return search.best, search.bound


def fill(histogram: Histogram, capacity: int, max_documents: int, nodes: int, work: int) -> Patterns:
    """Fill one pack after another as far as the remaining documents allow, each with the longest of them.

    Best fit leaves small gaps at its end that no document fits. This method searches for documents that fill each pack
    to the last token, so that short documents, which fill anything, remain for the end (minimum bin slack: Gupta and Ho
    1999; with the longest document fixed: Fleszar and Hindi 2002).

    Args:
        histogram: the documents.
        capacity: tokens of a pack.
        max_documents: most documents of a pack.
        nodes: documents that the search for one pack tries.
        work: limit of all searches together, in 64-bit words shifted.
    """
    room = min(capacity, histogram.tokens)
    return Patterns(*kernels.fill(*histogram, room, max_documents, nodes, work))


@dataclass
class _Search:
    """The documents, the best packing so far, and the proven bound."""

    histogram: Histogram
    capacity: int
    max_documents: int
    deadline: float
    bound: int = field(init=False)
    best: Patterns = field(init=False)

    def __post_init__(self) -> None:
        self.bound = simple_bound(self.histogram, self.capacity, self.max_documents)
        self.best = best_fit(self.histogram, self.capacity, self.max_documents)

    @property
    def is_over(self) -> bool:
        """Whether the packing is proven optimal, or the time budget is exhausted."""
        return self.best.num_packs <= self.bound or self.seconds_left() <= 0

    def seconds_left(self) -> float:
        """CPU seconds left of the time budget."""
        return self.deadline - time.process_time()

    def offer(self, packing: Patterns) -> None:
        """Keep a packing if it has fewer packs."""
        if packing.num_packs < self.best.num_packs:
            self.best = packing

    def fill(self, efforts: tuple[tuple[int, int], ...]) -> bool:
        """Offer packings of `fill`. Efforts for which no time is left are skipped. Returns whether one was better."""
        before = self.best
        for nodes, work in efforts:
            if not self.is_over and work * 1e-9 < self.seconds_left():
                self.offer(fill(self.histogram, self.capacity, self.max_documents, nodes, work))
        return self.best is not before

    def complete(self, begun: Patterns) -> None:
        """Offer packs of some documents, with the remaining documents packed by best fit and `fill`."""
        counts = np.maximum(self.histogram.counts - begun.documents(len(self.histogram.counts)), 0)
        rest = (Histogram(self.histogram.values, counts), self.capacity, self.max_documents)
        if not counts.any():
            self.offer(begun)
            return
        for packing in (best_fit(*rest), *(fill(*rest, *effort) for effort in QUICK)):
            self.offer(Patterns.join(begun, packing))


class _Solution(NamedTuple):
    """A solution of the linear program.

    Attributes:
        columns: (distinct, patterns) int64, documents of each length in a pack of each pattern.
        packs: (patterns,) float, packs of each pattern.
        bound: proven lower bound on the number of packs.
    """

    columns: csc_array
    packs: NDArray[np.float64]
    bound: int


def _solve(search: _Search) -> None:
    """Solve the linear program and round its solution.

    The documents left over after rounding down are a small problem: a basic solution has at most as many fractional
    values as there are lengths. The loop ends when the bound of the rest shows that no better packing follows.
    """
    problem = (search.histogram, search.capacity, search.max_documents)
    counts, fixed = search.histogram.counts, Patterns.empty()
    columns = hstack([_columns(best_fit(*problem), len(counts)), _columns(search.best, len(counts))])
    solution = _generate(search, counts, distinct_columns(columns), search.best.num_packs)
    if solution is not None:
        search.bound = max(search.bound, solution.bound)
    while solution is not None and not search.is_over:
        times = np.floor(solution.packs + 1e-6).astype(np.int64)
        if not times.any():
            times = ((solution.packs > ROUND_UP) | (solution.packs == solution.packs.max())).astype(np.int64)
        used = np.flatnonzero(times)
        chosen = solution.columns[:, used]
        fixed = Patterns.join(fixed, _patterns(chosen, times[used]))
        search.complete(fixed)
        counts = np.maximum(counts - chosen @ times[used], 0)
        enough = search.best.num_packs - fixed.num_packs
        if not counts.any():
            return
        solution = _generate(search, counts, _clipped(solution.columns, counts), enough)
        if solution is not None and solution.bound >= enough:
            return


def _generate(
    search: _Search, counts: NDArray[np.int64], columns: csc_array, enough: int
) -> _Solution | None:
    """Solve the linear program by column generation.

    Args:
        search: values of the lengths, limits of a pack, time budget.
        counts: (distinct,) documents of each length to be packed.
        columns: (distinct, patterns) first patterns; every length that has documents occurs in them.
        enough: stop when the bound reaches this number of packs.

    Returns:
        The solution; None if the time budget was exhausted before the first program was solved.
    """
    prices = _Prices(Histogram(search.histogram.values, counts), search.capacity, search.max_documents)
    solution: _Solution | None = None
    while (left := search.seconds_left()) > 0:
        primal = linprog(
            np.ones(columns.shape[1]),
            A_ub=-columns.astype(np.float64),
            b_ub=-counts.astype(np.float64),
            method="highs-ds",
            options={"time_limit": left},
        )
        if primal.status != 0:
            break
        duals = np.maximum(-primal.ineqlin.marginals, 0)
        added = prices.improving(duals)
        solution = _Solution(columns, primal.x, prices.bound)
        if added.shape[1] == 0 or prices.bound >= min(enough, math.ceil(primal.fun - 1e-6)):
            break
        columns = hstack([_trimmed(solution, duals), added], format="csc")
    return solution


class _Prices:
    """The pricing problem: the best dual values so far, and the bound that they prove."""

    def __init__(self, histogram: Histogram, capacity: int, max_documents: int) -> None:
        self.counts = histogram.counts.tolist()
        self.knapsack = Knapsack(histogram, capacity, max_documents)
        self.bound, self.best_value = 0, 0.0
        self.best = histogram.values / capacity  # proves the token bound
        self.price(self.best)

    def price(self, duals: NDArray[np.float64]) -> csc_array:
        """Columns of greatest weight under these dual values; improves the bound where it can."""
        weights = np.floor(duals * SCALE).astype(np.int64)
        heaviest, packs = self.knapsack.solve(weights)
        # Python integers do not overflow.
        total = sum(map(int.__mul__, self.counts, weights.tolist()))
        self.bound = max(self.bound, -(-total // max(heaviest, 1)))
        if total > self.best_value * heaviest:
            self.best_value, self.best = total / heaviest, duals * (SCALE / heaviest)
        return csc_array(packs.T)

    def improving(self, duals: NDArray[np.float64]) -> csc_array:
        """Columns with a price above 1 under these dual values; none if the primal is optimal."""
        for share in (SMOOTHING, 0.0):
            packs = self.price(share * self.best + (1 - share) * duals)
            missing = np.flatnonzero(packs.T @ duals > 1 + TOLERANCE)
            if len(missing):
                break
        return distinct_columns(packs[:, missing])


class Knapsack:
    """Which pack has the greatest weight? Dynamic programming over tokens, and documents where their number is limited.

    Attributes:
        items: (items,) number of a length, and
        copies: (items,) documents of it that are taken together: 1, 2, 4, … make every number up to the most.
        shape: of the table; one row if the limit of documents never binds.
    """

    def __init__(self, histogram: Histogram, capacity: int, max_documents: int) -> None:
        self.histogram = histogram
        numbers, copies = [], []
        most = np.minimum(np.minimum(histogram.counts, capacity // histogram.values), max_documents)
        for number, left in enumerate(most.tolist()):
            size = 1
            while left > 0:
                numbers.append(number)
                copies.append(min(size, left))
                left, size = left - copies[-1], 2 * size
        self.items, self.copies = np.array(numbers, dtype=np.int64), np.array(copies, dtype=np.int64)
        binds = max_documents < capacity // int(histogram.values[-1])
        self.shape = ((max_documents if binds else 0) + 1, capacity + 1)

    @property
    def entries(self) -> int:
        """Entries of the table: bytes of memory, and proportional to the time of a solution."""
        return len(self.items) * math.prod(self.shape)

    def solve(self, weights: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """The greatest weight of a pack.

        Args:
            weights: (distinct,) weight of a document of each length, at least 0.

        Returns:
            The exact weight, and (distinct + 1, distinct) documents of each length in packs: for each length a heaviest
            pack that holds a document of it, then the heaviest of all.
        """
        table = np.zeros(self.shape, dtype=np.int64)
        taken = np.zeros((len(self.items), *self.shape), dtype=np.bool_)
        kernels.knapsack(self.items, self.copies, self.histogram.values, weights, table, taken)
        packs = kernels.heaviest_packs(self.items, self.copies, *self.histogram, taken)
        return int(table[-1, -1]), packs


def distinct_columns(columns: csc_array) -> csc_array:
    """Each column once, in order of first appearance."""
    columns = csc_array(columns)
    columns.sum_duplicates()  # also sorts the indices
    first: dict[bytes, int] = {}
    for column in range(columns.shape[1]):
        rows = slice(columns.indptr[column], columns.indptr[column + 1])
        first.setdefault(columns.indices[rows].tobytes() + columns.data[rows].tobytes(), column)
    return columns[:, list(first.values())]


def _trimmed(solution: _Solution, duals: NDArray[np.float64]) -> csc_array:
    """The columns of a solution without those of the lowest price, if there are many; columns in use stay."""
    columns = solution.columns
    most = COLUMNS_PER_LENGTH * columns.shape[0]
    if columns.shape[1] <= 2 * most:
        return columns
    order = np.lexsort((-(columns.T @ duals), solution.packs <= 0))
    return columns[:, np.sort(order[:most])]


def _clipped(columns: csc_array, counts: NDArray[np.int64]) -> csc_array:
    """Columns with at most `counts` documents of each length, without empty ones."""
    copies = np.minimum(columns.data, counts[columns.indices])
    clipped = csc_array((copies, columns.indices, columns.indptr), columns.shape)
    clipped.eliminate_zeros()
    return distinct_columns(clipped[:, np.flatnonzero(np.diff(clipped.indptr))])


def _columns(packing: Patterns, distinct: int) -> csc_array:
    """(distinct, patterns) documents of each length in a pack of each pattern."""
    return csc_array((packing.copies, packing.numbers, packing.starts), (distinct, len(packing.packs)))


def _patterns(columns: csc_array, packs: NDArray[np.int64]) -> Patterns:
    """Columns as patterns, with the number of packs of each."""
    columns.sort_indices()
    starts, numbers = columns.indptr.astype(np.int64), columns.indices.astype(np.int64)
    return Patterns(starts, numbers, columns.data.astype(np.int64), packs)
