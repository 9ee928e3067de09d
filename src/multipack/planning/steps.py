"""Divide documents into global steps: the seeded order, one window of steps, and an epoch of windows.

    sequence   a b c d e f g h i j k l m n o p …        seeded order, or the given order
    windows    |───── window steps ─────|─────          an even share of the remaining slots
    packs      |aeh| |bcm| |dfk| |gij| …                longest first, each into the pack of least cost
    steps      packs of similar cost, `packs_per_step` at a time; the steps of a window in seeded order
    deferred   documents that do not fit are placed first in the next window

`divide` makes all steps, window after window: of the sequence of an epoch, or of the queue of a `PackStream`. They do
not depend on the number of ranks. An *entry* is a position in the sequence: a document that occurs twice (carried from
the last epoch, and in its own place) has two entries.

No two documents longer than half a pack fit into one pack. A window takes at most as many of them as it has packs, so
that few documents are deferred and all of these fit into the next window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.kernels import balancing, fit, placing
from multipack.planning.kernels.order import longest_first
from multipack.planning.lengths import Integers, Packs, offsets_of
from multipack.planning.options import PlanOptions

DOCUMENTS, WINDOWS, BATCHES = 0, 1, 2
"""Streams of random bits: for the order of documents, for the order within a window, and for random batches."""

AHEAD = 96
"""Maximum number of documents after a window that may fill its gaps; documents passed over are deferred (`_Window`).

