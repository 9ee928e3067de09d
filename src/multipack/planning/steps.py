"""Divide documents into global steps: the seeded order, one window of steps, and an epoch of windows.

    sequence   a b c d e f g h i j k l m n o p …        seeded order, or the given order
    windows    |───── window steps ─────|─────          an even share of the remaining slots
    packs      |aeh| |bcm| |dfk| |gij| …                longest first, each into the pack of least cost
    steps      packs of similar cost, `packs_per_step` at a time; the steps of a window in seeded order
    deferred   documents that do not fit are placed first in the next window

Steps are made only by `window`: `divide` applies it to the sequence of an epoch, `PackStream` to a queue. Neither
depends on the number of ranks. An *entry* is a position in the sequence: a document that occurs twice (carried from the
last epoch, and in its own place) has two entries.

No two documents longer than half a pack fit into one pack. A window takes at most as many of them as it has packs, so
that few documents are deferred and all of these fit into the next window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import balancing, fit, placing
from multipack.planning.options import PlanOptions

Integers = NDArray[np.int64]

DOCUMENTS, WINDOWS, BATCHES = 0, 1, 2
"""Streams of random bits: for the order of documents, for the order within a window, and for random batches."""

AHEAD = 96
"""Maximum number of documents after a window that may fill its gaps. Those passed over are deferred: see `window`."""

_TIGHT = 64  # windows to be filled beyond 63/64 also consider the documents after them
_SPARE = 4096  # full packs keep 1/4096 of their slots free on average, so that ranks can be balanced
_TOLERANCE = 500  # the packer is tried if more than 1/500 of a window's slots are not placed
_MOST_SWAPPED = 1024  # windows with more packs are not balanced by swaps: steps average over enough packs
_SIMILAR = 1024  # swaps end when no pack exceeds the mean cost by more than 1/1024
_GROUPED = 8192  # packs within 1/8192 of the mean cost may be in any step of their window


def random_bits(
    seed: int, epoch: int, count: int, stream: int = DOCUMENTS, number: int = 0
) -> NDArray[np.uint64]:
    """(count,) random 64-bit numbers, equal on every platform and with every version of numpy.

    Raw bits of the Philox generator (Salmon et al. 2011), which numpy keeps stable (NEP 19); `Generator.permutation` is
    not.
    """
    mask = (1 << 64) - 1
    key = np.array([seed & mask, epoch & mask], dtype=np.uint64)
    counter = np.array([0, 0, number, stream & mask], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(seed: int, epoch: int, count: int, stream: int = DOCUMENTS) -> Integers:
    """The numbers 0 … count − 1 in seeded order, as (count,) int64."""
    bits = np.uint64(count.bit_length())
    keys = random_bits(seed, epoch, count, stream)
    keys >>= bits
    keys <<= bits
    keys |= np.arange(count, dtype=np.uint64)  # makes keys different, so that every sort gives the same order
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    return keys.view(np.int64)


Packer = Callable[[Integers, int, int], Integers]


def first_fit(slots: Integers, capacity: int, max_documents: int) -> Integers:
    """(documents,) pack of each document, by first fit in the given order."""
    return fit.first_fit(slots, capacity, max_documents)[0]


@dataclass(frozen=True, eq=False)
class StepRules:
    """Settings shared by all windows of an epoch or a stream.

    Attributes:
        options: options of the plan.
        price: slots of documents → costs that are balanced between packs.
        seed, epoch: seed and epoch of the order.
        spread: whether steps are filled evenly, up to the capacity; otherwise each is filled as much as possible.
        packer: (slots, capacity, max_documents) → pack of each document; tried if too many documents are not placed.
    """

    options: PlanOptions
    price: Callable[[Integers], Integers]
    seed: int
    epoch: int
    spread: bool
    packer: Packer = first_fit

    @property
    def step_slots(self) -> int:
        """Maximum number of slots to fill in a step."""
        options = self.options
        return options.packs_per_step * (options.capacity if self.spread else options.mean)

    @property
    def full(self) -> bool:
        """Whether packs are filled to the capacity."""
        return not self.spread and self.options.mean == self.options.capacity


@dataclass(frozen=True, eq=False)
class Window:
    """Steps that are planned together, and the entries left over.

    Attributes:
        entries: positions in the sequence, pack after pack, step after step.
        pack_sizes: number of entries of each pack.
        step_sizes: number of packs of each step.
        next: first position that was not considered.
        deferred: positions before `next` without a pack, ascending.
    """

    entries: Integers
    pack_sizes: Integers
    step_sizes: Integers
    next: int
    deferred: Integers


def window(
    ends: Integers,
    start: int,
    deferred: Integers,
    rules: StepRules,
    *,
    width: int,
    aim: int,
    most: int,
    number: int,
) -> Window:
    """Make the steps of a window.

    Args:
        ends: (entries + 1,) cumulative sum of the slots of the sequence, from 0.
        start: first position that no window has considered.
        deferred: positions before `start` without a pack, ascending.
        rules: options and costs.
        width: number of steps; fewer are made if there are fewer entries.
        aim: number of slots to place.
        most: maximum number of entries to place.
        number: index of the window, which with seed and epoch determines its random numbers.
    """
    options = rules.options
    limit = options.max_documents or len(ends)
    packs = width * options.packs_per_step
    most = min(most, packs * limit)
    taken, later = deferred[:most], deferred[most:]
    stop = _intake(ends, start, taken, rules, width, aim, most)
    tight = rules.full or aim * _TIGHT > packs * options.capacity * (_TIGHT - 1)
    reach = stop
    if tight and len(later) == 0:
        ahead = aim * (3 if width == 1 else 2) // 4  # a window of one step may defer a document twice
        near = int(np.searchsorted(ends, ends[stop] + ahead, side="right")) - 1
        reach = min(stop + AHEAD, start + most - len(taken), max(near, stop))
    positions = np.concatenate([taken, np.arange(start, max(stop, reach), dtype=np.int64)])
    slots = ends[positions + 1] - ends[positions]
    order = placing.falling(slots)
    positions, slots = positions[order], slots[order]
    costs = rules.price(slots)
    room = min(options.capacity, int(slots.sum()))
    keep = max(packs * options.capacity - aim, packs * (options.capacity // _SPARE) if rules.full else 0)
    keep -= packs * (options.capacity - room)
    wanted = positions < stop
    last = stop == len(ends) - 1
    placed = _pack(slots, costs, positions < start, wanted, rules.packer, packs, room, limit, keep, last)
    used = positions[placed >= 0]
    furthest = max(start, stop, int(used.max()) + 1)
    left = positions[(placed < 0) & (positions < furthest)]
    entries, pack_sizes, step_sizes = _arrange(positions, costs, placed, rules, width, number)
    return Window(entries, pack_sizes, step_sizes, furthest, np.sort(np.concatenate([left, later])))


def _intake(
    ends: Integers, start: int, deferred: Integers, rules: StepRules, width: int, aim: int, most: int
) -> int:
    """The position before which a window takes every entry.

    It is limited by slots, by the number of entries, and by the number of entries larger than half a pack.
    """
    options, entries = rules.options, len(ends) - 1
    packs, waiting = width * options.packs_per_step, ends[deferred + 1] - ends[deferred]
    target = int(ends[start]) + aim - int(waiting.sum())
    stop = max(int(np.searchsorted(ends, target, side="right")) - 1, start)
    tight = rules.full or aim * _TIGHT > packs * options.capacity * (_TIGHT - 1)
    if not tight and stop < entries and 2 * (target - int(ends[stop])) >= int(ends[stop + 1] - ends[stop]):
        stop += 1  # rounded to the nearest: otherwise every window takes less and the last ones take the rest
    stop = max(stop, start + width - len(deferred))
    stop = min(stop, start + most - len(deferred), entries)
    large = 2 * (ends[start + 1 : stop + 1] - ends[start:stop]) > options.capacity
    allowed = max(packs - int(np.count_nonzero(2 * waiting > options.capacity)), 0)
    beyond = np.flatnonzero(large)[allowed:]
    return start + int(beyond[0]) if len(beyond) else stop


def _pack(
    slots: Integers,
    costs: Integers,
    deferred: NDArray[np.bool_],
    wanted: NDArray[np.bool_],
    packer: Packer,
    packs: int,
    capacity: int,
    limit: int,
    keep: int,
    last: bool,
) -> Integers:
    """(entries,) pack of each entry, entries in descending order of slots; −1 = not placed.

    Deferred entries are placed first. If too many wanted slots are not placed, the packer is tried as well.
    """
    visit = np.concatenate([np.flatnonzero(deferred), np.flatnonzero(wanted & ~deferred)])
    best = placing.place(slots, costs, packs, capacity, limit, visit, wanted, keep)
    missed = int(slots[wanted & (best < 0)].sum())
    if missed * _TOLERANCE > int(slots[wanted].sum()) or (last and missed):
        found = np.full(len(slots), -1, dtype=np.int64)
        found[wanted] = packer(slots[wanted], capacity, limit)
        found[found >= packs] = -1
        placing.gather(found, slots, wanted, packs, capacity, limit, keep)
        placing.fill_empty(found, packs)
        missed_tight = int(slots[wanted & (found < 0)].sum())
        kept = not (deferred & (found < 0)).any()
        if kept and (2 * missed_tight <= missed or (last and missed_tight < missed)):
            best = found
    if packs <= _MOST_SWAPPED:
        mean = int(costs[best >= 0].sum()) // packs
        balancing.exchange(best, slots, costs, capacity, limit, packs, 1, mean + mean // _SIMILAR)
    return best


def _arrange(
    positions: Integers, costs: Integers, placed: Integers, rules: StepRules, width: int, number: int
) -> tuple[Integers, Integers, Integers]:
    """Assign the packs of a window to steps, and order the steps.

    With `group`, packs that cost more or less than the mean share steps, in descending order of cost; all other packs
    (without it, all packs) are in seeded order, or in the order of their documents.

    Returns:
        Positions, pack after pack; number of entries of each pack; number of packs of each step.
    """
    packs = width * rules.options.packs_per_step
    inside = np.flatnonzero(placed >= 0)
    inside = inside[np.argsort(placed[inside], kind="stable")]
    sizes = np.bincount(placed[inside], minlength=packs)
    used = np.flatnonzero(sizes)
    sizes = sizes[used]
    first = np.cumsum(sizes) - sizes
    cost = np.add.reduceat(costs[inside], first)
    bits = random_bits(rules.seed, rules.epoch, len(used) + width, WINDOWS, number)
    shuffled = rules.options.order == "shuffled"
    tie = bits[:-width] if shuffled else np.add.reduceat(positions[inside], first) // sizes
    if rules.options.group:
        mean = int(cost.sum()) // len(used)
        cost = np.where(np.abs(cost - mean) * _GROUPED <= mean, mean, cost)
        order = np.lexsort((tie, -cost))
    else:
        order = np.argsort(tie, kind="stable")
    width = min(width, len(used))
    bounds = np.arange(width + 1) * len(used) // width
    if shuffled:
        turns = np.argsort(bits[len(bits) - width :], kind="stable")
    else:
        turns = np.argsort(np.add.reduceat(tie[order], bounds[:-1]) // np.diff(bounds), kind="stable")
    final = np.concatenate([order[bounds[turn] : bounds[turn + 1]] for turn in turns.tolist()])
    sizes, first = sizes[final], first[final]
    starts = np.cumsum(sizes) - sizes
    entries = positions[inside[np.repeat(first - starts, sizes) + np.arange(len(inside))]]
    return entries, sizes, np.diff(bounds)[turns]


@dataclass(frozen=True, eq=False)
class Division:
    """The steps of an epoch, as flat arrays.

    Attributes:
        order: values of the sequence, pack after pack, step after step.
        pack_sizes: (packs,) number of entries of each pack.
        step_sizes: (steps,) number of packs of each step.
        left: positions in no step, ascending.
    """

    order: Integers
    pack_sizes: NDArray[Any]
    step_sizes: NDArray[Any]
    left: Integers


@dataclass(frozen=True, eq=False)
class _State:
    """Progress of `divide` between two windows."""

    made: int = 0
    placed: int = 0
    windows: int = 0
    next: int = 0
    deferred: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def divide(
    sequence: NDArray[Any],
    ends: Integers,
    rules: StepRules,
    steps: int,
    width: int,
    extend: Callable[[int, int], int],
    deferred: int = 0,
    number: int = 0,
) -> Division:
    """Divide a sequence into steps, window after window.

    Args:
        sequence: (entries,) document numbers.
        ends: (entries + 1,) cumulative sum of their slots, from 0.
        rules: options and costs.
        steps: number of steps to spread the entries over, at most the number of entries.
        width: maximum number of steps of a window.
        extend: (slots left, entries left) → number of further steps, called after the last step. With `rules.spread`
            the last window is made again together with them, so that no nearly empty step follows.
        deferred: number of entries at the front of the sequence that were deferred before.
        number: index of the first window.
    """
    state = _State(next=deferred, deferred=np.arange(deferred, dtype=np.int64), windows=number)
    last: _State | None = None  # before the last window
    order = np.empty(len(sequence), dtype=np.int64)
    pack_sizes: list[NDArray[Any]] = [np.empty(0, dtype=np.int32)]
    step_sizes: list[NDArray[Any]] = [np.empty(0, dtype=np.int32)]
    while True:
        rest = steps - state.made
        slots = int(ends[-1] - ends[state.next]) + int(
            (ends[state.deferred + 1] - ends[state.deferred]).sum()
        )
        entries = len(ends) - 1 - state.next + len(state.deferred)
        if rest == 0:
            more = min(extend(slots, entries), entries)
            if more <= 0:
                break
            steps += more
            if rules.spread and last is not None:
                state, last = last, None
                del pack_sizes[-1], step_sizes[-1]
            continue
        each = -(-rest // -(-rest // width))  # windows of even width
        aim = min(-(-slots * each // rest), each * rules.step_slots)
        most = entries - (rest - each)
        made = window(
            ends, state.next, state.deferred, rules, width=each, aim=aim, most=most, number=state.windows
        )
        placed = state.placed + len(made.entries)
        order[state.placed : placed] = sequence[made.entries]
        pack_sizes.append(made.pack_sizes.astype(np.int32))
        step_sizes.append(made.step_sizes.astype(np.int32))
        last = state
        state = _State(state.made + len(made.step_sizes), placed, state.windows + 1, made.next, made.deferred)
    left = np.concatenate([state.deferred, np.arange(state.next, len(ends) - 1, dtype=np.int64)])
    return Division(order[: state.placed], np.concatenate(pack_sizes), np.concatenate(step_sizes), left)


def divide_epoch(
    sequence: NDArray[Any], ends: Integers, rules: StepRules, steps: int | None, best_fit: Packer
) -> tuple[Division, int]:
    """Divide a sequence by the option `tail`, or into exactly `steps` steps.

    keep     the fewest steps that hold all documents, evenly filled
    drop     full steps only; leftover documents are in `Division.left`
    carry    full steps only; leftover documents begin the next epoch

    Args:
        sequence: (entries,) document numbers.
        ends: (entries + 1,) cumulative sum of their slots, from 0.
        rules: options and costs.
        steps: number of steps; None = determined by `tail`.
        best_fit: packer for a window of all steps.

    Returns:
        The steps, and the number of steps planned together.

    Raises:
        ValueError: there are more steps than documents, the documents fill no step, or the steps cannot hold all
            documents.
    """
    options, entries, slots = rules.options, len(ends) - 1, int(ends[-1])
    if steps is not None and steps > entries:
        raise ValueError(
            f"steps={steps:,} are more than there are documents ({entries:,}): every step needs one"
        )
    if options.tail != "keep":
        full = min(options.full_steps(slots, entries), entries) if steps is None else steps
        if full == 0:
            raise ValueError(
                f"tail={options.tail!r} makes full steps only, and {entries:,} documents of {slots:,} tokens"
                f" do not fill one of {options.packs_per_step} × {options.mean:,}; use tail='keep', or"
                " lower packs_per_step or capacity"
            )
        extend = options.full_steps if steps is None else _no_more
        return divide(sequence, ends, rules, full, options.window, extend), options.window
    if steps is not None:
        return _exactly(sequence, ends, rules, steps, best_fit)
    needed = min(options.needed_steps(slots, entries), entries)
    made = divide(sequence, ends, rules, needed, options.window, options.needed_steps)
    taken = len(made.step_sizes)
    if taken > needed + needed // 256:  # spread the documents evenly over the steps that they took
        del made  # one at a time: each is as large as the rest of a plan
        made = divide(sequence, ends, rules, taken, options.window, options.needed_steps)
    return made, options.window


def _no_more(slots: int, entries: int) -> int:
    """Number of further steps if the number of steps is fixed."""
    return 0


def _exactly(
    sequence: NDArray[Any], ends: Integers, rules: StepRules, steps: int, best_fit: Packer
) -> tuple[Division, int]:
    """Divide all documents into exactly `steps` steps, with wider windows if they do not fit otherwise."""
    options, entries = rules.options, len(ends) - 1
    width, needed = min(options.window, steps), min(options.needed_steps(int(ends[-1]), entries), steps)
    while width < steps:
        # Search the number of steps to spread over evenly; documents that do not fit add further steps.
        low, high, even = needed, steps, steps
        while low <= high:
            made = divide(sequence, ends, rules, even, width, options.needed_steps)
            if len(made.step_sizes) == steps:
                return made, width
            low, high = (even + 1, high) if len(made.step_sizes) < steps else (low, even - 1)
            even = (low + high) // 2
        width = min(2 * width, steps)
    made = divide(sequence, ends, replace(rules, packer=best_fit), steps, width, _no_more)
    if len(made.left) == 0:
        return made, width
    limit = options.max_documents or entries
    slots = np.sort(np.diff(ends))[::-1].copy()
    packs = int(best_fit(slots, options.capacity, limit).max()) + 1
    raise ValueError(
        f"steps={steps:,} are too few for every document: best fit needs {packs:,} packs, which is"
        f" {-(-packs // options.packs_per_step):,} steps of packs_per_step={options.packs_per_step}"
    )


def offsets_of(sizes: NDArray[Any]) -> Integers:
    """(len + 1,) int64 cumulative sum of sizes, from 0."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
