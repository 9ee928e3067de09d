"""A sequence of documents, cut into global steps: block after block, nothing lost on the way.

    sequence   a b c d e f g h i j k l m n o p …        seeded order (or the documents' own)
    blocks     |───── window steps ─────|─────           cut evenly over the steps that are needed
    waiting    what found no room opens the next block

A block never looks at the number of ranks. Entries are positions in the sequence, so that a document which
occurs twice (carried from the last epoch, and once of its own) is two entries.

**The promise of the window**: no entry is passed over by more than two blocks, so that fewer than 3 · window steps
lie between the first that trained a later entry and its own. (A window of 1 counts as 2: there the last four steps may
be one block, and where few documents share a pack, balance looks a block further.) It holds for every sequence,
because a block takes no more from it than the two blocks that follow are sure to have room for: what waits fits, by
first fit, into the packs of these two, and what was passed over twice into those of the first. A block that would
leave more behind stops earlier in the sequence, and later blocks share the rest; at the worst it takes nothing new and
gives those that wait the packs that first fit found, which leaves later blocks what they are sure to hold. The price is
paid in steps where their number is open, in a wider window where it is fixed and every document must be trained
(`Plan.window` says which), and in documents left over where the tail allows that.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.block import MOST_TRADERS, Rules, arrange, first_fit, fits, place
from multipack.planning.level import few
from multipack.planning.order import falling

__all__ = ["AHEAD", "Cut", "Progress", "Rules", "block", "cut"]

Integers = NDArray[np.int64]

AHEAD = 96
"""Documents after a block that are looked at, at most, to fill its gaps and to make its packs alike."""

_WIDEST = 2  # windows that are cut as one where documents would be left over at the end
_LEAST = 2  # steps that a window counts as, at least, in its promise and where the last blocks are one
_TIGHT = 64  # blocks filled to more than 63/64 look at the documents after them
_SPARE = 4096  # full packs keep 1/4096 of their room on average, so that ranks can be balanced
_BLOCKS_AHEAD = 2  # for balance, at most as many documents are looked at as two blocks have …
_LEFT_AHEAD = 8  # … and at most an eighth of those left, so that the last steps are like the others


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
        seen: the same, a block before.
        old: positions below were passed over by two blocks, or had their turn where documents wait for balance; those
            that wait are placed before all others.
        waiting: rising positions that were looked at and have no place.
        blocks: made so far; their steps are drawn by this number.
    """

    made: int = 0
    packs: int = 0
    placed: int = 0
    next: int = 0
    seen: int = 0
    old: int = 0
    waiting: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    blocks: int = 0

    @property
    def waiting_old(self) -> int:
        """Entries that wait and are old."""
        return int(np.searchsorted(self.waiting, self.old))


@dataclass(frozen=True)
class _Share:
    """What a block takes from the front of the queue: those that wait, then the sequence.

    Attributes:
        count: entries.
        more: entries after them that it may look at to fill gaps.
        most: entries that it may take at most.
        aim: tokens that it aims at.
        balance: some that it takes may wait for others, to make packs alike.
        sure: those that waited have the packs that they are sure to have.
    """

    count: int
    more: int
    most: int
    aim: int
    balance: bool
    sure: bool = False


@dataclass(frozen=True, eq=False)
class _Filled:
    """Entries of a block in falling order, and what it leaves.

    Attributes:
        positions: of the entries.
        costs: theirs.
        placed: their packs, −1 for those without.
        after: the queue; of steps and packs it does not know yet.
    """

    positions: Integers
    costs: Integers
    placed: Integers
    after: Progress


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
        extend: (tokens left, entries left) → further steps, asked when the steps are used up. A block after which the
            further ones would not hold what waits is cut again together with them.
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
        if rest == 0:
            tokens = int(ends[-1] - ends[state.next]) + _tokens(ends, state.waiting)
            entries = len(ends) - 1 - state.next + len(state.waiting)
            more = min(extend(tokens, entries), entries)
            if more <= 0:
                break
            if not (settle and _as_one(ends, history, rules, steps, window)):
                steps += more
                if history and (settle or not _kept(ends, state, rules, _ahead(more, window))):
                    state = history.pop()
                continue
            history.pop()
            state = history.pop()
            width = steps - state.made  # the last two blocks, as one
        else:
            width, following = _ahead(rest, window)
            if not _kept(ends, state, rules, (width, following)):
                width = min(window, rest)  # steps were added, and blocks of even width became narrower
        history.append(state)
        del pack_sizes[state.packs :], step_sizes[state.made :]
        chosen, packs, per_step, after = block(ends, repeats, rules, state, steps, width, window)
        order[state.placed : after.placed] = sequence[chosen]
        pack_sizes.frombytes(packs.astype(np.int32).tobytes())
        step_sizes.frombytes(per_step.astype(np.int32).tobytes())
        state = after
    left = np.concatenate([state.waiting, np.arange(state.next, len(ends) - 1, dtype=np.int64)])
    of_packs, of_steps = (np.frombuffer(part, dtype=np.int32) for part in (pack_sizes, step_sizes))
    return Cut(order[: state.placed], of_packs, of_steps, left)


