"""Pack documents into packs of at most `capacity` tokens.

lengths   5 3 4 2 6        capacity 8
next fit  |AAAAABBB|CCCCDD··|EEEEEE··|      in order, one open pack
best fit  |EEEEEEDD|AAAAABBB|CCCC····|      longest first, each into the smallest room that fits
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from multipack.planning.histogram import best_fit, count, simple_bound
from multipack.planning.kernels import fit as kernels
from multipack.planning.kernels.order import longest_first
from multipack.planning.lengths import Integers, Packs, check_integer, check_lengths, packs_from

__all__ = ["Method", "Packs", "pack", "packs_from"]

Method = Literal["next_fit", "first_fit_decreasing", "best_fit", "fewest"]

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it modulo 2^64 mix the documents, sorted by length, evenly."""


def pack(
    lengths: ArrayLike,
    capacity: int,
    method: Method = "best_fit",
    max_documents: int | None = None,
    time_budget: float = 10.0,
) -> Packs:
    """Put every document into a pack of at most `capacity` tokens.

    Args:
        lengths: (documents,) tokens of each document.
        capacity: most tokens of a pack.
        method: `next_fit` keeps the order of the documents. `first_fit_decreasing` and `best_fit` take the longest
            first and need at most 11/9 of the fewest packs + 6/9 (Dósa 2007); best fit is exact: always the smallest
            room that fits. `fewest` starts from best fit and searches for fewer packs and for a proof that there are
            none: see `fewest.py`. With `max_documents`, first fit replaces the last two where it needs fewer packs, in
            the documents' own order or in one that mixes lengths evenly.
        max_documents: most documents of a pack; None = no limit.
        time_budget: CPU seconds of this process after which `fewest` returns its best packing and bound so far. It is
            checked between rounds. Packs are reproducible if it is not exhausted.

    Returns:
        The packs and a proven lower bound on their number. The documents of a pack keep their order (next fit, first
        fit) or are sorted longest first, equal lengths by document number (best fit, fewest).

    Raises:
        ValueError: lengths that are not positive integers or exceed the capacity, an unknown method, limits below 1.
    """
    checked = check_lengths(lengths, capacity)
    if method not in get_args(Method):
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(get_args(Method))}")
    limit = len(checked) if max_documents is None else check_integer("max_documents", max_documents)
    limit = min(limit, len(checked))
    histogram = count(checked)
    bound = simple_bound(histogram, capacity, limit)
    if method == "next_fit":
        return replace(packs_from(*kernels.next_fit(checked, capacity, limit)), lower_bound=bound)
    by_length = longest_first(checked, small=True)
    if method == "first_fit_decreasing":
        return replace(_first_fit(checked, by_length, capacity, limit), lower_bound=bound)
    if method == "fewest":
        from multipack.planning.fewest import fewest  # imports SciPy

        if isinstance(time_budget, bool) or not 0 < float(time_budget) < float("inf"):
            raise ValueError(f"time_budget must be a finite number of seconds above 0, got {time_budget!r}")
        patterns, bound = fewest(histogram, capacity, limit, float(time_budget))
    else:
        patterns = best_fit(histogram, capacity, limit)
    best = Packs(*kernels.hand_out(by_length, histogram.counts, *patterns), bound)
    if max_documents is not None and best.gap:
        # Longest first fills packs with `limit` short documents that hold few tokens; a mixed order does not.
        steps = np.arange(len(checked), dtype=np.uint64) * np.uint64(_GOLDEN)
        for order in (by_length[np.argsort(steps)], np.arange(len(checked))):
            packs = _first_fit(checked, order, capacity, limit)
            best = replace(packs, lower_bound=bound) if len(packs) < len(best) else best
    return best


def _first_fit(lengths: Integers, order: Integers, capacity: int, limit: int) -> Packs:
    """Each document, in this order, into the first pack with room."""
    pack_of = np.empty_like(lengths)
    pack_of[order], packs = kernels.first_fit(lengths[order], capacity, limit)
    return packs_from(pack_of, packs)
