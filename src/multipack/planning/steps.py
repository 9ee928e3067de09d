"""How many steps an epoch has, and the documents cut into as many: what `tail` and `steps` ask for.

keep     as few as documents fit into; evenly full, or as many as were asked for
drop     full ones only; what is left is named
carry    full ones only; what is left opens the next epoch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.planning.epoch import Cut, Rules, cut
from multipack.planning.options import Options
from multipack.planning.packing import pack


def make_steps(
    sequence: NDArray[Any],
    ends: NDArray[np.int64],
    repeats: NDArray[np.int64] | None,
    rules: Rules,
    options: Options,
) -> tuple[Cut, int]:
    """Cut the sequence into steps as the tail's policy asks; returns them and the window that was used."""
    entries, tokens = len(ends) - 1, int(ends[-1])
    if options.steps is not None and options.steps > entries:
        raise ValueError(
            f"steps={options.steps:,} are more than there are documents ({entries:,}): every step needs one"
        )
    if options.tail != "keep":
        asked = options.steps
        steps = min(options.full_steps(tokens, entries), entries) if asked is None else asked
        if steps == 0:
            raise ValueError(
                f"tail={options.tail!r} makes full steps only, and {entries:,} documents of {tokens:,} tokens"
                f" do not fill one of {options.packs_per_step} × {options.mean:,}; use tail='keep', or"
                " lower packs_per_step or capacity"
            )
        more = options.full_steps if asked is None else _no_more
        return cut(sequence, ends, repeats, rules, steps, options.window, more, settle=False), options.window

    def evenly(steps: int, window: int) -> Cut:
        settle = repeats is None  # a block that ends before a third occurrence leaves entries over by design
        return cut(sequence, ends, repeats, rules, steps, window, options.needed_steps, settle)

    steps, window = min(options.needed_steps(tokens, entries), entries), options.window
    if options.steps is not None:
        if repeats is not None:
            made = evenly(options.steps, window)
            if len(made.step_sizes) == options.steps:
                return made, window
            raise ValueError(
                f"steps={options.steps:,} are too few: some carried documents occur three times or more and are kept"
                f" apart, which takes {len(made.step_sizes):,} steps; leave steps out, or carry each at most once"
            )
        return _exactly(evenly, ends, options, min(steps, options.steps))
    made = evenly(steps, window)
    taken = len(made.step_sizes)
    if taken > steps + steps // 256:  # spread them evenly over the steps that they took
        del made  # one at a time: each is as large as all the rest of a plan
        made = evenly(taken, window)
        if len(made.step_sizes) > taken:
            del made
            made = evenly(steps, window)
    return made, window


def _no_more(tokens: int, entries: int) -> int:
    """Further steps where their number is fixed."""
    return 0


def _exactly(
    evenly: Callable[[int, int], Cut], ends: NDArray[np.int64], options: Options, needed: int
) -> tuple[Cut, int]:
    """Every document into a given number of steps, with a wider window where they do not fit otherwise."""
    steps = options.steps or 0
    window = min(options.window, steps)
    while True:
        low, high = needed, steps  # steps to be even over; what does not fit there adds further ones
        begin = steps
        while low <= high:
            made = evenly(begin, window)
            if len(made.step_sizes) == steps:
                return made, window
            low, high = (begin + 1, high) if len(made.step_sizes) < steps else (low, begin - 1)
            begin = (low + high) // 2
        if window == steps:
            break
        window = min(2 * window, steps)
    packs = len(pack(np.diff(ends), options.capacity, "best_fit", options.max_documents))
    raise ValueError(
        f"steps={steps:,} are too few for every document: best fit needs {packs:,} packs, which is"
        f" {-(-packs // options.packs_per_step):,} steps of packs_per_step={options.packs_per_step}"
    )


def third_occurrences(sequence: NDArray[Any], opening: int) -> NDArray[np.int64] | None:
    """For each position, where its document occurred two times before, or −1; None if none occurs thrice.

    A queue of carried documents can grow beyond an epoch. Blocks stop before a document's third occurrence,
    so that no pack holds one more than twice, which `most_documents` relies on.
    """
    if opening == 0 or len(np.unique(sequence[:opening])) == opening:
        return None
    order = np.argsort(sequence, kind="stable")
    same = sequence[order[2:]] == sequence[order[:-2]]
    repeats = np.full(len(sequence), -1, dtype=np.int64)
    repeats[order[2:][same]] = order[:-2][same]
    return repeats
