"""One step's documents assigned to ranks: a pure function of documents, ranks and sync.

    own packs (P = 3)        2 ranks, two micro-batches
    |AAAAAABB|               micro-batch 0   |AAAAAA··|CCCCCC··|      rank 0, rank 1
    |CCCCCCDD|               micro-batch 1   |BBDD····|EEEE····|
    |EEEE····|

Fixed packs leave ranks idle if their number is not a multiple of the number of ranks; the same documents
arranged again do not. The step's own packs always fit: they are the result where no arrangement is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import balancing
from multipack.planning.kernels.order import longest_first
from multipack.planning.kernels.placing import fill_empty, place_documents, place_inside, sums
from multipack.planning.lengths import Integers, Packs, check_integer, packs_from
from multipack.planning.options import PlanOptions, Sync, check_choice

DEALING = 9
"""Version of dealing; it changes with the result. A run continues inside a step only with the same version."""

# Measured: the L² lag, √(max Σ length² − min Σ length²) over the ranks of a step, of OpenChat in packs of
# 32,768 for 8 ranks with balance=joint and window=1; and the cost utilization that InstructLab loses in packs
# of 8,192, 4 for each of 8 ranks that synchronize once a step.
_CLOSE = 20_000  # within 1/20,000 of the proven minimum nothing is rearranged: 0.2e-4 lost; at 2,000 2.4e-4
_HALF = 7  # documents in a half when two packs are rearranged: 0.17e-4 lost; with 5 0.30e-4, with 9 0.15e-4
_JOINT_HALF = 8  # the same with `joint`: a lag of 84; with 6 of 141, in half the time
_ATTEMPTS = 10  # attempts for each pack at the sync point: a lag of 84; with 3 of 106
_FAILURES = 24  # successive failures at which to stop, for each pair of packs of two ranks; 6: a lag of 106
_SQUARES = 1000  # squares that count as much as a token: lag 84, 1.0e-4 lost; at 100 47, 3.0e-4; at 10,000 149, 0.3e-4
_GOLDEN = 0.618  # multiples of the golden ratio, modulo 1, are evenly distributed, however many they are


def rank_loads(loads: NDArray[Any], ranks: int, sync: Sync) -> NDArray[Any]:
    """(sync points, ranks) load of each rank at each sync point, from (packs,) in micro-batch-major order."""
    table = loads.reshape(-1, ranks)
    return table.sum(axis=0, keepdims=True) if sync == "step" else table


def step_cost(costs: Integers, ranks: int, sync: Sync) -> int:
    """The cost that determines a step's time: the sum over its sync points of the most loaded rank's."""
    return int(rank_loads(costs, ranks, sync).max(axis=1).sum())


def least_step_cost(
    lengths: Integers, costs: Integers, ranks: int, micro_batches: int, capacity: int, sync: Sync
) -> int:
    """A proven lower bound on `step_cost` over all arrangements of these documents.

    Once a step (`step`), a rank is a pack of micro_batches · capacity tokens: `least_maximum`. At each micro-batch, put
    the sync points in falling order of their most loaded packs. j · ranks packs come before the j-th, counted from 0.
    They hold at most m documents longer than capacity / (m + 1) each. So another pack holds one of the
    j · ranks · m + 1 longest, if all of these are so long, and costs at least as much as the cheapest of them: p_j. The
    first j sync points cost B_j = p_0 + … + p_(j−1) at least. Their packs hold at most ranks · B_j, and at most A_j,
    the cost of the j · ranks · capacity costliest tokens; each later sync point costs at least the mean of its packs.
    So for every j the sum is at least

        B_j + max(total − min(A_j, ranks · B_j), 0) / ranks.

    Args:
        lengths: (documents,) tokens, in any order, none above the capacity.
        costs: (documents,) int64.
        ranks: data-parallel ranks.
        micro_batches: packs of each rank.
        capacity: maximum tokens of a pack.
        sync: where ranks wait for each other.
    """
    falling = costliest_first(lengths, costs)
    heavy = lengths[falling], costs[falling]
    if sync == "step":
        return least_maximum(*heavy, ranks, micro_batches * capacity)
    total, first = int(costs.sum()), least_maximum(*heavy, ranks * micro_batches, capacity)
    order = longest_first(lengths)
    lengths, costs = lengths[order], costs[order]
    least = np.minimum.accumulate(costs)  # of the cheapest item among the longest ones
    rates = -(-costs // lengths)
    by_rate = np.argsort(-rates, kind="stable")
    tokens, cost = np.append(0, np.cumsum(lengths[by_rate])), np.append(0, np.cumsum(costs[by_rate]))
    best, before, m = 0, 0, np.arange(1, 9)
    for point in range(micro_batches):
        outside = point * ranks * m
        outside = outside[outside < len(lengths)]
        held = outside[lengths[outside] * (1 + m[: len(outside)]) > capacity]
        before += first if point == 0 else int(least[held].max(initial=0))
        room = (point + 1) * ranks * capacity
        last = int(np.searchsorted(tokens, room, side="right")) - 1
        most = int(cost[last])
        if last < len(by_rate):
            most += (room - int(tokens[last])) * int(rates[by_rate[last]])
        best = max(best, before + max(-(-(total - min(most, ranks * before)) // ranks), 0))
    return best


def least_maximum(lengths: Integers, costs: Integers, packs: int, capacity: int) -> int:
    """A proven lower bound on the cost of the most loaded of `packs` packs, for documents in falling order of cost.

    For every k, some k packs hold the k costliest documents. The others hold at most (packs − k) · capacity tokens, so
    these k hold the remaining tokens, and what they hold beside these costs at least the lowest cost per token
    of any document. The most loaded pack costs at least the mean of these k. Also, some pack holds two of the
    packs + 1 costliest documents. Lengths may be 0.
    """
    longest = np.cumsum(lengths[:packs])
    k = np.arange(1, len(longest) + 1)
    tokens = int(lengths.sum()) - (packs - k) * capacity - longest
    held = lengths > 0
    rate = int((costs[held] // lengths[held]).min()) if held.any() else 0
    bound = int((-(-(np.cumsum(costs[:packs]) + np.maximum(tokens, 0) * rate) // k)).max())
    two = int(costs[packs - 1] + costs[packs]) if len(costs) > packs else 0
    return max(bound, two, -(-int(costs.sum()) // packs))


def micro_batches_of(packs_per_step: int, ranks: int) -> int:
    """Packs of each rank in a step, ⌈packs_per_step / ranks⌉; `ValueError` if there are more ranks than packs."""
    world = check_integer("data_parallel_size", ranks)
    if world > packs_per_step:
        raise ValueError(
            f"{world} ranks cannot share steps of packs_per_step={packs_per_step} packs: each rank needs one; set"
            f" packs_per_step to at least {world}, or use at most {packs_per_step} ranks"
        )
    return -(-packs_per_step // world)


def deal_packs(
    packs: Packs, slots: Integers, costs: Integers, options: PlanOptions, ranks: int, sync: Sync, turn: int
) -> Packs:
    """A step's packs arranged for ranks: the best of several arrangements, each balanced; see `Plan.deal`.

    Args:
        packs: the step's own packs, which fit.
        slots: (documents,) slots of each document of `packs.order`.
        costs: (documents,) int64 costs, which are balanced.
        options: options of the plan.
        ranks: number of ranks that share the step.
        sync: where ranks wait for each other.
        turn: number that determines how far packs rotate over the ranks; see `Arrangement.rotate`.
    """
    micro_batches = micro_batches_of(options.packs_per_step, ranks)
    check_choice("sync", sync, Sync)
    own = np.repeat(np.arange(len(packs)), packs.sizes())
    order = costliest_first(slots, costs)
    placed, lengths, costs = own[order], slots[order], costs[order]
    limit, joint, capacity = options.max_documents, options.balance == "joint", options.capacity
    step = Arrangement(lengths, costs, int(ranks), micro_batches, capacity, limit, sync, joint)
    fill_empty(placed, step.packs)
    if ranks > 1:
        goal = least_step_cost(lengths, costs, step.ranks, micro_batches, capacity, sync)
        placed = step.rotate(step.arrange(goal, placed), turn)
    dealt = packs_from(placed, step.packs)
    return Packs(packs.order[order[dealt.order]], dealt.offsets)


def costliest_first(lengths: Integers, costs: Integers) -> Integers:
    """(documents,) document numbers by falling cost, then falling length, then rising number."""
    order = longest_first(lengths)
    in_order = costs[order]  # of most models
    return order if (in_order[1:] <= in_order[:-1]).all() else np.lexsort((-lengths, -costs))


@dataclass(frozen=True)
class Arrangement:
    """Documents in falling order of cost, and ranks that share them. Results: (documents,) pack numbers."""

    lengths: Integers  # (documents,) tokens
    costs: Integers  # (documents,) int64, falling
    ranks: int  # number of ranks
    micro_batches: int  # packs of each rank
    capacity: int  # maximum tokens of a pack
    max_documents: int = 0  # maximum documents of a pack; 0 = no limit
    sync: Sync = "step"  # where ranks wait for each other
    joint: bool = False  # balance tokens and their squares instead of costs

    @property
    def packs(self) -> int:
        """Number of packs of all ranks."""
        return self.ranks * self.micro_batches

    @property
    def limit(self) -> int:
        """Maximum documents of a pack."""
        return self.max_documents or len(self.lengths)

    def arrange(self, goal: int, own: Integers) -> Integers:
        """The best of some arrangements, each balanced; the search ends with one that is proven close to the best.

        Args:
            goal: a proven lower bound on `step_cost`.
            own: an arrangement; if it has −1 for documents without a pack, the result may have it too.
        """
        best, least = own, -1
        for placed in self._arrangements(own):
            if placed.min() < 0:
                continue
            fill_empty(placed, self.packs)
            self._even_out(placed, goal)
            reached = step_cost(sums(placed, self.costs, self.packs), self.ranks, self.sync)
            if least < 0 or reached < least:
                best, least = placed, reached
            if reached <= goal + goal // _CLOSE:
                break
        return best

    def rotate(self, placed: Integers, turn: int) -> Integers:
        """Choose the rank of each pack, so that over an epoch all ranks have similar documents and squared lengths.

        Packs of few, long documents have a high share of the step's squared lengths and a low share of its documents.
        Where ranks synchronize at each micro-batch, its packs are exchanged so that the ranks' differences of these
        shares cancel. Ranks in falling order of the difference then get the numbers t, t + 1, …, modulo ranks. In
        `ranks` successive turns each t occurs once: evenly distributed from the first turn on, and then backwards.
        """
        ranks, squares = self.ranks, self.lengths * self.lengths
        shares = squares / (self.lengths @ self.lengths) - 1 / len(placed)
        loads = rank_loads(np.bincount(placed, shares, self.packs), ranks, self.sync)
        total, moved = loads[0], np.arange(loads.size) % ranks
        for point in range(1, len(loads)):
            falling, rising = (-loads[point]).argsort(kind="stable"), total.argsort(kind="stable")
            moved[point * ranks + falling] = rising
            total[rising] += loads[point, falling]
        back, turn = divmod(turn, ranks)
        stride = next(stride for stride in count(int(_GOLDEN * ranks)) if gcd(stride, ranks) == 1)
        first = stride * (ranks - 1 - turn if back % 2 else turn)
        places = (-total).argsort(kind="stable").argsort()
        rank_of = ((places[moved] + first) % ranks).reshape(-1, ranks)  # one row where ranks synchronize once
        micro_batch, before = np.divmod(placed, ranks)
        return micro_batch * ranks + rank_of[micro_batch % len(rank_of), before]

    def _arrangements(self, own: Integers) -> Iterator[Integers]:
        """Arrangements to begin with; −1 for documents that did not fit. The step's own packs always fit."""
        if self.sync == "step" and self.micro_batches > 1:
            yield self._by_rank()
        yield self._by_cost(self._by_point(1))
        if self.sync != "step" and self.micro_batches > 1:
            yield self._by_point(self.micro_batches)
        yield self._by_cost(own)

    def _by_rank(self) -> Integers:
        """Place the documents on ranks, the longest first, and then into the packs of their rank."""
        slots = self.micro_batches
        ranks = place_documents(
            self.lengths, self.costs, self.ranks, slots * self.capacity, slots * self.limit
        )
        found = place_inside(self.lengths, self.costs, ranks, self.ranks, slots, self.capacity, self.limit)
        return np.where(found < 0, -1, found * self.ranks + ranks)

    def _by_point(self, points: int) -> Integers:
        """Place the documents into equally many packs of each sync point, one after the other, the longest first.

        A micro-batch takes as long as its most loaded pack. So each gets documents that fit, until its packs cost
        as much as the costliest document left or the mean of the packs left, and documents without room in later ones.
        """
        packs, capacity = self.packs // points, self.capacity
        tokens, cost = np.append(0, np.cumsum(self.lengths)), np.append(0, np.cumsum(self.costs))
        placed, start = np.full(len(self.lengths), -1, dtype=np.int64), 0
        for point in range(points):
            left = points - point
            if start == len(placed):
                break
            even = -(-int(cost[-1] - cost[start]) // (packs * left))
            most = int(cost[start]) + packs * max(int(self.costs[start]), even)
            room = int(tokens[-1]) - (left - 1) * packs * capacity
            full = int(tokens[start]) + packs * (capacity - capacity // 32)  # with free tokens documents fit
            ends = np.searchsorted(cost, most, side="right"), np.searchsorted(tokens, full, side="right")
            stop = max(int(min(ends)) - 1, int(np.searchsorted(tokens, room)))
            inside = slice(start, len(placed) if left == 1 else stop)
            found = place_documents(self.lengths[inside], self.costs[inside], packs, capacity, self.limit)
            placed[inside] = np.where(found < 0, -1, point * packs + found)
            start = inside.stop
        return placed

    def _by_cost(self, placed: Integers) -> Integers:
        """Packs get micro-batch and rank: packs of similar cost share a micro-batch.

        Where ranks synchronize once a step, each second micro-batch is in rising order, so that ranks add up to similar
        loads.
        """
        order = np.argsort(-sums(placed, self.costs, self.packs), kind="stable")
        places = np.arange(self.packs).reshape(-1, self.ranks)
        if self.sync == "step":
            places[1::2] = places[1::2, ::-1].copy()
        number = np.empty(self.packs, dtype=np.int64)
        number[order] = places.ravel()
        return np.where(placed < 0, -1, number[placed])

    def _even_out(self, placed: Integers, least: int) -> None:
        """Balance the ranks of each sync point, in place; `least` is a proven lower bound on `step_cost`."""
        once, joint = self.sync == "step", self.joint
        slots = self.micro_batches if once else 1
        points = np.zeros_like(placed) if once else placed // self.ranks
        for point in range(int(points.max()) + 1):
            inside = np.flatnonzero(points == point)
            lengths, costs = self.lengths[inside], self.costs[inside]
            goal = least if once or joint else least_maximum(lengths, costs, self.ranks, self.capacity)
            loads = (_SQUARES * lengths, lengths * lengths) if joint else (costs, np.zeros_like(costs))
            packs, mean = placed[inside] - point * self.ranks, int(costs.sum()) // self.ranks
            half = _JOINT_HALF if joint else _HALF
            excess = 0 if joint else max(goal + goal // _CLOSE - mean, 0)
            limits = balancing.PackLimits(self.capacity, self.limit, self.ranks, slots)
            search = balancing.Exchanges(half, _ATTEMPTS * self.ranks * slots, _FAILURES * slots**2, excess)
            balancing.even_out(packs, lengths, np.stack(loads), limits, search)
            placed[inside] = packs + point * self.ranks
