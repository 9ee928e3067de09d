"""The fewest packs, and a proof of how few there can be.

Packs are sought from the cheap to the dear, and the search ends as soon as a packing has as many packs as the
bound says that there must be:

 1. best fit, and the simple bounds of `bounds.py`: milliseconds;
 2. packs filled to the last token, one after another (`patterns.fill`): enough where packs hold many documents;
 3. the pattern LP (`columns.py`), whose dual proves what no simple bound sees: that lengths do not go together.
    Its x_p are rounded down, what remains is packed by 1 and 2, and once more after fixing more of it. The last resort
    is branch and bound over the patterns that the LP has seen.

The lengths of SQuAD (at most 384) show why 3 is needed: their tokens would fill 39,713 packs, best fit needs 40,631,
and 40,195 are necessary and enough, because there are too many documents of which only two fit.

**Long capacities.** The LP has a row for each distinct length and the knapsack a column for each room, so where these
are many it is solved on a grid of lengths first (`grid.py`), then on grids twice as fine as long as they are not too
large; each begins with the patterns of the one before. Rounded up, a grid gives packs; rounded down, a bound. On the
finest grid, the real lengths, the two are one. What is returned are real packs and a bound for the real documents.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csc_array, hstack

from multipack.planning import patterns
from multipack.planning.bounds import simple_bound
from multipack.planning.columns import Knapsack, Solution, distinct_columns, generate
from multipack.planning.grid import Grid
from multipack.planning.lengths import Histogram
from multipack.planning.patterns import Patterns

_QUICK = ((50, 10**8), (1_000, 10**8))
_THOROUGH = ((10_000, 10**9), (10_000, 4 * 10**9))
"""Efforts of `patterns.fill`: documents tried a pack, and work in all."""

_WORK_A_SECOND = 10**9  # about; an effort for which there is no time is not begun

_FIRST_LENGTHS = 700
_MOST_LENGTHS = 2_000
"""Distinct lengths of the first and of the last grid: the LP of 700 takes a tenth of a second, of 2,000 seconds."""

_MOST_ENTRIES = 1 << 26
"""Entries (bytes) of the knapsack's table."""

_SURE = 0.6  # where no x_p reaches 1, those above this are taken as one pack, and the largest in any case
_MOST_COLUMNS = 5_000  # patterns among which branch and bound chooses …
_NODES = 200  # … and how far it goes
_LOOSE = 2  # packs of each pattern, at most, that it may choose again
_PACKS_HANDED_ON = 20  # a length of the next grid


@dataclass
class _Search:
    """The documents, the best packing so far, and what is proven."""

    histogram: Histogram
    capacity: int
    max_documents: int
    until: float
    bound: int = field(init=False)
    best: Patterns = field(init=False)

    def __post_init__(self) -> None:
        self.bound = simple_bound(self.histogram, self.capacity, self.max_documents)
        self.best = patterns.best_fit(self.histogram, self.capacity, self.max_documents)

    @property
    def is_over(self) -> bool:
        """Whether the packing is proven to be the best, or the time is over."""
        return self.best.num_packs <= self.bound or self.seconds_left() <= 0

    def seconds_left(self) -> float:
        """CPU seconds of the time budget."""
        return self.until - time.process_time()

    def offer(self, made: Patterns) -> None:
        """Keep a packing if it is better."""
        if made.num_packs < self.best.num_packs:
            self.best = made

    def fill(self, efforts: tuple[tuple[int, int], ...]) -> bool:
        """Try packs filled to the last token. Returns whether that was better."""
        before = self.best
        for effort in efforts:
            if not self.is_over and effort[1] < _WORK_A_SECOND * self.seconds_left():
                self.offer(patterns.fill(self.histogram, self.capacity, self.max_documents, *effort))
        return self.best is not before

    def complete(self, begun: Patterns) -> None:
        """Offer packs of some documents, with the others packed in the quick ways."""
        rest = np.maximum(self.histogram.counts - begun.demand(len(self.histogram.counts)), 0)
        kept = np.flatnonzero(rest)
        if not len(kept):
            self.offer(begun)
            return
        problem = (Histogram(self.histogram.values[kept], rest[kept]), self.capacity, self.max_documents)
        self._offer_with(begun, patterns.best_fit(*problem), kept)
        for effort in _QUICK:
            self._offer_with(begun, patterns.fill(*problem, *effort), kept)

    def _offer_with(self, begun: Patterns, others: Patterns, numbers: NDArray[np.int64]) -> None:
        if begun.num_packs + others.num_packs < self.best.num_packs:
            self.offer(patterns.join([begun, others._replace(numbers=numbers[others.numbers])]))