With 24 or 400, OpenChat, Natural Instructions and SQuAD take as many steps.
"""

# Measured: OpenChat in packs of 16,384 for 8 ranks, and 8,000 lengths of lognormal (6.5, 1.5) in packs of this size.
# Windows filled beyond 63/64 consider documents after them; at 15/16 lognormal lengths wait 7 steps, not 3.
_TIGHT = 64
# Full packs keep 1/4096 of their slots free on average, so that ranks can be balanced: OpenChat in packs of 32,768 with
# balance=joint, tail=drop and window=1 has an L² lag (see deal.py) of 85, without free slots 1,419; at 1/512
# it drops 18 % more.
_SPARE = 4096
_TOLERANCE = 500  # first fit, which moves documents further, is tried if over 1/500 of slots is not placed
_MOST_BALANCED = 1024  # windows with more packs are not balanced: steps average over enough packs
# Balancing ends within 1/1024 of the mean cost: OpenChat loses 2.7e-4 of its cost utilization; at 1/128 3.4e-4.
_SIMILAR = 1024
# See `balancing.Exchanges`; attempts for each pack. Smaller ones lose 2e-5.
_HALF, _ATTEMPTS, _FAILURES = 5, 4, 6
_TRIES = 4  # numbers of steps that an epoch is spread over: SQuAD takes 1,167 steps with window=64, spread once 1,211
_GROUPED = 8192  # packs within 1/8192 of the mean cost may be in any step; at 1/256 OpenChat loses 3.4e-4


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


@dataclass(frozen=True, eq=False)
class StepRules:
    """Settings shared by all windows of an epoch or a stream."""

    options: PlanOptions
    # positions and their slots → costs that packs are balanced in
    price: Callable[[Integers, Integers], Integers]
    seed: int
    epoch: int
    fills_evenly: bool  # whether steps share the slots evenly; otherwise each is filled as much as possible


@dataclass(frozen=True, eq=False)
class Division:
    """Steps made from the beginning of a sequence."""

    entries: NDArray[Any]  # positions in the sequence, pack after pack, step after step; unsigned integers
    pack_sizes: NDArray[Any]  # (packs,) number of entries of each pack
    step_sizes: NDArray[Any]  # (steps,) number of packs of each step
    next: int  # first position that was not considered
    deferred: Integers  # positions before `next` in no step, ascending
    width: int  # maximum number of steps planned together

    @cached_property
    def pack_offsets(self) -> Integers:
        """(packs + 1,) start of each pack in `entries`."""
        return offsets_of(self.pack_sizes)

    @cached_property
    def step_offsets(self) -> Integers:
        """(steps + 1,) index of the first pack of each step."""
        return offsets_of(self.step_sizes)

    def packs(self, step: int) -> Packs:
        """The packs of a step, as positions in the sequence."""
        bounds = self.pack_offsets[self.step_offsets[step] : self.step_offsets[step + 1] + 1]
        return Packs(self.entries[bounds[0] : bounds[-1]], bounds - bounds[0])

    def left(self, entries: int) -> Integers:
        """Positions in no step, ascending, of a sequence of this many entries."""
        return np.concatenate([self.deferred, np.arange(self.next, entries, dtype=np.int64)])


Extend = Callable[[int, int], int] | None
"""(slots left, entries left) → number of further steps; None = no further ones."""


def divide(
    ends: Integers,
    rules: StepRules,
    steps: int,
    extend: Extend,
    *,
    width: int,
    deferred: int = 0,
    number: int = 0,
) -> Division:
    """Divide a sequence into steps, window after window.

    Args:
        ends: (entries + 1,) cumulative sum of the slots of the sequence, from 0.
        rules: options and costs.
        steps: number of steps to spread the entries over, at most the number of entries.
        extend: called after the last step for the number of further ones. With `rules.fills_evenly`
            the last window is made again together with them, so that no nearly empty step follows.
        width: maximum number of steps of a window.
        deferred: number of entries at the front of the sequence that were deferred before.
        number: index of the first window.
    """
    entries, made = len(ends) - 1, 0
    nothing = np.empty(0, dtype=np.int64)
    windows = [Division(nothing, nothing, nothing, deferred, np.arange(deferred, dtype=np.int64), 0)]
    while True:
        last = windows[-1]
        slots = int(ends[-1] - ends[last.next]) + int((ends[last.deferred + 1] - ends[last.deferred]).sum())
        count, rest = entries - last.next + len(last.deferred), steps - made
        if rest == 0:
            more = min(extend(slots, count), count) if extend else 0
            if more <= 0:
                break
            steps += more
            if rules.fills_evenly and len(windows) > 1:
                made -= len(windows.pop().step_sizes)
            continue
        each = -(-rest // -(-rest // width))  # windows of even width
        step_slots = rules.options.packs_per_step * (
            rules.options.capacity if rules.fills_evenly else rules.options.mean
        )
        aim = min(-(-slots * each // rest), each * step_slots)
        # The steps after this window keep a document for each pack, or one each if there are fewer.
        enough = count >= rest * rules.options.packs_per_step
        most = count - (rest - each) * (rules.options.packs_per_step if enough else 1)
        index = number + len(windows) - 1
        windows.append(_Window(ends, rules, last.next, last.deferred, each, aim, most, index).divide())
        made += len(windows[-1].step_sizes)
    return Division(
        np.concatenate([window.entries for window in windows]),
        np.concatenate([window.pack_sizes for window in windows]),
        np.concatenate([window.step_sizes for window in windows]),
        last.next,
        last.deferred,
        width,
    )


@dataclass(frozen=True, eq=False)
class _Window:
    """Steps that are planned together: `width` of them, fewer if there are fewer entries."""

    ends: Integers  # (entries + 1,) cumulative sum of the slots of the sequence, from 0
    rules: StepRules
    start: int  # first position that no window has considered
    deferred: Integers  # positions before `start` without a pack, ascending
    width: int  # number of steps
    aim: int  # number of slots to place
    most: int  # maximum number of entries to place
    number: int  # index of the window, which with seed and epoch determines its random numbers

    @property
    def packs(self) -> int:
        """Number of packs of all steps."""
        return self.width * self.rules.options.packs_per_step

    @property
    def limit(self) -> int:
        """Maximum number of entries of a pack."""
        return self.rules.options.max_documents or len(self.ends)

    def divide(self) -> Division:
        """The steps, and what is left after them."""
        ends, start, options = self.ends, self.start, self.rules.options
        most = min(self.most, self.packs * self.limit)
        taken, later = self.deferred[:most], self.deferred[most:]
        full = not self.rules.fills_evenly and options.mean == options.capacity
        aim = self.aim - (self.packs * (options.capacity // _SPARE) if full else 0)
        tight = full or aim * _TIGHT > self.packs * options.capacity * (_TIGHT - 1)
        stop = self._stop(ends[taken + 1] - ends[taken], aim, most, tight)
        reach = stop
        if tight and len(later) == 0:
            # A window of one step may defer a document twice.
            ahead = aim * (3 if self.width == 1 else 2) // 4
            near = int(np.searchsorted(ends, ends[stop] + ahead, side="right")) - 1
            reach = min(stop + AHEAD, start + most - len(taken), max(near, stop))
        positions = np.concatenate([taken, np.arange(start, reach, dtype=np.int64)])
        slots = ends[positions + 1] - ends[positions]
        order = longest_first(slots)
        positions, slots = positions[order], slots[order]
        costs = self.rules.price(positions, slots)
        placed = self._pack(positions, slots, costs, stop, aim)
        furthest = max(stop, int(positions[placed >= 0].max()) + 1)
        left = positions[(placed < 0) & (positions < furthest)]
        entries, pack_sizes, step_sizes = self._arrange(positions, costs, placed)
        entries = entries.astype(np.min_scalar_type(len(ends)))  # these arrays are as long as an epoch
        left = np.sort(np.concatenate([left, later]))
        return Division(entries, pack_sizes, step_sizes, furthest, left, self.width)

    def _stop(self, waiting: Integers, aim: int, most: int, tight: bool) -> int:
        """The position before which the window takes every entry, besides deferred ones of `waiting` slots.

        It is limited by slots, by the number of entries, and by the number of entries larger than half a pack.
        """
        ends, start, packs, capacity = self.ends, self.start, self.packs, self.rules.options.capacity
        entries, target = len(ends) - 1, int(ends[start]) + aim - int(waiting.sum())
        stop = max(int(np.searchsorted(ends, target, side="right")) - 1, start)
        if (
            not tight
            and stop < entries
            and 2 * (target - int(ends[stop])) >= int(ends[stop + 1] - ends[stop])
        ):
            stop += (
                1  # rounded to the nearest: otherwise every window takes less and the last ones take the rest
            )
        stop = max(stop, start + min(packs, most) - len(waiting))  # so that no pack stays empty
        stop = min(stop, start + most - len(waiting), entries)
        large = 2 * (ends[start + 1 : stop + 1] - ends[start:stop]) > capacity
        allowed = max(packs - int(np.count_nonzero(2 * waiting > capacity)), 0)
        beyond = np.flatnonzero(large)[allowed:]
        return start + int(beyond[0]) if len(beyond) else stop

    def _pack(self, positions: Integers, slots: Integers, costs: Integers, stop: int, aim: int) -> Integers:
        """(entries,) pack of each entry, entries in descending order of slots; −1 = not placed.

        Deferred entries are placed first. Entries from `stop` on, beyond the window, only fill gaps, while more slots
        of all packs are free than `aim` leaves. If too many slots before `stop` are not placed (in the last window:
        any), first fit is tried as well.
        """
        packs, limit, capacity = self.packs, self.limit, min(self.rules.options.capacity, int(slots.sum()))
        deferred, wanted, spare = positions < self.start, positions < stop, packs * capacity - aim
        visit = np.concatenate([np.flatnonzero(deferred), np.flatnonzero(wanted & ~deferred)])
        best = placing.place_documents(slots, costs, packs, capacity, limit, visit, spare)
        missed, last = int(slots[wanted & (best < 0)].sum()), stop == len(self.ends) - 1
        if missed * _TOLERANCE > int(slots[wanted].sum()) or (last and missed):
            found = np.full(len(slots), -1, dtype=np.int64)
            found[wanted] = fit.first_fit(slots[wanted], capacity, limit)[0]
            found[found >= packs] = -1
            balancing.gather(found, slots, packs, capacity, limit, spare)
            placing.fill_empty(found, packs)
            still = int(slots[wanted & (found < 0)].sum())
            fewer = still < missed if last else 2 * still <= missed
            if fewer and not (deferred & (found < 0)).any():
                best = found
        if 1 < packs <= _MOST_BALANCED:
            excess = int(costs[best >= 0].sum()) // packs // _SIMILAR
            loads = np.stack([costs, np.zeros_like(costs)])
            limits = balancing.PackLimits(capacity, limit, packs, 1)
            search = balancing.Exchanges(_HALF, _ATTEMPTS * packs, _FAILURES, excess)
            balancing.even_out(best, slots, loads, limits, search)
        return best

    def _arrange(
        self, positions: Integers, costs: Integers, placed: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Assign the packs to steps, and order the steps.

        With `group`, packs that cost more or less than the mean share steps, in descending order of cost; all other
        packs (without it, all packs) are in seeded order, or in the order of their documents.

        Returns:
            Positions, pack after pack; number of entries of each pack; number of packs of each step.
        """
        rules, packs, shuffled = self.rules, self.packs, self.rules.options.order == "shuffled"
        inside = np.flatnonzero(placed >= 0)
        pack_of = placed[inside]
        sizes = np.bincount(pack_of, minlength=packs)
        used = np.flatnonzero(sizes)
        bits = random_bits(rules.seed, rules.epoch, len(used) + self.width, WINDOWS, self.number)
        tie = bits[: -self.width] if shuffled else placing.sums(placed, positions, packs)[used] // sizes[used]
        order = np.argsort(tie, kind="stable")
        if rules.options.group:
            cost = placing.sums(placed, costs, packs)[used]
            mean = int(cost.sum()) // len(used)
            cost = np.where(np.abs(cost - mean) * _GROUPED <= mean, mean, cost)
            order = np.lexsort((tie, -cost))
        width = min(self.width, len(used))
        # Every step has all its packs; if documents are too few for that, the last ones lack some.
        bounds = np.arange(width + 1)
        bounds = np.minimum(bounds * rules.options.packs_per_step, len(used) - width + bounds)
        turns = np.arange(width)
        if len(used) == packs:
            places = bits[-width:] if shuffled else np.add.reduceat(tie[order], bounds[:-1])
            turns = np.argsort(places, kind="stable")
        final = used[np.concatenate([order[bounds[turn] : bounds[turn + 1]] for turn in turns.tolist()])]
        turn_of = np.empty(packs, dtype=np.min_scalar_type(packs))  # numpy sorts 16 bits by counting
        turn_of[final] = np.arange(len(final))
        entries = positions[inside[np.argsort(turn_of[pack_of], kind="stable")]]
        return entries, sizes[final], np.diff(bounds)[turns]


