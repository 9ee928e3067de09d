"""One step's documents, arranged for the ranks that are there: a pure function of documents, world and sync.

    own packs (P = 3)        world 2, two micro-batches
    |AAAAAABB|               micro-batch 0   |AAAAAA··|CCCCCC··|      rank 0, rank 1
    |CCCCCCDD|               micro-batch 1   |BBDD····|EEEE····|
    |EEEE····|

Fixed packs dealt to a world that does not divide their number leave ranks idle; the same documents arranged
afresh do not. The step's own packs, which always fit, are the answer where no other is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multipack.planning.ceiling import least_step_cost
from multipack.planning.kernels import balancing, bounds, pairing, placing
from multipack.planning.level import HALF, few, level_tokens
from multipack.planning.options import Sync
from multipack.planning.order import falling
from multipack.planning.packing import Packs

Integers = NDArray[np.int64]

DEALING = 3
"""Changes whenever the same step is dealt otherwise; a run that stopped inside a step goes on only with the same."""

_EXACT = 20_000  # exchanges stop within 1/20,000 of what no arrangement can beat
_CLOSE = 10_000  # … and pairs of packs are not rearranged within 1/10,000 of it
_ATTEMPTS = 4  # rearrangements of two packs, for each rank
_JOINT_HALF, _JOINT_ATTEMPTS = 9, 5  # the same where tokens and squares shall agree: a half, and attempts
_CROWDED, _PATIENCE = (
    4,
    3,
)  # a rank with that many packs in a meeting: times as many attempts, as few packs suit
_MORE = 3  # that effort adds to a half at most, one each time that it doubles


def meetings(costs: Integers, world: int, sync: Sync) -> Integers:
    """What each rank brings to each meeting, (meetings, ranks), from packs in micro-batch-major order.

    Ranks meet at every micro-batch (`micro`: sharded parameters are gathered there; `pipeline`: so that
    stages keep step) or once a step (`step`: the gradients are averaged).
    """
    table = costs.reshape(-1, world)
    return table.sum(axis=0, keepdims=True) if sync == "step" else table


def objective(costs: Integers, world: int, sync: Sync) -> int:
    """The cost that a step takes: over its meetings, the sum of the dearest rank's."""
    return int(meetings(costs, world, sync).max(axis=1).sum())


def deal(
    lengths: Integers,
    costs: Integers,
    own: Integers,
    *,
    world: int,
    micro_batches: int,
    capacity: int,
    max_documents: int,
    sync: Sync,
    joint: bool = False,
    effort: int = 1,
) -> Packs:
    """Arrange documents into world × micro_batches packs, micro-batch-major, alike in cost where ranks meet.

    Args:
        lengths: (documents,) tokens of the step's documents.
        costs: (documents,) their costs, rising with length.
        own: (documents,) a packing that fits: each document's pack, of at most world × micro_batches.
        world: ranks.
        micro_batches: packs of each rank.
        capacity: most tokens of a pack.
        max_documents: most documents of a pack.
        sync: where ranks meet.
        joint: ranks shall agree in tokens and in squares, instead of in cost.
        effort: how many times as many rearrangements are tried as by default.

    Returns:
        `Packs` of numbers into `lengths`. No pack is empty while there are enough documents. They are the best of
        several beginnings, each balanced; the own packs are one of them, so that there always is one that fits.
    """
    packs = world * micro_batches
    order = falling(lengths)
    step = _Step(
        lengths[order], costs[order], world, micro_batches, capacity, max_documents, sync, joint, effort
    )
    placed = own[order]
    if packs > int(own.max()) + 1:
        placing.fill_empty(placed, packs)
    if world == 1:
        best = step.in_packs(placed)
    else:
        best = step.arrange(placed)
    return Packs(order[best[0]], best[1])