def fewest(
    histogram: Histogram, capacity: int, max_documents: int, time_budget: float
) -> tuple[Patterns, int]:
    """Search for the fewest packs.

    The result depends on nothing but the arguments as long as the search ends before its time.

    Args:
        histogram: the documents.
        capacity: most tokens of a pack.
        max_documents: most documents of a pack.
        time_budget: CPU seconds of this process after which it returns what it has; looked at between rounds.

    Returns:
        The packs, never more than best fit makes, and a proven lower bound on their number.
    """
    search = _Search(histogram, capacity, max_documents, time.process_time() + time_budget)
    if search.fill(_QUICK):
        search.fill(_THOROUGH)
    if not search.is_over:
        _solve_on_grids(search)
    return search.best, search.bound


def _solve_on_grids(search: _Search) -> None:
    """The pattern LP, from a coarse grid to the finest; bounds are sought on the first and the last."""
    sizes = _sizes(search.histogram, search.capacity, search.max_documents)
    coarser = None
    for size in sizes:
        if size > 1 and size in (sizes[0], sizes[-1]):
            below = _solve(search, Grid.below(search.histogram, search.capacity, size), None)
            search.bound = max(search.bound, below.bound if below else 0)
        grid = Grid.above(search.histogram, search.capacity, size)
        solution = _solve(search, grid, coarser)
        if solution is None:
            return
        if size == 1:
            search.bound = max(search.bound, solution.bound)
        _round(search, grid, solution)
        if size == 1:
            _choose(search, grid, solution)
        coarser = (grid, solution)


def _sizes(histogram: Histogram, capacity: int, max_documents: int) -> list[int]:
    """Tokens of a unit on grids from coarse to fine, as far as the LP and its knapsack are quick."""
    size, fine = 1, []
    while size <= capacity:
        grid = Grid.above(histogram, capacity, size)
        lengths = len(grid.histogram.values)
        if lengths <= _MOST_LENGTHS and _entries(grid, max_documents) <= _MOST_ENTRIES:
            fine.append(size)
            if lengths <= _FIRST_LENGTHS:
                break
        size *= 2
    return fine[::-1]


def _entries(grid: Grid, max_documents: int) -> int:
    return Knapsack(grid.histogram, grid.capacity, max_documents).entries


def _solve(search: _Search, grid: Grid, coarser: tuple[Grid, Solution] | None) -> Solution | None:
    """Solve the pattern LP on a grid, beginning with best fit, full packs and the packs of a coarser grid."""
    if search.is_over or not len(grid.histogram.values):
        return None
    problem = (grid.histogram, grid.capacity, search.max_documents)
    first = [patterns.best_fit(*problem), patterns.fill(*problem, *_QUICK[-1])]
    if coarser is not None:
        first.append(_handed_on(search.histogram, grid, *coarser))
    columns = distinct_columns(
        hstack([_as_columns(part, len(grid.histogram.values)) for part in first], format="csc")
    )
    return generate(*problem, columns, search.best.num_packs, search.seconds_left)


