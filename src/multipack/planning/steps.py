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
from multipack.planning.options import PlanOptions
from multipack.planning.packing import pack


def make_steps(
    sequence: NDArray[Any],
    ends: NDArray[np.int64],
    rules: Rules,
    options: PlanOptions,
    asked: int | None,
) -> tuple[Cut, int]:
    """Cut the sequence into steps as the tail's policy asks; returns them and the window that was used."""
    entries, tokens = len(ends) - 1, int(ends[-1])
    if asked is not None and asked > entries:
        raise ValueError(
            f"steps={asked:,} are more than there are documents ({entries:,}): every step needs one"
        )
    if options.tail != "keep":
        steps = min(options.full_steps(tokens, entries), entries) if asked is None else asked
        if steps == 0:
            raise ValueError(
                f"tail={options.tail!r} makes full steps only, and {entries:,} documents of {tokens:,} tokens"
                f" do not fill one of {options.packs_per_step} × {options.mean:,}; use tail='keep', or"
                " lower packs_per_step or capacity"
            )
        more = options.full_steps if asked is None else _no_more
        return cut(sequence, ends, None, rules, steps, options.window, more, settle=False), options.window

    def evenly(steps: int, window: int) -> Cut:
        return cut(sequence, ends, None, rules, steps, window, options.needed_steps, settle=True)

    steps, window = min(options.needed_steps(tokens, entries), entries), options.window
    if asked is not None:
        return _exactly(evenly, ends, options, asked, min(steps, asked))
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
    evenly: Callable[[int, int], Cut],
    ends: NDArray[np.int64],
    options: PlanOptions,
    steps: int,
    needed: int,
) -> tuple[Cut, int]:
    """Every document into a given number of steps, with a wider window where they do not fit otherwise."""
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
    packs = len(pack(np.diff(ends), options.capacity, "best_fit", options.max_documents or None))
    raise ValueError(
        f"steps={steps:,} are too few for every document: best fit needs {packs:,} packs, which is"
        f" {-(-packs // options.packs_per_step):,} steps of packs_per_step={options.packs_per_step}"
    )