def _ahead(steps: int, window: int) -> tuple[int, int]:
    """Steps of the next two blocks, where so many are left: blocks of even width, none above the window."""
    first = -(-steps // max(1, -(-steps // window)))
    rest = steps - first
    return first, -(-rest // max(1, -(-rest // window)))


def _as_one(ends: Integers, history: deque[Progress], rules: Rules, steps: int, window: int) -> bool:
    """Whether the last two blocks may be cut again as one, with its old entries in the first `window` steps."""
    if len(history) < 2:
        return False
    window, begin = max(window, _LEAST), history[-2]
    width, entries = steps - begin.made, len(ends) - 1 - begin.next + len(begin.waiting)
    packs = min(width * rules.packs_per_step, entries)
    return width <= _WIDEST * window and begin.waiting_old <= window * packs // width


def _kept(ends: Integers, state: Progress, rules: Rules, ahead: tuple[int, int]) -> bool:
    """Whether what waits is sure to find a place in blocks of so many steps, and what is old in the first."""
    return fits(_lengths(ends, state.waiting), state.waiting_old, rules, ahead)


def _lengths(ends: Integers, positions: Integers) -> Integers:
    return ends[positions + 1] - ends[positions]


def _tokens(ends: Integers, positions: Integers) -> int:
    return int(_lengths(ends, positions).sum())


def block(
    ends: Integers,
    repeats: Integers | None,
    rules: Rules,
    state: Progress,
    steps: int,
    width: int,
    window: int | None = None,
) -> tuple[Integers, Integers, Integers, Progress]:
    """Make a block of `width` steps.

    Args:
        ends: as in `cut`.
        repeats: as in `cut`.
        rules: what it obeys.
        state: where the queue stands; at least one entry is in it.
        steps: all steps, those made before included; the rest shares the tokens that are left evenly.
        width: steps of the block; fewer are made where there are fewer entries.
        window: steps of a block at most, where `cut` makes them; None = blocks like this one follow.

    Returns:
        Positions of the entries, pack after pack; documents of each pack; packs of each step; and where that
        leaves the queue.
    """
    ahead = (width, width) if window is None else _ahead(steps - state.made - width, window)
    share = _take(ends, repeats, rules, state, steps, width)
    while True:
        filled = _fill(ends, rules, state, share, width, window)
        if ahead[0] == 0 or _kept(ends, filled.after, rules, ahead):
            break
        fewer = _smaller(ends, rules, state, share, filled.after, width, ahead)
        if fewer is None:
            break
        share = fewer
    width, within = min(width, share.count), max(window or width, _LEAST)
    first = filled.positions < state.old if width > within else None
    entries, pack_sizes, step_sizes = arrange(
        filled.positions, filled.costs, filled.placed, rules, width, state.blocks, first, within
    )
    after = replace(
        filled.after,
        made=state.made + width,
        packs=state.packs + len(pack_sizes),
        placed=state.placed + len(entries),
        blocks=state.blocks + 1,
    )
    return entries, pack_sizes, step_sizes, after


def _fill(
    ends: Integers, rules: Rules, state: Progress, share: _Share, width: int, window: int | None
) -> _Filled:
    """A block's share of the queue into its packs."""
    kept = min(len(state.waiting), share.count + share.more)
    stop = state.next + share.count + share.more - kept
    positions = np.concatenate([state.waiting[:kept], np.arange(state.next, stop, dtype=np.int64)])
    last = int(positions[share.count - 1])
    packs = min(width, share.count) * rules.packs_per_step
    full = packs * (rules.capacity // _SPARE) if rules.full else 0
    spare = max(packs * rules.capacity - share.aim, full)
    order = falling(_lengths(ends, positions))
    positions = positions[order]
    lengths = _lengths(ends, positions)
    costs = rules.price(lengths)
    waited = np.flatnonzero(positions < state.old)
    old = waited[np.argsort(positions[waited], kind="stable")]
    sought = (lengths, costs, old, positions <= last, rules, packs, spare)
    placed = np.full(len(positions), -1, dtype=np.int64) if share.sure else place(*sought)
    if share.sure or (len(old) and placed[old].min() < 0):
        begin = np.full(len(positions), -1, dtype=np.int64)
        begin[:kept] = first_fit(_lengths(ends, state.waiting[:kept]), len(old), rules)
        begin[begin >= packs] = -1
        begin = begin[order]
        if share.sure or begin[old].min() >= 0:
            placed = place(*sought, begin)
    furthest = max(state.next, int(positions[placed >= 0].max()) + 1, last + 1)
    unused = positions[(placed < 0) & (positions < furthest)]
    passed = state.seen if share.balance and window == 1 else state.next
    after = Progress(
        next=furthest,
        seen=state.next,
        old=max(state.old, last + 1, passed) if share.balance else passed,
        waiting=np.sort(np.concatenate([unused, state.waiting[kept:]])),
    )
    return _Filled(positions, costs, placed, after)


def _smaller(
    ends: Integers,
    rules: Rules,
    state: Progress,
    share: _Share,
    after: Progress,
    width: int,
    ahead: tuple[int, int],
) -> _Share | None:
    """A smaller share for a block after which too much would wait; None = there is none.

    It ends before the first entry that would wait and be too much. Where those that waited before are too much
    already, they have the packs that they are sure to have.
    """
    lengths = _lengths(ends, after.waiting)
    low, high = int(np.searchsorted(after.waiting, state.next)), len(lengths)  # waited before; waits now
    if fits(lengths[:low], min(after.waiting_old, low), rules, ahead):
        while low + 1 < high:  # the first `low` fit, the first `high` do not
            middle = (low + high) // 2
            if fits(lengths[:middle], min(after.waiting_old, middle), rules, ahead):
                low = middle
            else:
                high = middle
        entries = len(state.waiting) + int(after.waiting[low]) - state.next
        count = min(share.count, max(entries, width))
        more = min(share.more, max(entries - count, 0))
        if count + more < share.count + share.more:
            return replace(share, count=count, more=more)
    if share.sure:
        return None
    count = max(share.count, min(len(state.waiting), share.most))
    return replace(share, count=count, more=min(share.more, share.most - count), sure=True)


def _take(
    ends: Integers, repeats: Integers | None, rules: Rules, state: Progress, steps: int, width: int
) -> _Share:
    """What a block takes from the front of the queue: those that wait, then the sequence.

    It aims at an even share of the tokens that are left, and no more than its steps may hold; it takes at least one
    entry a step and all that are old, and leaves one for every later step.
    """
    waiting, remaining = len(state.waiting), len(ends) - 1 - state.next
    later = steps - state.made - width
    behind = np.cumsum(_lengths(ends, state.waiting))
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
    count = min(max(count, width, state.waiting_old), left, packs * rules.max_documents)
    kept = min(count, waiting)
    own = np.concatenate([state.waiting[:kept], np.arange(state.next, state.next + count - kept)])
    balance = rules.free and packs <= MOST_TRADERS and few(_lengths(ends, own), packs, rules.capacity)
    beyond = (left - count) // _LEFT_AHEAD if balance else left - count if tight else 0
    more = min(AHEAD, _BLOCKS_AHEAD * count if balance else count, beyond)
    if repeats is not None:
        oldest = int(state.waiting[0]) if waiting else state.next
        stop = state.next + max(count - waiting, 0)
        third = np.flatnonzero(repeats[state.next : stop] >= oldest)
        count, more = (min(count, waiting + int(third[0])), 0) if len(third) else (count, 0)
    return _Share(count, more, left, aim, balance)


def _nearer(ends: Integers, state: Progress, count: int, aim: int) -> bool:
    """Whether the first `count` entries of the queue and the next one come nearer to so many tokens than without it."""
    kept = min(count, len(state.waiting))
    without = _tokens(ends, state.waiting[:kept]) + int(ends[state.next + count - kept] - ends[state.next])
    following = (
        state.waiting[count] if count < len(state.waiting) else state.next + count - len(state.waiting)
    )
    return 2 * (aim - without) >= int(ends[following + 1] - ends[following])