def _handed_on(histogram: Histogram, grid: Grid, coarse: Grid, solution: Solution) -> Patterns:
    """A coarser grid's packs on a finer one: handed out to a share of the documents, to be not too many."""
    used = np.flatnonzero(solution.packs)
    packs = solution.packs[used]
    share = min(1.0, _PACKS_HANDED_ON * len(grid.histogram.values) / float(packs.sum()))
    sample = Histogram(histogram.values, np.ceil(histogram.counts * share).astype(np.int64))
    times = np.ceil(packs * share).astype(np.int64)
    made = coarse.refine(_as_patterns(solution.columns[:, used], times), sample)
    return made._replace(numbers=grid.numbers[made.numbers])


def _round(search: _Search, grid: Grid, solution: Solution) -> None:
    """Whole packs from the LP's shares: fix ⌊x_p⌋ of each pattern, offer that, and solve again for what is left.

    The rest is a small problem: a basic solution has no more shares than lengths. Where no share reaches 1, the
    largest are taken as one pack. It ends where the rest's bound says that this way will not become better than what is
    known.
    """
    histogram = grid.histogram  # of what is left …
    numbers = np.arange(len(histogram.values))  # … and its lengths' numbers on the grid
    fixed: list[Patterns] = []
    while not search.is_over:
        times = np.floor(solution.packs + 1e-6).astype(np.int64)
        if not times.any():
            times = ((solution.packs > _SURE) | (solution.packs == solution.packs.max())).astype(np.int64)
        taken = np.flatnonzero(times)
        part = _as_patterns(solution.columns[:, taken], times[taken])
        fixed.append(part._replace(numbers=numbers[part.numbers]))
        begun = patterns.join(fixed)
        search.complete(grid.refine(begun, search.histogram))
        rest = np.maximum(histogram.counts - part.demand(len(histogram.counts)), 0)
        kept = np.flatnonzero(rest)
        if not len(kept) or search.is_over:
            return
        histogram, numbers = Histogram(histogram.values[kept], rest[kept]), numbers[kept]
        columns = _within(solution.columns[kept], histogram.counts)
        enough = search.best.num_packs - begun.num_packs
        following = generate(
            histogram, grid.capacity, search.max_documents, columns, enough, search.seconds_left
        )
        if following is None or following.bound >= enough:
            return
        solution = following


def _choose(search: _Search, grid: Grid, solution: Solution) -> None:
    """Whole packs by branch and bound over the LP's patterns, all but the last few of each being fixed."""
    if search.is_over or solution.columns.shape[1] > _MOST_COLUMNS:
        return
    sure = np.maximum(np.floor(solution.packs).astype(np.int64) - _LOOSE, 0)
    rest = np.maximum(grid.histogram.counts - solution.columns @ sure, 0)
    chosen = milp(
        np.ones(len(sure)),
        integrality=np.ones(len(sure)),
        constraints=LinearConstraint(solution.columns.astype(np.float64), lb=rest),
        options={"node_limit": _NODES, "time_limit": search.seconds_left()},
    )
    if chosen.x is None:
        return
    times = sure + np.rint(chosen.x).astype(np.int64)
    taken = np.flatnonzero(times)
    begun = _as_patterns(solution.columns[:, taken], times[taken])
    search.complete(grid.refine(begun, search.histogram))


def _within(columns: csc_array, counts: NDArray[np.int64]) -> csc_array:
    """Columns with no more documents than there are, without those that hold none."""
    copies = np.minimum(columns.data, counts[columns.indices])
    clipped = csc_array((copies, columns.indices, columns.indptr), columns.shape)
    return distinct_columns(clipped[:, np.flatnonzero(np.diff(clipped.indptr))])


def _as_columns(made: Patterns, distinct: int) -> csc_array:
    """(distinct, patterns) documents of each length in a pack of each pattern."""
    return csc_array((made.copies, made.numbers, made.starts), (distinct, len(made.packs)))


def _as_patterns(columns: csc_array, packs: NDArray[np.int64]) -> Patterns:
    """The reverse of `_as_columns`, with how many packs each pattern has."""
    columns.sort_indices()
    starts, numbers = columns.indptr.astype(np.int64), columns.indices.astype(np.int64)
    return Patterns(starts, numbers, columns.data.astype(np.int64), packs)