def divide_epoch(ends: Integers, rules: StepRules, steps: int | None) -> Division:
    """Divide a sequence by the option `tail`, or into exactly `steps` steps.

    keep     few steps that hold all documents, evenly filled
    drop     full steps only; documents are left over
    carry    full steps only; documents left over begin the next epoch

    Raises:
        ValueError: there are more steps than documents, the documents fill no step, or the steps cannot hold all
            documents.
    """
    entries = len(ends) - 1
    if steps is not None and steps > entries:
        raise ValueError(
            f"steps={steps:,} are more than there are documents ({entries:,}): every step needs one"
        )
    if rules.options.tail != "keep":
        return _full_steps(ends, rules, steps)
    return _few_steps(ends, rules) if steps is None else _given_steps(ends, rules, steps)


def _full_steps(ends: Integers, rules: StepRules, steps: int | None) -> Division:
    """Full steps only, at most `steps` of them."""
    options, entries, slots = rules.options, len(ends) - 1, int(ends[-1])
    extend = options.full_steps if steps is None else None
    steps = steps or min(options.full_steps(slots, entries), entries)
    if steps == 0:
        raise ValueError(
            f"tail={options.tail!r} makes full steps only, and {entries:,} documents of {slots:,} tokens"
            f" do not fill one of {options.packs_per_step} × {options.mean:,}; use tail='keep', or"
            " lower packs_per_step or capacity"
        )
    return divide(ends, rules, steps, extend, width=options.window)


