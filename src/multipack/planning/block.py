"""One block of steps: its documents into packs, its packs into steps, and what may wait for the blocks after it.

    packs      |aeh| |bcm| |dfk| |gij| …                 longest first, each into the cheapest pack with room
    steps      packs by cost, `packs_per_step` at a time; a block's steps in seeded order
    waiting    what found no room opens the next block, if the next two are sure to have room for it

Entries are positions in the sequence of an epoch or in the queue of a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import fit, placing
from multipack.planning.level import few, level_tokens, trade, trade_two
from multipack.planning.order import BLOCKS, keys

Integers = NDArray[np.int64]

MOST_TRADERS = 1024
"""Packs of a block beyond which they do not trade: the window averages enough."""

_TOLERANCE = 500  # best fit is tried when more than 1/500 of a block's tokens found no room
_FEW = 64  # packs of a block whose documents are made alike first when they do not all fit
_ALIKE = 1024  # packs within 1/1024 of the mean cost do not trade
_GROUPED = 8192  # … and within 1/8192 of it they stand in any step of their block


@dataclass(frozen=True)
class Rules:
    """What every block obeys.

    Attributes:
        capacity: most tokens of a pack.
        packs_per_step: most packs of a step.
        step_tokens: tokens to aim at in a step at most.
        max_documents: most documents of a pack.
        price: lengths → the costs that are balanced.
        group: packs that are dearer than the rest stand together in steps.
        full: steps shall be filled as far as documents allow, not evenly.
        shuffled: a block's steps come in seeded order; else in the order of their documents.
        seed, epoch: of the seeded order.
    """

    capacity: int
    packs_per_step: int
    step_tokens: int
    max_documents: int
    price: Callable[[Integers], Integers]
    group: bool
    full: bool
    shuffled: bool
    seed: int
    epoch: int

    @property
    def free(self) -> bool:
        """Whether documents may wait so that others make packs alike: no order is given, nor steps to be filled."""
        return self.shuffled and not self.full


def first_fit(lengths: Integers, old: int, rules: Rules) -> Integers:
    """Pack of each entry that waits, by first fit in as many packs as that takes: the first `old` before the others.

    Within both, longer ones come first. Whoever takes the first packs away, with all that is in them, finds what is
    left in the same packs as before: the packs of the next block can be made, and all others still fit.
    """
    order = np.lexsort((-lengths, np.arange(len(lengths)) >= old))
    packs = np.empty(len(lengths), dtype=np.int64)
    packs[order] = fit.first_fit(lengths[order], rules.capacity, rules.max_documents)[0]
    return packs


def fits(lengths: Integers, old: int, rules: Rules, ahead: tuple[int, int]) -> bool:
    """Whether entries that wait fit into two blocks of so many steps, and the first `old` of them into the first."""
    first, second = (steps * rules.packs_per_step for steps in ahead)
    if old <= first and len(lengths) <= first + second:
        return True  # a pack for each
    packs = first_fit(lengths, old, rules)
    return bool(packs.max() < first + second and packs[:old].max(initial=-1) < first)


def place(
    lengths: Integers,
    costs: Integers,
    old: Integers,
    wanted: NDArray[np.bool_],
    rules: Rules,
    packs: int,
    spare: int,
    begin: Integers | None = None,
) -> Integers:
    """Pack number of each entry (in falling order), −1 for those that must wait.

    `old` entries choose first, in their order. Those not `wanted` are looked at only to fill the gaps that remain,
    but `spare` tokens. Entries that have a pack in `begin` have a place for certain, in that or another pack.
    """
    visit = np.flatnonzero(wanted)
    if len(old):
        visit = np.concatenate([old, visit[~np.isin(visit, old)]])
    room = min(rules.capacity, int(lengths.sum()))
    spare -= packs * (rules.capacity - room)
    limit = rules.max_documents
    if begin is None:
        best = _place_best(lengths, costs, old, visit, wanted, packs, room, limit, spare)
    else:
        best = begin.copy()
        placing.gather(best, lengths, wanted, packs, room, limit, spare)
    placing.fill_empty(best, packs)
    if packs <= MOST_TRADERS:
        mean = int(costs[best >= 0].sum()) // packs
        trade(best, lengths, costs, packs, room, limit, mean + mean // _ALIKE)
        if few(lengths[visit], packs, room):
            stay = old if rules.free and begin is None else None
            trade_two(best, lengths, costs, stay, packs, room, limit, _ALIKE)
    return best


def _place_best(
    lengths: Integers,
    costs: Integers,
    old: Integers,
    visit: Integers,
    wanted: NDArray[np.bool_],
    packs: int,
    room: int,
    limit: int,
    spare: int,
) -> Integers:
    """The best of spreading entries by cost, of making packs alike whatever they hold, and of best fit."""
    tokens = int(lengths[wanted].sum())

    def gathered(placed: Integers) -> tuple[Integers, int]:
        if placed.min() < 0:
            placing.gather(placed, lengths, wanted, packs, room, limit, spare)
        return placed, int(lengths[wanted & (placed < 0)].sum())

    best, missed = gathered(placing.place(lengths, costs, visit, packs, room, limit, True))
    last = bool(wanted.all()) and missed > 0  # nothing comes after that could fill the gaps
    if missed * _TOLERANCE > tokens or (last and packs <= _FEW):
        leveled = np.full(len(lengths), -1, dtype=np.int64)
        leveled[wanted] = level_tokens(lengths[wanted], costs[wanted], packs, room, limit)
        if not len(old) or leveled[old].min() >= 0:
            leveled, missed_leveled = gathered(leveled)
            if missed_leveled < missed:
                best, missed = leveled, missed_leveled
    if missed * _TOLERANCE > tokens or (last and missed):
        tight, missed_tight = gathered(placing.place(lengths, costs, visit, packs, room, limit, False))
        if 2 * missed_tight <= missed or (last and missed_tight < missed):
            best = tight
    return best


def arrange(
    positions: Integers,
    costs: Integers,
    placed: Integers,
    rules: Rules,
    width: int,
    number: int,
    first: NDArray[np.bool_] | None,
    within: int,
) -> tuple[Integers, Integers, Integers]:
    """Packs of a block into steps, then the steps into their order.

    With `group`, packs that are dearer or cheaper than the rest stand together, by falling cost; all others,
    and without it all packs, in seeded order (or in the order of their documents).

    Args:
        positions: of the entries.
        costs: theirs.
        placed: their packs, −1 for those without.
        rules: what the block obeys.
        width: its steps.
        number: of the block; its steps are drawn by it.
        first: entries that must be in one of the first `within` steps, at most as many as these have packs;
            None = there are none.
        within: as said there.

    Returns:
        Positions, pack after pack; documents of each pack; packs of each step.
    """
    packs = width * rules.packs_per_step
    cost, sizes = placing.tally(placed, costs, packs)
    used = np.flatnonzero(sizes)
    cost, mean = cost[used], int(cost.sum()) // len(used)
    random = keys(rules.seed, rules.epoch + (number << 32), np.arange(len(used) + width), BLOCKS)
    mean_position = placing.tally(placed, positions, packs)[0][used] // sizes[used]
    tie: NDArray[Any] = random[:-width] if rules.shuffled else mean_position
    if rules.group:
        cost[np.abs(cost - mean) * _GROUPED <= mean] = mean
        used = used[np.lexsort((tie, -cost))]
    else:
        used = used[np.argsort(tie, kind="stable")]
    bounds = np.arange(width + 1) * len(used) // width
    step_of = np.repeat(np.arange(width), np.diff(bounds))
    early = np.zeros(width, dtype=np.bool_)
    if first is not None:
        used, held = _early_first(used, np.isin(used, placed[first]), step_of, within)
        early[step_of[held]] = True
    if rules.shuffled:
        turns = np.lexsort((random[-width:], ~early))
    else:
        of_pack = np.full(packs, -1, dtype=np.int64)
        of_pack[used] = step_of
        steps = np.where(placed >= 0, of_pack[placed], -1)
        total, count = placing.tally(steps, positions, width)
        turns = np.lexsort((total // count, ~early))
    final = np.concatenate([used[bounds[turn] : bounds[turn + 1]] for turn in turns])
    of_pack = np.full(packs, -1, dtype=np.int64)
    of_pack[final] = np.arange(len(final))
    offsets = np.zeros(len(final) + 1, dtype=np.int64)
    np.cumsum(sizes[final], out=offsets[1:])
    order = placing.in_packs(np.where(placed >= 0, of_pack[placed], -1), offsets)
    return positions[order], sizes[final], np.diff(bounds)[turns]


def _early_first(
    used: Integers, held: NDArray[np.bool_], step_of: Integers, within: int
) -> tuple[Integers, NDArray[np.bool_]]:
    """Packs in an order in which those `held` stand in no more than `within` steps, and which these then are."""
    if len(np.unique(step_of[held])) <= within:
        return used, held
    return np.concatenate([used[held], used[~held]]), np.arange(len(used)) < np.count_nonzero(held)
