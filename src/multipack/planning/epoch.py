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

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from multipack.planning.cost import weigh
from multipack.planning.kernels import placing
from multipack.planning.permutation import STEPS, permutation

Integers = NDArray[np.int64]

_WIDEST = 4  # windows that are cut as one where documents would be left over at the end
_TOLERANCE = 500  # best fit is tried when more than 1/500 of a block's tokens found no room


@dataclass(frozen=True)
class Rules:
    """What every block obeys.

    Attributes:
        capacity: most tokens of a pack.
        packs_per_step: most packs of a step.
        step_tokens: tokens to aim at in a step at most.
        max_documents: most documents of a pack.
        linear, quadratic: weights of l and l(l+1) in the cost that is balanced.
        shuffled: a block's steps come in seeded order; else in the order of their documents.
        seed, epoch: of the seeded order.
    """

    capacity: int
    packs_per_step: int
    step_tokens: int
    max_documents: int
    linear: int
    quadratic: int
    shuffled: bool
    seed: int
    epoch: int


@dataclass(frozen=True, eq=False)
class Cut:
    """The steps of an epoch, as flat arrays.

    Attributes:
        entries: positions in the sequence, pack after pack, step after step.
        pack_sizes: documents of each pack.
        step_sizes: packs of each step.
        left: positions, rising, that no step took.
    """

    entries: Integers
    pack_sizes: Integers
    step_sizes: Integers
    left: Integers


@dataclass
class _Progress:
    """Where cutting stands between two blocks."""

    made: int = 0  # steps
    next: int = 0  # first position not looked at yet
    waiting: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # rising positions
    blocks: int = 0


