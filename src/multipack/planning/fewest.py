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

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from multipack.planning.histogram import Histogram, Patterns, best_fit, simple_bound
from multipack.planning.kernels import search as kernels
from multipack.planning.lengths import Integers

QUICK = ((50, 10**7), (1_000, 10**7))
THOROUGH = ((10_000, 10**8), (100_000, 4 * 10**8))
"""Efforts of `fill`: documents tried for a pack, and in total. A try takes about ten nanoseconds."""

MAX_LENGTHS = 1_000
"""Maximum number of distinct lengths for which the linear program is solved; it has one row per length."""

MAX_ENTRIES = 1 << 26
"""Most entries of the knapsack's tables, times distinct lengths: the time of a round."""

SCALE = 1 << 40
"""Dual values (at most 1) are multiplied by this and rounded to integers. A pack holds fewer than 2^22 documents where
the program is solved, so that sums stay below 2^63."""

COLUMNS_PER_LENGTH = 12  # with more columns, patterns in no pack of the solution leave the program
TOLERANCE = 1e-9  # a pattern enters the primal if its price exceeds 1 by this
ROUND_UP = 0.6  # where no x_p reaches 1, an x_p above this value counts as one pack


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
    distinct, layers = len(histogram.values), 1
    if max_documents < capacity // int(histogram.values[-1]):
        layers = max_documents
    if not search.is_over and distinct <= MAX_LENGTHS and distinct * layers * capacity <= MAX_ENTRIES:
        search.solve()
    return search.best, search.bound


def fill(histogram: Histogram, capacity: int, max_documents: int, nodes: int, tries: int) -> Patterns:
    """Fill one pack after another as far as the remaining documents allow, each with the longest of them.

    Best fit leaves small gaps at its end that no document fits. This method searches for documents that fill each pack
    to the last token, so that short documents, which fill anything, remain for the end (minimum bin slack: Gupta and Ho
    1999; with the longest document fixed: Fleszar and Hindi 2002). It tries at most `nodes` documents for a pack, and
    `tries` in total.
    """
    room = min(capacity, histogram.tokens)
    return Patterns(*kernels.fill(*histogram, room, max_documents, nodes, tries))


class _Search:
    """The documents, the best packing so far, and the proven bound."""

    def __init__(self, histogram: Histogram, capacity: int, max_documents: int, deadline: float) -> None:
        self.histogram, self.limits, self.deadline = histogram, (capacity, max_documents), deadline
        self.bound = simple_bound(histogram, *self.limits)
        self.best = best_fit(histogram, *self.limits)

    @property
    def seconds_left(self) -> float:
        """CPU seconds left of the time budget."""
        return self.deadline - time.process_time()

    @property
    def is_over(self) -> bool:
        """Whether the packing is proven optimal, or the time budget is exhausted."""
        return self.best.num_packs <= self.bound or self.seconds_left <= 0

    def offer(self, packing: Patterns) -> None:
        """Keep a packing if it has fewer packs."""
        if packing.num_packs < self.best.num_packs:
            self.best = packing

    def fill(self, efforts: tuple[tuple[int, int], ...]) -> bool:
        """Offer packings of `fill`. Efforts for which no time is left are skipped. Returns whether one was better."""
        before = self.best
        for nodes, tries in efforts:
            if not self.is_over and tries * 1e-8 < self.seconds_left:
                self.offer(fill(self.histogram, *self.limits, nodes, tries))
        return self.best is not before

    def solve(self) -> None:
        """Solve the linear program, round its solution down, and solve it again for the remaining documents.

        These are few: a basic solution has at most as many fractional values as there are lengths. The loop ends when
        the bound of the rest shows that no better packing follows.
        """
        values, counts = self.histogram
        columns = self.best.columns(len(counts))
        fixed = Patterns.of(columns[:, :0], counts[:0])
        while not self.is_over and counts.any():
            enough = self.best.num_packs - fixed.num_packs
            columns, packs, bound = self.generate(counts, columns, enough)
            if fixed.num_packs == 0:
                self.bound = max(self.bound, bound)
            if bound >= enough or len(packs) == 0:
                return
            times = np.floor(packs + 1e-6).astype(np.int64)
            if not times.any():
                times = ((packs > ROUND_UP) | (packs == packs.max())).astype(np.int64)
            used = np.flatnonzero(times)
            fixed = Patterns.join(fixed, Patterns.of(columns[:, used], times[used]))
            counts = np.maximum(counts - columns[:, used] @ times[used], 0)
            if not counts.any():
                self.offer(fixed)
                return
            rest = Histogram(values, counts)
            for packing in (
                best_fit(rest, *self.limits),
                *(fill(rest, *self.limits, *each) for each in QUICK),
            ):
                self.offer(Patterns.join(fixed, packing))

    def generate(
        self, counts: Integers, columns: Integers, enough: int
    ) -> tuple[Integers, NDArray[np.float64], int]:
        """Solve the linear program for `counts` by column generation, until the bound reaches `enough` packs.

        Every length that has documents occurs in `columns`, the (distinct, patterns) first patterns.

        Returns:
            (distinct, patterns) documents of each length in a pack of each pattern; (patterns,) packs of each pattern,
            empty if the time budget was exhausted before; a proven lower bound on the number of packs.
        """
        bound, packs = 0, np.zeros(0)
        while (left := self.seconds_left) > 0:
            ones, limit = np.ones(columns.shape[1]), {"time_limit": left}
            primal = linprog(ones, A_ub=-columns, b_ub=-counts, method="highs-ds", options=limit)
            if primal.status != 0:
                break
            packs = primal.x
            duals = np.maximum(-primal.ineqlin.marginals, 0)
            weights = np.floor(duals * SCALE).astype(np.int64)
            heaviest, found = kernels.knapsack(self.histogram.values, weights, *self.limits)
            # Python integers do not overflow.
            total = sum(map(int.__mul__, counts.tolist(), weights.tolist()))
            bound = max(bound, -(-total // max(int(heaviest), 1)))
            added = found[found @ duals > 1 + TOLERANCE]
            if len(added) == 0 or bound >= min(enough, math.ceil(primal.fun - 1e-6)):
                break
            if columns.shape[1] > COLUMNS_PER_LENGTH * len(counts):
                columns, packs = columns[:, packs > 0], packs[packs > 0]
            columns = np.hstack([columns, np.unique(added, axis=0).T])
        return columns[:, : len(packs)], packs, bound