@dataclass(frozen=True)
class _Step:
    """Documents of a step in falling order, and the ranks that share it."""

    lengths: Integers
    costs: Integers
    world: int
    micro_batches: int
    capacity: int
    max_documents: int
    sync: Sync
    joint: bool
    effort: int

    @property
    def packs(self) -> int:
        return self.world * self.micro_batches

    @property
    def slots(self) -> list[tuple[int, int]]:
        """First and last micro-batch of each meeting."""
        if self.sync == "step":
            return [(0, self.micro_batches)]
        return [(slot, slot + 1) for slot in range(self.micro_batches)]

    def in_packs(self, placed: Integers) -> tuple[Integers, Integers]:
        """(order, offsets) of packs from each document's pack number; each pack in falling order."""
        offsets = np.zeros(self.packs + 1, dtype=np.int64)
        np.cumsum(np.bincount(placed, minlength=self.packs), out=offsets[1:])
        return placing.in_packs(placed, offsets), offsets

    def arrange(self, own: Integers) -> tuple[Integers, Integers]:
        """The best of some beginnings, each balanced; one that no other could beat ends the search."""
        best, least = self.in_packs(own), -1
        goal = least_step_cost(
            self.lengths, self.costs, self.world, self.micro_batches, self.capacity, self.sync
        )
        for begin in self._beginnings(own):
            placed = begin()
            if placed.min() < 0:
                continue
            order, offsets = self.in_packs(placed)
            reached = sum(self._balance(order, offsets, first, last) for first, last in self.slots)
            if least < 0 or reached < least:
                best, least = (order, offsets), reached
            if reached <= goal + goal // _CLOSE:
                break
        return best

    def _beginnings(self, own: Integers) -> list[Callable[[], Integers]]:
        """Ways to give documents a pack, slot · world + rank; −1 for those that found no room."""
        if self.micro_batches == 1:
            return [self._spread, lambda: self._numbered(own)]
        if self.sync == "step":
            return [self._ranks_first, self._spread, lambda: self._numbered(own)]
        return [self._spread, self._slot_by_slot, lambda: self._numbered(own)]

    def _spread(self) -> Integers:
        """Each document, longest first, into the cheapest pack with room."""
        return self._numbered(self._settled(self._cheapest(self.packs, self.capacity, self.max_documents)))

    def _slot_by_slot(self) -> Integers:
        """Micro-batch after micro-batch, the dearest first."""
        placed = placing.place_by_slot(
            self.lengths, self.costs, self.world, self.micro_batches, self.capacity, self.max_documents
        )
        return self._settled(placed)

    def _ranks_first(self) -> Integers:
        """Each document to the cheapest rank; then each rank's documents into packs alike in tokens.

        A rank with a long document has cheap packs beside it, which packs that are all alike would not allow.
        """
        each = self.micro_batches
        ranks = self._cheapest(self.world, each * self.capacity, each * self.max_documents)
        placed = np.full(len(ranks), -1, dtype=np.int64)
        for rank in range(self.world):
            documents = np.flatnonzero(ranks == rank)
            if len(documents):
                lengths = self.lengths[documents]
                slots = level_tokens(lengths, lengths, each, self.capacity, self.max_documents)
                placed[documents] = np.where(slots < 0, -1, slots * self.world + rank)
        return self._settled(placed)

    def _cheapest(self, packs: int, capacity: int, max_documents: int) -> Integers:
        visit = np.arange(len(self.lengths), dtype=np.int64)
        return placing.place(self.lengths, self.costs, visit, packs, capacity, max_documents, True)

    def _settled(self, placed: Integers) -> Integers:
        """Room gathered for what has none, and documents in packs that are empty, in place."""
        if placed.min() < 0:
            everything = np.ones(len(placed), dtype=np.bool_)
            placing.gather(
                placed, self.lengths, everything, self.packs, self.capacity, self.max_documents, -1
            )
        placing.fill_empty(placed, self.packs)
        return placed

    def _numbered(self, placed: Integers) -> Integers:
        """Give packs their micro-batch and rank: pack numbers become slot · world + rank."""
        totals = placing.tally(placed, self.costs, self.packs)[0]
        dearest_first = np.argsort(-totals, kind="stable")
        number = np.empty(self.packs, dtype=np.int64)
        if self.sync == "step":
            number[dearest_first] = balancing.assign_ranks(
                totals[dearest_first], self.world, self.micro_batches
            )
        else:
            number[dearest_first] = np.arange(self.packs)  # alike in cost, so together in one micro-batch
        return np.where(placed < 0, -1, number[placed])

    def _balance(self, order: Integers, offsets: Integers, first: int, last: int) -> int:
        """Let ranks of one meeting trade documents, in place; returns the dearest one's cost."""
        world = self.world
        inside = np.sort(order[offsets[first * world] : offsets[last * world]])
        if len(inside) == 0:
            return 0
        lengths, costs = self.lengths, self.costs
        room = (last - first) * self.capacity
        goal = bounds.dearest_bound(lengths[inside], costs[inside], world, room)
        meeting = (order, offsets, lengths, costs, self.capacity, self.max_documents, world, first, last)
        reached = balancing.exchange(*meeting, goal + goal // _EXACT)
        enough = goal + goal // _CLOSE
        of_two = last - first == 1 and not self.joint and few(lengths[inside], world, self.capacity)
        if of_two and reached > enough:
            among = (first * world, last * world, goal // _EXACT)
            reached = balancing.exchange_two(
                order, offsets, lengths, costs, self.capacity, self.max_documents, *among
            )
        if not self.joint and reached <= enough:
            return int(reached)
        half, attempts = (_JOINT_HALF, _JOINT_ATTEMPTS) if self.joint else (HALF, _ATTEMPTS)
        attempts *= _PATIENCE if last - first >= _CROWDED else 1
        half += min(self.effort.bit_length() - 1, _MORE)
        pairing.level(*meeting, self.joint, half, attempts * self.effort * world, enough)
        totals = np.add.reduceat(np.append(costs[order], 0), offsets[:-1])
        totals[offsets[1:] == offsets[:-1]] = 0  # an empty pack, where reduceat gives what follows
        return int(totals[first * world : last * world].reshape(-1, world).sum(axis=0).max())