def cut(
    ends: Integers,
    repeats: Integers | None,
    rules: Rules,
    steps: int,
    window: int,
    extend: Callable[[int, int], int],
    settle: bool,
) -> Cut:
    """Cut a sequence of documents into steps.

    Args:
        ends: (entries + 1,) running sum of the lengths in sequence order, from 0.
        repeats: for each position, the position at which the same document occurred two times before, or −1;
            None where no document occurs more than twice.
        rules: what blocks obey.
        steps: steps to spread the documents over, at most as many as there are entries.
        window: steps of a block.
        extend: (tokens left, entries left) → further steps, asked when the steps are used up.
        settle: every entry shall find a place. Where the last block leaves some over, the last blocks are cut
            again as one, up to 4 windows wide; and when steps are added after all, that block is cut again
            together with them, so that no nearly empty step trails behind.
    """
    state, history = _Progress(), list[_Progress]()  # where each block began
    chunks: list[tuple[Integers, Integers, Integers]] = []
    while True:
        rest = steps - state.made
        width = -(-rest // max(1, -(-rest // window)))  # blocks of even width, none above the window
        if rest == 0:
            tokens = int(ends[-1] - ends[state.next]) + _tokens(ends, state.waiting)
            entries = len(ends) - 1 - state.next + len(state.waiting)
            more = min(extend(tokens, entries), entries)
            if more <= 0:
                break
            if settle and len(chunks) > 1 and steps - history[-2].made <= _WIDEST * window:
                state, width = history[-2], steps - history[-2].made  # the last two blocks, as one
                del history[-2:], chunks[-2:]
            else:
                steps += more
                if settle and chunks:
                    state = history.pop()
                    del chunks[-1]
                continue
        history.append(state)
        chunk, state = _block(ends, repeats, rules, state, steps, width)
        chunks.append(chunk)
    left = np.concatenate([state.waiting, np.arange(state.next, len(ends) - 1, dtype=np.int64)])
    columns = [np.concatenate(column) for column in zip(*chunks, strict=True)]
    return Cut(columns[0], columns[1], columns[2], left)


def _tokens(ends: Integers, positions: Integers) -> int:
    return int((ends[positions + 1] - ends[positions]).sum())


def _block(
    ends: Integers, repeats: Integers | None, rules: Rules, state: _Progress, steps: int, width: int
) -> tuple[tuple[Integers, Integers, Integers], _Progress]:
    """Make a block of `width` steps: (entries, pack sizes, step sizes) and where that leaves the sequence."""
    stop, held = _take(ends, repeats, rules, state, steps, width)
    kept = len(state.waiting) - held
    positions = np.concatenate([state.waiting[:kept], np.arange(state.next, stop, dtype=np.int64)])
    width = min(width, len(positions))
    lengths = ends[positions + 1] - ends[positions]
    last = state.made + width == steps
    placed = _place(lengths, positions < state.next, rules, width * rules.packs_per_step, last)
    chosen = placed >= 0
    chunk = _arrange(positions[chosen], lengths[chosen], placed[chosen], rules, width, state.blocks)
    after = _Progress(
        made=state.made + width,
        next=stop,
        waiting=np.sort(np.concatenate([positions[~chosen], state.waiting[kept:]])),
        blocks=state.blocks + 1,
    )
    return chunk, after


def _take(
    ends: Integers, repeats: Integers | None, rules: Rules, state: _Progress, steps: int, width: int
) -> tuple[int, int]:
    """How far into the sequence a block reaches, and how many of those that wait it holds back.

    It takes an even share of the tokens that are left, and no more than its steps may hold; at least one
    entry a step, and it leaves one for every later step.
    """
    remaining = len(ends) - 1 - state.next
    later = steps - state.made - width
    waiting_tokens = _tokens(ends, state.waiting)
    tokens = int(ends[-1] - ends[state.next]) + waiting_tokens
    share = -(-tokens * width // (steps - state.made))
    wanted = min(share, width * rules.step_tokens) - waiting_tokens
    fresh = int(np.searchsorted(ends, ends[state.next] + max(wanted, 0), side="right")) - 1 - state.next
    waiting = len(state.waiting)
    most = min(waiting + remaining - later, width * rules.packs_per_step * rules.max_documents)
    count = min(max(waiting + fresh, width), most)
    stop = state.next + min(max(count - waiting, 0), remaining)
    if repeats is not None:
        oldest = int(state.waiting[0]) if waiting else state.next
        third = np.flatnonzero(repeats[state.next : stop] >= oldest)
        stop = state.next + int(third[0]) if len(third) else stop
    return stop, max(waiting - count, 0)


def _place(lengths: Integers, first: NDArray[np.bool_], rules: Rules, packs: int, last: bool) -> Integers:
    """Pack number of each entry, −1 for those that must wait; entries marked `first` choose first."""
    order = np.argsort(-lengths, kind="stable")
    if first.any():
        order = np.concatenate([order[first[order]], order[~first[order]]])
    inside, costs = lengths[order], weigh(lengths[order], rules.linear, rules.quadratic)
    tokens = int(inside.sum())
    room = min(rules.capacity, tokens)
    placed = placing.place(inside, costs, packs, room, rules.max_documents, True)
    missed = int(inside[placed < 0].sum())
    if missed * _TOLERANCE > tokens or (last and missed):
        tight = placing.place(inside, costs, packs, room, rules.max_documents, False)
        missed_tight = int(inside[tight < 0].sum())
        if missed_tight * 2 <= missed or (last and missed_tight < missed):
            placed = tight
    if min(packs, int((placed >= 0).sum())) > len(np.unique(placed[placed >= 0])):
        placing.fill_empty(placed, inside, packs)
    numbers = np.empty_like(placed)
    numbers[order] = placed
    return numbers


def _arrange(
    positions: Integers, lengths: Integers, placed: Integers, rules: Rules, width: int, block: int
) -> tuple[Integers, Integers, Integers]:
    """Packs of a block into steps by falling cost, alike ones together; then the steps into their order."""
    packs = width * rules.packs_per_step
    sizes = np.bincount(placed, minlength=packs)
    cost = np.zeros(packs, dtype=np.int64)
    np.add.at(cost, placed, weigh(lengths, rules.linear, rules.quadratic))
    used = np.argsort(-cost, kind="stable")[: np.count_nonzero(sizes)]
    bounds = np.arange(width + 1) * len(used) // width
    if rules.shuffled:
        turns = permutation(rules.seed, rules.epoch + (block << 32), width, STEPS)
    else:
        step_of = np.empty(packs, dtype=np.int64)
        step_of[used] = np.repeat(np.arange(width), np.diff(bounds))
        where = np.zeros(width, dtype=np.int64)
        np.add.at(where, step_of[placed], positions)
        mean = where / np.bincount(step_of[placed], minlength=width)
        turns = np.argsort(mean, kind="stable")
    final = np.concatenate([used[bounds[turn] : bounds[turn + 1]] for turn in turns])
    rank = np.empty(packs, dtype=np.int64)
    rank[final] = np.arange(len(final))
    entries = positions[np.argsort(rank[placed], kind="stable")]
    return entries, sizes[final], np.diff(bounds)[turns]
