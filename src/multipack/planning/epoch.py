"""A sequence of documents, cut into global steps: block after block, nothing lost on the way.

    sequence   a b c d e f g h i j k l m n o p …        seeded order (or the documents' own)
    blocks     |───── window steps ─────|─────           cut evenly over the steps that are needed
    packs      |aeh| |bcm| |dfk| |gij| …                 longest first, each into the cheapest pack with room
    steps      packs by cost, `packs_per_step` at a time; a block's steps in seeded order
    waiting    what found no room opens the next block

A block never looks at the number of ranks. Entries are positions in the sequence, so that a document which
occurs twice (carried from the last epoch, and once of its own) is two entries.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import placing
from multipack.planning.level import few, level_tokens, trade, trade_two
from multipack.planning.permutation import BLOCKS, falling, keys

Integers = NDArray[np.int64]

AHEAD = 96
"""Documents after a block that are looked at, at most, to fill its gaps and to make its packs alike."""

_WIDEST = 2  # windows that are cut as one where documents would be left over at the end
_TOLERANCE = 500  # best fit is tried when more than 1/500 of a block's tokens found no room
_TIGHT = 64  # blocks filled to more than 63/64 look at the documents after them
_SPARE = 4096  # full packs keep 1/4096 of their room on average, so that ranks can be balanced
_FEW = 64  # packs of a block whose documents are made alike first when they do not all fit
_MOST_TRADERS = 1024  # packs of a block beyond which they do not trade: the window averages enough
_ALIKE = 1024  # packs within 1/1024 of the mean cost do not trade
_GROUPED = 8192  # … and within 1/8192 of it they stand in any step of their block
_BLOCKS_AHEAD = 2  # for balance, at most as many documents are looked at as two blocks have …
_LEFT_AHEAD = 8  # … and at most an eighth of those left, so that the last steps are like the others


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


@dataclass(frozen=True, eq=False)
class Cut:
    """The steps of an epoch, as flat arrays.

    Attributes:
        order: document numbers, pack after pack, step after step.
        pack_sizes: (packs,) int32 documents of each pack.
        step_sizes: (steps,) int32 packs of each step.
        left: positions, rising, that no step took.
    """

    order: Integers
    pack_sizes: NDArray[Any]
    step_sizes: NDArray[Any]
    left: Integers


@dataclass(frozen=True, eq=False)
class Progress:
    """Where cutting stands between two blocks.

    Attributes:
        made: steps so far.
        packs: in these steps.
        placed: entries in these packs.
        next: first position not looked at yet.
        old: positions below were passed over by two blocks or more; or had their turn, where documents wait for
            balance.
        waiting: rising positions that were looked at and have no place.
        blocks: made so far; their steps are drawn by this number.
    """

    made: int = 0
    packs: int = 0
    placed: int = 0
    next: int = 0
    old: int = 0
    waiting: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    blocks: int = 0


def cut(
    sequence: NDArray[Any],
    ends: Integers,
    repeats: Integers | None,
    rules: Rules,
    steps: int,
    window: int,
    extend: Callable[[int, int], int],
    settle: bool,
    begin: Progress | None = None,
) -> Cut:
    """Cut a sequence of documents into steps.

    Args:
        sequence: (entries,) document numbers.
        ends: (entries + 1,) running sum of the lengths in sequence order, from 0.
        repeats: for each position, the position at which the same document occurred two times before, or −1;
            None where no document occurs more than twice.
        rules: what blocks obey.
        steps: steps to spread the documents over, at most as many as there are entries.
        window: steps of a block.
        extend: (tokens left, entries left) → further steps, asked when the steps are used up.
        settle: every entry shall find a place. Where the last block leaves some over, the last blocks are cut
            again as one, up to 2 windows wide (or 4 steps); and when steps are added after all, that block is cut
            again together with them, so that no nearly empty step trails behind.
        begin: where earlier blocks left the queue, their steps and entries not counted; None = there were none.
    """
    state = begin or Progress()
    history = deque[Progress](maxlen=4)  # where the last blocks began
    order = np.empty(len(sequence), dtype=np.int64)
    pack_sizes, step_sizes = array("i"), array("i")  # grow with the packs that there are
    while True:
        rest = steps - state.made
        width = -(-rest // max(1, -(-rest // window)))  # blocks of even width, none above the window
        if rest == 0:
            tokens = int(ends[-1] - ends[state.next]) + _tokens(ends, state.waiting)
            entries = len(ends) - 1 - state.next + len(state.waiting)
            more = min(extend(tokens, entries), entries)
            if more <= 0:
                break
            if settle and len(history) > 1 and steps - history[-2].made <= max(_WIDEST * window, 4):
                history.pop()
                state = history.pop()
                width = steps - state.made  # the last two blocks, as one
            else:
                steps += more
                if settle and history:
                    state = history.pop()
                continue
        history.append(state)
        del pack_sizes[state.packs :], step_sizes[state.made :]
        chosen, packs, per_step, after = block(ends, repeats, rules, state, steps, width)
        order[state.placed : after.placed] = sequence[chosen]
        pack_sizes.frombytes(packs.astype(np.int32).tobytes())
        step_sizes.frombytes(per_step.astype(np.int32).tobytes())
        state = after
    left = np.concatenate([state.waiting, np.arange(state.next, len(ends) - 1, dtype=np.int64)])
    of_packs, of_steps = (np.frombuffer(part, dtype=np.int32) for part in (pack_sizes, step_sizes))
    return Cut(order[: state.placed], of_packs, of_steps, left)


def _tokens(ends: Integers, positions: Integers) -> int:
    return int((ends[positions + 1] - ends[positions]).sum())


def block(
    ends: Integers, repeats: Integers | None, rules: Rules, state: Progress, steps: int, width: int
) -> tuple[Integers, Integers, Integers, Progress]:
    """Make a block of `width` steps.

    Args:
        ends: as in `cut`.
        repeats: as in `cut`.
        rules: what it obeys.
        state: where the queue stands; at least one entry is in it.
        steps: all steps, those made before included; the rest shares the tokens that are left evenly.
        width: steps of the block; fewer are made where there are fewer entries.

    Returns:
        Positions of the entries, pack after pack; documents of each pack; packs of each step; and where that
        leaves the queue.
    """
    count, more, aim, balance = _take(ends, repeats, rules, state, steps, width)
    kept = min(len(state.waiting), count + more)
    stop = state.next + count + more - kept
    positions = np.concatenate([state.waiting[:kept], np.arange(state.next, stop, dtype=np.int64)])
    last = positions[count - 1]
    width = min(width, count)
    packs = width * rules.packs_per_step
    spare = max(packs * rules.capacity - aim, packs * (rules.capacity // _SPARE) if rules.full else 0)
    lengths = ends[positions + 1] - ends[positions]
    order = falling(lengths)
    positions, lengths = positions[order], lengths[order]
    costs = rules.price(lengths)
    waited = np.flatnonzero(positions < state.old)
    old = waited[np.argsort(positions[waited], kind="stable")]
    placed = _place(lengths, costs, old, positions <= last, rules, packs, spare)
    furthest = max(state.next, int(positions[placed >= 0].max()) + 1, int(last) + 1)
    unused = positions[(placed < 0) & (positions < furthest)]
    entries, pack_sizes, step_sizes = _arrange(positions, costs, placed, rules, width, state.blocks)
    after = Progress(
        made=state.made + width,
        packs=state.packs + len(pack_sizes),
        placed=state.placed + len(entries),
        next=furthest,
        old=max(state.old, int(last) + 1) if balance else state.next,
        waiting=np.sort(np.concatenate([unused, state.waiting[kept:]])),
        blocks=state.blocks + 1,
    )
    return entries, pack_sizes, step_sizes, after


def _take(
    ends: Integers, repeats: Integers | None, rules: Rules, state: Progress, steps: int, width: int
) -> tuple[int, int, int, bool]:
    """What a block takes from the front of the queue: those that wait, then the sequence.

    It aims at an even share of the tokens that are left, and no more than its steps may hold; it takes at least one
    entry a step, and leaves one for every later step.

    Returns:
        How many entries it takes; how many after them it may look at to fill gaps; the tokens that it aims at; and
        whether some that it takes may wait for others, to make packs alike.
    """
    waiting, remaining = len(state.waiting), len(ends) - 1 - state.next
    later = steps - state.made - width
    behind = np.cumsum(ends[state.waiting + 1] - ends[state.waiting])
    waiting_tokens = int(behind[-1]) if waiting else 0
    tokens = int(ends[-1] - ends[state.next]) + waiting_tokens
    share = -(-tokens * width // (steps - state.made))
    aim = min(share, width * rules.step_tokens)
    if aim < waiting_tokens:
        count = int(np.searchsorted(behind, aim, side="right"))
    else:
        reach = ends[state.next] + aim - waiting_tokens
        count = waiting + int(np.searchsorted(ends, reach, side="right")) - 1 - state.next
    left = waiting + remaining - later
    packs = width * rules.packs_per_step
    tight = rules.full or aim * _TIGHT > packs * rules.capacity * (_TIGHT - 1)
    if not tight and count < waiting + remaining:
        count += _nearer(
            ends, state, count, aim
        )  # else every block falls short, and the last ones take it all
    count = min(max(count, width), left, packs * rules.max_documents)
    kept = min(count, waiting)
    own = np.concatenate([state.waiting[:kept], np.arange(state.next, state.next + count - kept)])
    balance = rules.free and packs <= _MOST_TRADERS and few(ends[own + 1] - ends[own], packs, rules.capacity)
    beyond = (left - count) // _LEFT_AHEAD if balance else left - count if tight else 0
    more = min(AHEAD, _BLOCKS_AHEAD * count if balance else count, beyond)
    if repeats is not None:
        oldest = int(state.waiting[0]) if waiting else state.next
        stop = state.next + max(count - waiting, 0)
        third = np.flatnonzero(repeats[state.next : stop] >= oldest)
        count, more = (min(count, waiting + int(third[0])), 0) if len(third) else (count, 0)
    return count, more, aim, balance


def _nearer(ends: Integers, state: Progress, count: int, aim: int) -> bool:
    """Whether the first `count` entries of the queue and the next one come nearer to so many tokens than without it."""
    kept = min(count, len(state.waiting))
    without = _tokens(ends, state.waiting[:kept]) + int(ends[state.next + count - kept] - ends[state.next])
    following = (
        state.waiting[count] if count < len(state.waiting) else state.next + count - len(state.waiting)
    )
    return 2 * (aim - without) >= int(ends[following + 1] - ends[following])


def _place(
    lengths: Integers,
    costs: Integers,
    old: Integers,
    wanted: NDArray[np.bool_],
    rules: Rules,
    packs: int,
    spare: int,
) -> Integers:
    """Pack number of each entry (in falling order), −1 for those that must wait.

    `old` entries choose first, in their order. Those not `wanted` are looked at only to fill the gaps that remain,
    but `spare` tokens.
    """
    visit = np.flatnonzero(wanted)
    if len(old):
        visit = np.concatenate([old, visit[~np.isin(visit, old)]])
    tokens = int(lengths[wanted].sum())
    room = min(rules.capacity, int(lengths.sum()))
    spare -= packs * (rules.capacity - room)
    limit = rules.max_documents

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
    placing.fill_empty(best, packs)
    if packs <= _MOST_TRADERS:
        mean = int(costs[best >= 0].sum()) // packs
        trade(best, lengths, costs, packs, room, limit, mean + mean // _ALIKE)
        if few(lengths[visit], packs, room):
            trade_two(best, lengths, costs, old if rules.free else None, packs, room, limit, _ALIKE)
    return best


def _arrange(
    positions: Integers, costs: Integers, placed: Integers, rules: Rules, width: int, block: int
) -> tuple[Integers, Integers, Integers]:
    """Packs of a block into steps, then the steps into their order.

    With `group`, packs that are dearer or cheaper than the rest stand together, by falling cost; all others,
    and without it all packs, in seeded order (or in the order of their documents).
    """
    packs = width * rules.packs_per_step
    cost, sizes = placing.tally(placed, costs, packs)
    used = np.flatnonzero(sizes)
    cost, mean = cost[used], int(cost.sum()) // len(used)
    random = keys(rules.seed, rules.epoch + (block << 32), np.arange(len(used) + width), BLOCKS)
    mean_position = placing.tally(placed, positions, packs)[0][used] // sizes[used]
    tie: NDArray[Any] = random[:-width] if rules.shuffled else mean_position
    if rules.group:
        cost[np.abs(cost - mean) * _GROUPED <= mean] = mean
        used = used[np.lexsort((tie, -cost))]
    else:
        used = used[np.argsort(tie, kind="stable")]
    bounds = np.arange(width + 1) * len(used) // width
    if rules.shuffled:
        turns = np.argsort(random[-width:], kind="stable")
    else:
        step_of = np.full(packs, -1, dtype=np.int64)
        step_of[used] = np.repeat(np.arange(width), np.diff(bounds))
        steps = np.where(placed >= 0, step_of[placed], -1)
        total, count = placing.tally(steps, positions, width)
        turns = np.argsort(total // count, kind="stable")
    final = np.concatenate([used[bounds[turn] : bounds[turn + 1]] for turn in turns])
    number = np.full(packs, -1, dtype=np.int64)
    number[final] = np.arange(len(final))
    offsets = np.zeros(len(final) + 1, dtype=np.int64)
    np.cumsum(sizes[final], out=offsets[1:])
    order = placing.in_packs(np.where(placed >= 0, number[placed], -1), offsets)
    return positions[order], sizes[final], np.diff(bounds)[turns]
