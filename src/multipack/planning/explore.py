"""Fill, balance and randomness side by side: the same documents planned with several windows and budgets.

window   1 ──────────▶ 64      fill and balance rise, documents move further from their place
budget   C ──────────▶ less    packs may differ in tokens and agree in cost; more slots stay free
group    false ──────▶ true    long documents share steps: better balance, steps less alike
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from numpy.typing import ArrayLike

from multipack.planning.cost import CostModel
from multipack.planning.lengths import check_integer, check_lengths
from multipack.planning.options import PlanOptions, Sync
from multipack.planning.plan import plan
from multipack.planning.report import report
from multipack.shapes import ModelShape

WINDOWS = (1, 4, 16, 64)
"""Windows that are tried."""

SAMPLE = 300
"""Steps that are dealt for a row at most."""

_DEALT, _LEAST = 100_000, 8  # documents of the steps that are dealt for a row, and steps nevertheless


@dataclass(frozen=True)
class Row:
    """One choice, and what it gives. The measures are those of `PlanReport`."""

    window: int
    """Steps planned together."""
    budget: int
    """Mean tokens of a pack that are aimed at."""
    group: bool
    """Whether packs that long documents make dear share steps of a block."""
    chosen: bool
    """Whether the given settings stand for this row."""
    steps: int
    """Global steps of the epoch."""
    minimum_steps: int
    """No plan of these documents has fewer (proven)."""
    efficiency: float
    """Share of slots that hold tokens."""
    dropped_tokens: int
    """Tokens that the tail's policy left out."""
    utilization: float
    """Mean over largest number of tokens of a rank."""
    cost_utilization: float
    """Mean over largest cost of a rank."""
    cost_utilization_ceiling: float
    """No arrangement of the steps' documents has a higher one (proven)."""
    imbalance_max: float
    """Largest over mean cost of a rank at the worst meeting."""
    l2_lag_mean: float
    """√ of the mean of max − min Σ l², in tokens."""
    displacement_median: float
    """Steps between a document's place in the order and where it is trained."""
    displacement_p99: float
    """The same; 99 % of the documents are below."""
    late_share: float
    """Share of documents that moved further than the window."""
    mean_length_spread: float | None
    """Spread of the steps' mean lengths over that of random steps."""
    measured_steps: int
    """Steps that were dealt."""
    seconds: float
    """Time that planning took."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


_MEASURED = [field.name for field in fields(Row) if field.name not in ("window", "budget", "group", "chosen")]


def explore(
    lengths: ArrayLike,
    *,
    options: PlanOptions | None = None,
    world_size: int = 1,
    sync: Sync = "micro",
    windows: Sequence[int] = WINDOWS,
    budgets: Sequence[int | None] | None = None,
    groups: Sequence[bool] = (True, False),
    sample: int | None = SAMPLE,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
    seed: int = 0,
    epoch: int = 0,
    cost: CostModel | ModelShape | None = None,
    **named: Any,
) -> list[Row]:
    """Plan an epoch with every combination of window, budget and grouping.

    Args:
        lengths: (documents,) tokens of each document.
        options: as in `plan`; other options by name.
        world_size: data-parallel ranks.
        sync: where ranks meet.
        windows: steps planned together; the one in `options` is tried too.
        budgets: mean tokens of a pack, None for the capacity; the one in `options` is tried too. None for all =
            the capacity, and 15/16 of it.
        groups: values of `group`; the one in `options` is tried too.
        sample: steps to deal for a row at most; None = every step. Fewer are dealt where they have many documents,
            so that a row does not take many times as long as its plan; `measured_steps` says how many.
        progress: called with (rows done, rows in all, what comes next).
        seed: of the order.
        epoch: of the order.
        cost: of documents, as in `plan`.
        **named: options by name.

    Returns:
        Rows by budget (falling), window (rising) and grouping, one of them `chosen`. What would be the same again is
        left out, unless it is chosen: other grouping in a window of one step, and windows wider than one that
        takes in the whole epoch already.

    Raises:
        ValueError: what `plan` or `report` cannot do with one of the combinations.
    """
    given = PlanOptions.of(options, named)
    capacity = given.capacity
    checked = check_lengths(lengths, capacity)
    own = (given.window, given.mean, given.group)
    if budgets is None:
        budgets = (capacity, max(capacity * 15 // 16, 1))
    tried = sorted({own[0], *(check_integer("window", window) for window in windows)})
    aims = {own[1], *(capacity if budget is None else check_integer("budget", budget) for budget in budgets)}
    choices = [
        (window, budget, group)
        for budget in sorted(aims, reverse=True)
        for window in tried
        for group in dict.fromkeys((own[2], *groups))
        if window > 1 or group == own[2]
    ]
    rows: list[Row] = []
    whole: set[tuple[int, bool]] = set()  # of which a window has taken in the whole epoch
    for done, (window, budget, group) in enumerate(choices):
        chosen = (window, budget, group) == own
        if (budget, group) in whole and not chosen:
            continue
        progress(done, len(choices), f"window {window}, budget {budget:,}")
        made = plan(
            checked,
            options=given,
            window=window,
            budget=budget,
            group=group,
            seed=seed,
            epoch=epoch,
            cost=cost,
        )
        dealt = sample and min(sample, max(_DEALT * made.num_steps // made.num_documents, _LEAST))
        found = report(made, world_size, sync, sample=dealt, advised=False)
        measured = {name: getattr(found, name) for name in _MEASURED}
        rows.append(Row(window=window, budget=budget, group=group, chosen=chosen, **measured))
        if window >= made.num_steps:
            whole.add((budget, group))
    progress(len(choices), len(choices), "")
    return rows
