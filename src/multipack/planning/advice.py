"""Which other settings would be better: advice on a low ceiling, and a table of windows, budgets and grouping.

A step whose longest document costs more than a rank's share has a low ceiling (κ: see `report.kappa`). Four changes
raise it: more tokens a rank, fewer sync points, both, or that document shared by several ranks. Each is tried on the
plan's own documents, from several places of the epoch, with the bound that the ceiling itself uses.

`explore` plans the same documents with several windows and budgets:

    window   1 ──────────▶ 64      fill and balance rise, documents move further from their place
    budget   C ──────────▶ less    packs may differ in tokens and be equal in cost; more slots stay free
    group    false ──────▶ true    long documents share steps: better balance, steps less similar
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.cost import CostModel
from multipack.planning.deal import least_step_cost
from multipack.planning.lengths import check_lengths
from multipack.planning.options import PlanOptions, Sync
from multipack.planning.plan import Plan, plan
from multipack.planning.report import PlanReport, report
from multipack.shapes import ModelShape

Integers = NDArray[np.int64]

ENOUGH = 0.99
"""No advice where the ceiling is at least this."""

WINDOWS = (1, 4, 16, 64)
"""Windows that `explore` tries."""

_PLACES = 8  # places of the epoch at which a proposal is tried
_WORTH = 0.005  # least gain of a proposal that is reported
_MARGIN = 1.05  # tokens of a rank over κ · Lmax
_ROOM = 1.1  # capacity over budget, so that packs can differ in tokens
_GROUPED = 3.0  # spread of the steps' mean lengths above which grouping is reported
_ROW_SAMPLE = 300  # steps that `explore` deals for a row at most
_ROW_DOCUMENTS, _ROW_LEAST = 100_000, 8  # documents of these steps at most, and steps at least


def advise(made: Plan, found: PlanReport) -> list[str]:
    """Sentences on what limits the balance of a plan and what would raise it; settings as the command line takes them.

    Args:
        made: any plan.
        found: its report, for a number of ranks.
    """
    sentences = _on_ceiling(made, found) if found.cost_utilization_ceiling < ENOUGH else []
    spread = found.mean_length_spread
    if spread is None or spread <= _GROUPED or made.options.order == "given" or not made.options.group:
        return sentences
    effect = "at a lower cost utilization (--explore compares both)"
    if found.data_parallel_size == 1:
        effect = "and with one rank grouping has no benefit"
    return [
        *sentences,
        f"documents of similar length share steps: mean lengths spread {spread:.1f} times as far as over random ones;"
        f" plan.group=false keeps steps random, {effect}",
    ]


def _on_ceiling(made: Plan, found: PlanReport) -> list[str]:
    """What limits the ceiling, and every change that raises it."""
    world, sync, ceiling = found.data_parallel_size, found.sync, found.cost_utilization_ceiling
    each, packs, factor = made.micro_batches(world), made.packs_per_step, found.kappa
    slots = made.slots[made.order]
    costs = made.costs(made.order)
    tokens, longest, runs = int(slots.sum()), int(slots.max()), world * each
    share = int(costs.sum()) / (made.num_steps * (world if sync == "step" else runs))
    mean = -(-tokens // (made.num_steps * runs))  # tokens of a pack that a rank runs
    sentences = [
        f"no arrangement of these steps exceeds {ceiling:.1%}: the longest document ({longest:,} tokens) costs"
        f" {int(costs.max()) / share:.2f} times a rank's mean share, and its tokens κ = {factor:.2f} times"
        " the mean token"
    ]

    def add(what: str, reached: float | None) -> None:
        if reached is not None and reached >= ceiling + _WORTH:
            sentences.append(what.format(f"raises the ceiling to {reached:.1%}"))

    if packs % world:
        what = f"plan.packs_per_step={runs} instead of {packs} (a multiple of the {world} ranks) {{}}"
        add(what, _ceiling(made, world, -(-tokens // (made.num_steps * packs)), each, sync))
    budget = round_up(_MARGIN * factor * longest)
    if budget > mean:
        capacity = round_up(_ROOM * budget)
        filled = tokens / (packs * capacity * -(-tokens // (packs * budget)))
        now = tokens / (made.num_steps * packs * made.capacity)
        what = (
            f"plan.capacity={capacity} plan.budget={budget} (packs of κ times the longest document on average;"
            f" {budget / mean:.1f} times the tokens of a step) {{}}, at a packing efficiency of {filled:.1%} instead of"
            f" {now:.1%}"
        )
        add(what, _ceiling(made, world, budget, each, sync, capacity))
    if sync != "step" and each > 1:
        what = "sync=step (ranks wait once a step: DDP, ZeRO-1/2) instead of a sync point at every micro-batch {}"
        add(what, _ceiling(made, world, mean, each, "step"))
    more = -(-budget // mean)
    if more > each:
        what = (
            f"{'sync=step ' if sync != 'step' else ''}plan.packs_per_step={world * more} instead of {packs}"
            f" ({more} micro-batches a rank; {more / each:.1f} times the tokens of a step) {{}}"
        )
        add(what, _ceiling(made, world, mean, more, "step"))
    limit = int(slots[costs <= share].max(initial=0))
    if 0 < limit < longest:  # at 0 every document costs more than a mean share: too few, not too long
        what = (
            f"context parallelism for the {np.count_nonzero(slots > limit):,} documents longer than {limit:,}"
            " tokens, each of which costs more than a rank's mean share (the longest over"
            f" {math.ceil(costs.max() / share)} ranks), {{}}"
        )
        add(what, _ceiling(made, world, mean, each, sync, share=share))
    return sentences


def _ceiling(
    made: Plan,
    world: int,
    budget: int,
    each: int,
    sync: Sync,
    capacity: int | None = None,
    share: float | None = None,
) -> float | None:
    """The ceiling with packs of `budget` tokens, `each` of them a rank; None if no such step is filled.

    Documents that cost more than `share` are divided into equal parts, as context parallelism does.
    """
    cost = least = 0
    for documents in _groups(made, budget * world * each):
        slots, costs = made.slots[documents], made.costs(documents)
        if share is not None:
            parts = np.maximum(np.ceil(costs / share), 1).astype(np.int64)
            slots, costs = np.repeat(-(-slots // parts), parts), np.repeat(costs // parts, parts)
        cost += int(costs.sum())
        least += least_step_cost(slots, costs, world, each, capacity or made.capacity, sync)
    return min(1.0, cost / (world * least)) if least else None


def _groups(made: Plan, tokens: int) -> Iterator[Integers]:
    """Document numbers that are neighbors in the plan and add up to this number of tokens, evenly spaced."""
    ends = np.cumsum(made.slots[made.order])
    free = int(ends[-1]) - tokens
    if free < 0:
        return
    places = min(_PLACES, made.num_steps)
    for place in range(places):
        first = int(np.searchsorted(ends, free * place // max(places - 1, 1), side="right"))
        last = int(np.searchsorted(ends, (int(ends[first - 1]) if first else 0) + tokens, side="right"))
        yield made.order[first : max(last, first + 1)]


def round_up(tokens: float) -> int:
    """The next number of tokens with five significant binary digits: 35,002 → 36,864."""
    whole = int(np.ceil(tokens))
    unit = 1 << max(whole.bit_length() - 5, 0)
    return -(-whole // unit) * unit


@dataclass(frozen=True)
class Choice:
    """One combination of settings, and the report of its plan."""

    window: int  # steps planned together
    budget: int  # mean tokens of a pack
    group: bool  # whether packs with costly long documents share steps of a window
    chosen: bool  # whether this is the combination of the given settings
    report: PlanReport  # what it reaches

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        row = asdict(self)
        return {**row.pop("report"), **row}


def explore(
    lengths: ArrayLike,
    *,
    options: PlanOptions | None = None,
    world_size: int = 1,
    sync: Sync = "micro",
    sample: int | None = _ROW_SAMPLE,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
    seed: int = 0,
    epoch: int = 0,
    cost: CostModel | ModelShape | None = None,
    **named: Any,
) -> list[Choice]:
    """Plan an epoch with several windows, with the capacity and 15/16 of it as budgets, with and without grouping.

    Args:
        lengths: (documents,) tokens of each document.
        options: as in `plan`; its window, budget and group are tried too.
        world_size: number of data-parallel ranks.
        sync: where ranks wait for each other.
        sample: maximum number of steps to deal for a row; None = every step. Fewer are dealt where they have many
            documents.
        progress: called with (rows done, rows in all, the next row).
        seed: seed of the order.
        epoch: epoch of the order.
        cost: cost of documents, as in `plan`.
        **named: options by name.

    Returns:
        Rows by budget (falling), window (rising) and grouping, one of them `chosen`. Repetitions are left out, unless
        chosen: other grouping in a window of one step, and windows wider than one that covers the whole epoch.

    Raises:
        ValueError: an option is invalid, or a plan or its report is impossible for one of the rows.
    """
    given = PlanOptions.of(options, named)
    checked = check_lengths(lengths, given.capacity)
    own = (given.window, given.mean, given.group)
    choices = [
        (window, budget, group)
        for budget in sorted({given.mean, given.capacity, max(given.capacity * 15 // 16, 1)}, reverse=True)
        for window in sorted({given.window, *WINDOWS})
        for group in (True, False)
        if window > 1 or group == given.group
    ]
    rows: list[Choice] = []
    complete: set[tuple[int, bool]] = set()  # (budget, group) for which a window has covered the whole epoch
    for done, (window, budget, group) in enumerate(choices):
        chosen = (window, budget, group) == own
        if (budget, group) in complete and not chosen:
            continue
        progress(done, len(choices), f"window {window}, budget {budget:,}")
        changed = replace(given, window=window, budget=budget, group=group)
        made = plan(checked, options=changed, seed=seed, epoch=epoch, cost=cost)
        dealt = sample and min(sample, max(_ROW_DOCUMENTS * made.num_steps // made.num_documents, _ROW_LEAST))
        rows.append(Choice(window, budget, group, chosen, report(made, world_size, sync, sample=dealt)))
        if window >= made.num_steps:
            complete.add((budget, group))
    progress(len(choices), len(choices), "")
    return rows
