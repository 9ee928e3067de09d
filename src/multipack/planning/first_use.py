"""The loops compiled before they are needed, so that a command can say what it waits for and time the rest.

Compilation takes seconds, once: numba keeps what it made in a cache folder. Small plans and packs of invented
documents, made with the settings that are wanted, compile exactly the loops that the wanted ones will use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from multipack.planning.jit import cached
from multipack.planning.kernels import balancing, bounds, fit, placing, search
from multipack.planning.level import level_tokens
from multipack.planning.options import PlanOptions, Sync
from multipack.planning.packing import Method, pack
from multipack.planning.plan import plan
from multipack.planning.report import report

_DOCUMENTS = 1500
_CAPACITY = 8192  # at most: costs of longer documents may be too large for int64
_PACKS = 8  # of a step, so that the documents make several


def compile_planner(
    options: PlanOptions,
    world_size: int = 1,
    sync: Sync = "micro",
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Compile what a plan with these settings, its dealing and its report use.

    Args:
        options: of the plan.
        world_size: ranks that steps are dealt to.
        sync: where they meet.
        announce: called first if there is no compiled code in the cache, so that this takes seconds.

    Raises:
        ValueError: a plan cannot have these settings.
    """
    if not cached(placing, balancing, bounds):
        announce()
    capacity = min(options.capacity, max(_CAPACITY, options.align))
    packs = min(options.packs_per_step, _PACKS)
    few = replace(options, capacity=capacity, packs_per_step=packs, budget=min(options.mean, capacity))
    slots = few.longest
    for lengths in (
        _lengths(slots),
        np.full(100, max(slots * 2 // 5, 1)),
    ):  # the second fill no pack: they wait
        made = plan(lengths, options=few)
        report(made, min(world_size, packs), sync)
    hard = np.array([6, 6, 5], dtype=np.int64)  # two packs of 10 cannot hold these
    level_tokens(hard, hard, 2, 10, 3)
    fit.first_fit(hard, 10, 3)  # for what waits, where it is more than a pack each


def compile_packer(
    capacity: int,
    method: Method,
    max_documents: int | None = None,
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Compile what `pack` uses; see `compile_planner`."""
    if not cached(fit, *([search] if method == "fewest" else [])):
        announce()
    pack(_lengths(capacity), capacity, method, max_documents, time_budget=1.0)


def _lengths(capacity: int) -> NDArray[np.int64]:
    """Few long documents and many short ones, as is usual, in no order: e⁻⁶ … 1 of the capacity."""
    return np.maximum(capacity * np.exp(-6 * (np.arange(_DOCUMENTS) * 0.618 % 1)), 1).astype(np.int64)
