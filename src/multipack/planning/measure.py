"""How good a plan is: each measure defined once.

A *meeting* is where ranks wait for each other: every micro-batch, or once a step (`sync="step"`). Over
the meetings of an epoch, with x the tokens (or the cost) that a rank brings to a meeting of W ranks:

    efficiency         Σ tokens / (steps · packs_per_step · capacity)     how full the slots are
    utilization        Σ x / (W · Σ max x) for x in tokens                how little ranks wait
    cost utilization   the same for x in cost                             … when attention is quadratic
    L² lag             √(max Σl² − min Σl²)                               spread of squares between ranks

Efficiency, utilization and L² lag are multipack's own (README of multipack_sampler V2).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.cost import weigh
from multipack.planning.deal import Sync, meetings
from multipack.planning.kernels import bounds
from multipack.planning.packing import check_integer, check_lengths
from multipack.planning.permutation import BATCHES, keys, permutation

if TYPE_CHECKING:
    from multipack.planning.plan import Plan

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PlanReport:
    """What a plan reaches for a number of ranks."""

    data_parallel_size: int
    """Ranks that share a step."""
    sync: str
    """Where ranks meet: `micro`, `step` or `pipeline`."""
    steps: int
    """Global steps of the epoch."""
    minimum_steps: int
    """No plan of these documents has fewer (proven)."""
    packs: int
    """Packs of the epoch as planned."""
    documents: int
    """Documents in the steps."""
    tokens: int
    """Tokens in the steps."""
    dropped_documents: int
    """Documents that the tail's policy left out."""
    dropped_tokens: int
    """Tokens of the dropped documents."""
    carried_documents: int
    """Documents left for the next epoch."""
    efficiency: float
    """Share of slots (steps × packs_per_step × capacity) that hold tokens."""
    utilization: float
    """Mean over largest number of tokens of a rank, over all meetings."""
    cost_utilization: float
    """Mean over largest cost of a rank, over all meetings."""
    cost_utilization_ceiling: float
    """No arrangement of these steps' documents has a higher cost utilization (proven)."""
    cost_range: float
    """Mean over the meetings of (dearest − cheapest rank) / mean rank."""
    l2_lag_mean: float
    """√ of the mean over the meetings of max − min Σ l², in tokens."""
    l2_lag_max: float
    """√ of the largest max − min Σ l² of a meeting, in tokens."""
    displacement_median: float
    """Steps between a document's place in the order and where it is trained; half the documents are below."""
    displacement_max: float
    """The same for the document that moved furthest."""
    seconds: float
    """Time that planning the epoch took."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def report(plan: Plan, data_parallel_size: int = 1, sync: Sync = "micro") -> PlanReport:
    """Deal every step and measure what ranks bring to their meetings."""
    world, lengths = data_parallel_size, plan.lengths
    linear, micro_batches = plan.cost_model.linear, plan.micro_batches(data_parallel_size)
    cost, squares = weigh(lengths, linear, 1), lengths * lengths
    token_rows, cost_rows, square_rows = [], [], []
    least = 0
    for step in range(plan.num_steps):
        dealt = plan.deal(step, world, sync)
        token_rows.append(meetings(dealt.totals(lengths), world, sync))
        cost_rows.append(meetings(dealt.totals(cost), world, sync))
        square_rows.append(meetings(dealt.totals(squares), world, sync))
        least += least_step_cost(lengths[dealt.order], world, micro_batches, plan.capacity, linear, sync)
    tokens, costs, lags = (
        np.concatenate(token_rows),
        np.concatenate(cost_rows),
        spread(np.concatenate(square_rows)),
    )
    moved = displacement(plan)
    planned = lengths[plan.order]
    return PlanReport(
        data_parallel_size=world,
        sync=sync,
        steps=plan.num_steps,
        minimum_steps=minimum_steps(planned, plan.capacity, plan.packs_per_step, plan.max_documents),
        packs=plan.num_packs,
        documents=plan.num_documents,
        tokens=int(planned.sum()),
        dropped_documents=len(plan.dropped),
        dropped_tokens=int(lengths[plan.dropped].sum()),
        carried_documents=len(plan.carried),
        efficiency=efficiency(int(planned.sum()), plan.num_steps, plan.packs_per_step, plan.capacity),
        utilization=utilization(tokens),
        cost_utilization=utilization(costs),
        cost_utilization_ceiling=min(1.0, int(costs.sum()) / (world * least)),
        cost_range=float(np.mean(spread(costs) * world / costs.sum(axis=1).clip(1))),
        l2_lag_mean=math.sqrt(lags.mean()),
        l2_lag_max=math.sqrt(lags.max()),
        displacement_median=float(np.median(moved)),
        displacement_max=float(moved.max()),
        seconds=plan.seconds,
    )


def efficiency(tokens: int, steps: int, packs_per_step: int, capacity: int) -> float:
    """Share of all slots that hold tokens."""
    return tokens / (steps * packs_per_step * capacity)


def utilization(loads: Integers) -> float:
    """Σ loads / (ranks · Σ over meetings of the largest load), for loads of shape (meetings, ranks)."""
    return int(loads.sum()) / (loads.shape[1] * int(loads.max(axis=1).sum()))


def spread(loads: Integers) -> Integers:
    """(meetings,) largest minus smallest load, for loads of shape (meetings, ranks)."""
    return loads.max(axis=1) - loads.min(axis=1)


def minimum_packs(lengths: ArrayLike, capacity: int, max_documents: int | None = None) -> int:
    """A proven lower bound on the packs that these documents need.

    The largest of ⌈tokens / capacity⌉, ⌈documents / max_documents⌉, and for every length a ≤ capacity / 2 the
    bound L2 of Martello and Toth (1990): documents longer than capacity − a are alone among those of
    at least a tokens, those above capacity / 2 exclude each other, and the rest of at least a tokens must
    fill what these leave.
    """
    falling = -np.sort(-check_lengths(lengths, capacity))
    total, count = int(falling.sum()), len(falling)
    bound = max(-(-total // capacity), -(-count // (max_documents or count)))
    ends = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(falling, out=ends[1:])
    rising = -falling
    half = int(np.searchsorted(rising, -(capacity // 2), side="left"))  # documents longer than capacity / 2
    least = np.unique(falling[falling <= capacity // 2])
    alone = np.searchsorted(rising, -(capacity - least), side="left")
    until = np.searchsorted(rising, -least, side="right")
    left = (half - alone) * capacity - (ends[half] - ends[alone])
    rest = np.maximum(ends[until] - ends[half] - left, 0)
    by_length = half + -(-rest // capacity)
    return max(bound, half, int(by_length.max(initial=0)))


def minimum_steps(
    lengths: ArrayLike, capacity: int, packs_per_step: int, max_documents: int | None = None
) -> int:
    """A proven lower bound on the steps of these documents: `minimum_packs`, packs_per_step at a time."""
    return -(-minimum_packs(lengths, capacity, max_documents) // packs_per_step)


def least_step_cost(
    lengths: Integers, world: int, micro_batches: int, capacity: int, linear: int, sync: Sync
) -> int:
    """A proven lower bound on the sum over a step's meetings of the dearest rank's cost.

    The dearest pack (for `step`: the dearest rank, which holds micro_batches · capacity tokens) costs at
    least `bounds.dearest_bound`. For meetings at each micro-batch: let the dearest pack cost c. Its
    micro-batch costs at most A = min(W · c, what the longest documents that fill W · capacity tokens
    cost), every other one's dearest pack costs its mean at least, so the sum is at least
    c + (total − A) / W, which does not fall with c.
    """
    falling = -np.sort(-lengths)
    if sync == "step":
        return int(bounds.dearest_bound(falling, world, micro_batches * capacity, linear, 1))
    dearest = int(bounds.dearest_bound(falling, world * micro_batches, capacity, linear, 1))
    ends = np.cumsum(falling)
    filling = min(int(np.searchsorted(ends, world * capacity)) + 1, len(falling))
    tokens = min(int(ends[-1]), world * capacity)
    largest = linear * tokens + int((falling[:filling] * (falling[:filling] + 1)).sum())
    total = int(weigh(falling, linear, 1).sum())
    return dearest + max(-(-(total - min(world * dearest, largest)) // world), 0)


def displacement(plan: Plan) -> NDArray[np.float64]:
    """(documents,) steps between each document's place in the plan's order and the middle of its step.

    The place is where the document would train if the order were simply cut into equal parts by tokens: up
    to half a step is no displacement at all.
    """
    numbers = np.arange(len(plan.lengths), dtype=np.int64)
    own = permutation(plan.seed, plan.epoch, len(numbers)) if plan.shuffled else numbers
    sequence = np.concatenate([plan.carried_in, own])
    steps = np.repeat(np.arange(plan.num_steps), np.diff(plan.pack_offsets[plan.step_offsets]))
    taken = np.sort(_positions(plan, sequence))
    middle = np.cumsum(plan.lengths[sequence[taken]]) - plan.lengths[sequence[taken]] / 2
    place = np.empty(len(sequence))
    place[taken] = middle * plan.num_steps / plan.lengths[plan.order].sum()
    return np.abs(steps + 0.5 - place[_positions(plan, sequence)])


def _positions(plan: Plan, sequence: Integers) -> Integers:
    """For each document of the plan, in plan order, its position in the sequence (first ones first)."""
    by_document = np.argsort(sequence, kind="stable")
    by_order = np.argsort(plan.order, kind="stable")
    first = np.searchsorted(sequence[by_document], plan.order[by_order])
    starts = np.searchsorted(plan.order[by_order], plan.order[by_order])
    positions = np.empty(len(plan.order), dtype=np.int64)
    positions[by_order] = by_document[first + np.arange(len(first)) - starts]
    return positions


def padded_share(lengths: ArrayLike, batch_size: int = 8, seed: int = 0) -> float:
    """Share of real tokens when random batches of `batch_size` documents are padded to their longest.

    The last batch may be smaller. This is what a conventional loader without packing computes for.
    """
    checked = check_lengths(lengths)
    size = check_integer("batch_size", batch_size)
    shuffled = checked[permutation(seed, 0, len(checked), BATCHES)]
    starts = np.arange(0, len(shuffled), size)
    rows = np.diff(np.append(starts, len(shuffled)))
    slots = int((np.maximum.reduceat(shuffled, starts) * rows).sum())
    return int(checked.sum()) / slots


def seeded_order(plan: Plan, documents: Integers) -> Integers:
    """These documents in the order in which they come in the plan's epoch."""
    by = keys(plan.seed, plan.epoch, documents) if plan.shuffled else documents
    return documents[np.argsort(by, kind="stable")]