def _few_steps(ends: Integers, rules: StepRules) -> Division:
    """Few steps that hold all documents.

    Documents are first spread over the steps that their tokens fill. If that takes more steps, because they cannot fill
    packs, they are spread over a number halfway, and so on.
    """
    needed_steps, entries = rules.options.needed_steps, len(ends) - 1
    spread_over = min(needed_steps(int(ends[-1]), entries), entries)
    tried = list[Division]()
    for _ in range(_TRIES):
        tried.append(divide(ends, rules, spread_over, needed_steps, width=rules.options.window))
        taken = len(tried[-1].step_sizes)
        if taken <= spread_over + spread_over // 256:
            break
        spread_over = (spread_over + taken + 1) // 2
    return min(reversed(tried), key=lambda division: len(division.step_sizes))


def _given_steps(ends: Integers, rules: StepRules, steps: int) -> Division:
    """Exactly `steps` steps that hold all documents: windows become wider until all of them fit."""
    options, entries = rules.options, len(ends) - 1
    width, needed = min(options.window, steps), min(options.needed_steps(int(ends[-1]), entries), steps)
    while width < steps:
        # Search the number of steps to spread over evenly; documents that do not fit add further steps.
        low, high, spread_over = needed, steps, steps
        while low <= high:
            division = divide(ends, rules, spread_over, options.needed_steps, width=width)
            made = len(division.step_sizes)
            if made == steps:
                return division
            low, high = (spread_over + 1, high) if made < steps else (low, spread_over - 1)
            spread_over = (low + high) // 2
        width = min(2 * width, steps)
    division = divide(ends, rules, steps, None, width=steps)
    if len(division.left(entries)):
        falling = -np.sort(-np.diff(ends))
        packs = fit.first_fit(falling, options.capacity, options.max_documents or entries)[1]
        raise ValueError(
            f"steps={steps:,} are too few for every document: first fit needs {packs:,} packs, which is"
            f" {-(-packs // options.packs_per_step):,} steps of packs_per_step={options.packs_per_step}"
        )
    return division
