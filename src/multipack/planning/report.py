"""How good a plan is: each measure defined once.

A *meeting* is where ranks wait for each other: every micro-batch, or once a step (`sync="step"`). Over
the meetings of an epoch, with x the tokens (or the cost) that a rank brings to a meeting of W ranks:

    efficiency         Σ tokens / (steps · packs_per_step · capacity)     how full the slots are
    padding            1 − Σ tokens / (packs that ranks run · capacity)   what fixed shapes would add
    utilization        Σ x / (W · Σ max x) for x in tokens                how little ranks wait
    cost utilization   the same for x in cost                             … when attention is quadratic
    imbalance          W · max x / Σ x for x in cost                      of one meeting
    L² lag             √(max Σl² − min Σl²)                               spread of squares between ranks
    displacement       |step − place in the order|, in steps              how far documents moved
    mean-length spread √(Σ (mean − μ)² / Σ S²(1/n − 1/N)) over the steps  1 = alike as random steps of n documents

Efficiency, utilization and L² lag are multipack's own (README of multipack_sampler V2). The ratio of the
largest to the mean is what balancing papers call the degree of imbalance (Wang et al. 2025, WLB-LLM,
arXiv:2503.17924). The last row divides by the variance of the mean of n of N lengths drawn without
replacement, S² being their variance over N − 1 (Cochran 1977, Sampling Techniques, §2.4).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.advice import advise, advise_order
from multipack.planning.ceiling import kappa, least_step_cost
from multipack.planning.deal import meetings
from multipack.planning.lengths import check_integer, check_lengths
from multipack.planning.options import Sync
from multipack.planning.order import BATCHES, keys, permutation
from multipack.planning.packing import minimum_packs

if TYPE_CHECKING:
    from multipack.planning.cost import CostModel
    from multipack.planning.packing import Packs
    from multipack.planning.plan import Plan

Integers = NDArray[np.int64]

SAMPLE = 1000
"""Steps that a report deals at most, unless told otherwise."""


@dataclass(frozen=True)
class PlanReport:
    """What a plan reaches for a number of ranks."""

    data_parallel_size: int
    """Ranks that share a step."""
    sync: str
    """Where ranks meet: `micro`, `step` or `pipeline`."""
    steps: int
    """Global steps of the epoch."""
    measured_steps: int
    """Steps, evenly apart, that were dealt to measure utilization, cost, balance, lag and ceiling."""
    minimum_steps: int
    """No plan of these documents has fewer (proven)."""
    step_gap: int
    """Steps above the minimum."""
    packs: int
    """Packs of the epoch as planned."""
    minimum_packs: int
    """No packing of these documents has fewer (proven)."""
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
    split_documents: int
    """Documents that were cut or split beforehand, because they were longer than a pack."""
    efficiency: float
    """Share of slots (steps × packs_per_step × capacity) that hold tokens."""
    efficiency_but_last: float
    """The same without the last step, which may be a small one; with one step only, the same."""
    padding: float
    """Share of slots without a token, were every pack that ranks run padded to the capacity."""
    utilization: float
    """Mean over largest number of tokens of a rank, over all meetings."""
    cost_utilization: float
    """Mean over largest cost of a rank, over all meetings."""
    cost_utilization_ceiling: float
    """No arrangement of these steps' documents has a higher cost utilization (proven)."""
    ceiling_reached: float
    """Cost utilization over its ceiling."""
    imbalance_mean: float
    """Largest over mean cost of a rank, in the mean over the meetings."""
    imbalance_max: float
    """The same for the worst meeting."""
    cost_range: float
    """Mean over the meetings of (dearest − cheapest rank) / mean rank."""
    l2_lag_mean: float
    """√ of the mean over the meetings of max − min Σ l², in tokens."""
    l2_lag_max: float
    """√ of the largest max − min Σ l² of a meeting, in tokens."""
    displacement_median: float
    """Steps between a document's place in the order and where it is trained; half the documents are below."""
    displacement_p99: float
    """The same; 99 % of the documents are below."""
    displacement_max: float
    """The same for the document that moved furthest."""
    late_share: float
    """Share of documents that moved further than the window: they waited for another one."""
    mean_length_spread: float | None
    """Spread of the steps' mean lengths over that of random steps; above 1, lengths are grouped; None: one step."""
    kappa: float
    """Cost of a token of the longest document over the mean token's: limits what full packs can agree in."""
    advice: list[str]
    """Where the ceiling is low, what limits it and what would lift it; where steps differ in length, what would not."""
    step_seconds: float | None
    """Predicted seconds of a step's forward and backward passes, mean; None: the cost knows no seconds."""
    seconds: float
    """Time that planning the epoch took."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def report(
    plan: Plan,
    data_parallel_size: int = 1,
    sync: Sync = "micro",
    sample: int | None = SAMPLE,
    split_documents: int = 0,
    advised: bool = True,
) -> PlanReport:
    """Deal steps to ranks and measure what these bring to their meetings.

    Args:
        plan: any plan.
        data_parallel_size: ranks that share a step.
        sync: where ranks meet.
        sample: steps to deal at most, evenly apart; None = every step. All that needs no dealing is always
            measured over all steps.
        split_documents: documents that were cut or split before they were planned, to be told with the rest.
        advised: whether to look for what would lift a low ceiling, which takes time; else `advice` is empty.

    Raises:
        ValueError: more ranks than packs in a step, an unknown sync, a sample below 1.
    """
    world, slots = data_parallel_size, plan.slots
    costs = plan.cost_model.cost(slots)
    steps = even(plan.num_steps, plan.num_steps if sample is None else check_integer("sample", sample))
    token_loads, cost_loads, square_loads, least, predicted = _deal(plan, steps, slots, costs, world, sync)
    lags = spread(square_loads)
    planned = slots[plan.order]
    tokens, runs = int(plan.lengths[plan.order].sum()), world * plan.micro_batches(world)
    last = plan.tokens(plan.num_steps - 1)
    full = tokens - last if plan.num_steps > 1 else tokens
    packs = minimum_packs(planned, plan.capacity, plan.options.max_documents or None)
    fewest = -(-packs // plan.packs_per_step)
    reached, ceiling = utilization(cost_loads), min(1.0, int(cost_loads.sum()) / (world * least))
    moved = displacement(plan)
    imbalances, lengths_spread = imbalance(cost_loads), mean_length_spread(plan)
    advice = advise(plan, slots, costs, world, sync, ceiling) if advised else []
    advice += advise_order(plan, world, sync, reached, lengths_spread) if advised else []
    return PlanReport(
        data_parallel_size=world,
        sync=sync,
        steps=plan.num_steps,
        measured_steps=len(steps),
        minimum_steps=fewest,
        step_gap=plan.num_steps - fewest,
        packs=plan.num_packs,
        minimum_packs=packs,
        documents=plan.num_documents,
        tokens=tokens,
        dropped_documents=len(plan.dropped),
        dropped_tokens=int(plan.lengths[plan.dropped].sum()),
        carried_documents=len(plan.carried),
        split_documents=split_documents,
        efficiency=efficiency(tokens, plan.num_steps, plan.packs_per_step, plan.capacity),
        efficiency_but_last=efficiency(full, max(plan.num_steps - 1, 1), plan.packs_per_step, plan.capacity),
        padding=1 - efficiency(tokens, plan.num_steps, runs, plan.capacity),
        utilization=utilization(token_loads),
        cost_utilization=reached,
        cost_utilization_ceiling=ceiling,
        ceiling_reached=reached / ceiling,
        imbalance_mean=float(imbalances.mean()),
        imbalance_max=float(imbalances.max()),
        cost_range=float(np.mean(spread(cost_loads) * world / cost_loads.sum(axis=1).clip(1))),
        l2_lag_mean=math.sqrt(lags.mean()),
        l2_lag_max=math.sqrt(lags.max()),
        displacement_median=float(np.median(moved)),
        displacement_p99=float(np.quantile(moved, 0.99, method="inverted_cdf")),
        displacement_max=float(moved.max()),
        late_share=float(np.mean(moved > plan.options.window)),
        mean_length_spread=lengths_spread,
        kappa=kappa(planned, costs[plan.order]),
        advice=advice,
        step_seconds=predicted,
        seconds=plan.seconds,
    )


def _deal(
    plan: Plan, steps: Integers, slots: Integers, costs: Integers, world: int, sync: Sync
) -> tuple[Integers, Integers, Integers, int, float | None]:
    """What ranks bring to the meetings of these steps in tokens, cost and squares, each (meetings, ranks).

    The fourth is a lower bound on the sum of the dearest rank's cost over these meetings; the fifth the mean step's
    predicted seconds.
    """
    seconds = 0.0
    rows: list[tuple[Integers, ...]] = []
    values = slots, costs, slots * slots
    micro_batches, least = plan.micro_batches(world), 0
    for step in steps.tolist():
        dealt = plan.deal(step, world, sync)
        rows.append(tuple(meetings(dealt.totals(each), world, sync) for each in values))
        documents = dealt.order
        least += least_step_cost(
            slots[documents], costs[documents], world, micro_batches, plan.capacity, sync
        )
        seconds += predicted_seconds(plan.cost_model, slots, dealt, world, sync) or 0.0
    token_loads, cost_loads, square_loads = (np.concatenate(column) for column in zip(*rows, strict=True))
    mean_seconds = seconds / len(steps) if plan.cost_model.timed is not None else None
    return token_loads, cost_loads, square_loads, least, mean_seconds


def predicted_seconds(
    cost_model: CostModel, slots: Integers, dealt: Packs, ranks: int, sync: Sync
) -> float | None:
    """Seconds that a step's forward and backward passes should take, ranks waiting where they meet.

    Args:
        cost_model: knows seconds where it was fitted to measured times; else there is no prediction.
        slots: (documents,) of each document.
        dealt: the step's packs for all ranks.
        ranks: that share the step.
        sync: where they meet.
    """
    if cost_model.timed is None:
        return None
    each = np.array([cost_model.seconds(slots[pack]) if len(pack) else 0.0 for pack in dealt])
    return float(meetings(each, ranks, sync).max(axis=1).sum())


def even(steps: int, sample: int) -> Integers:
    """At most `sample` step numbers, evenly apart and symmetric about the middle of the epoch."""
    count = min(steps, sample)
    return (2 * np.arange(count, dtype=np.int64) + 1) * steps // (2 * count)


def efficiency(tokens: int, steps: int, packs_per_step: int, capacity: int) -> float:
    """Share of all slots that hold tokens."""
    return tokens / (steps * packs_per_step * capacity)


def utilization(loads: Integers) -> float:
    """Σ loads / (ranks · Σ over meetings of the largest load), for loads of shape (meetings, ranks)."""
    return int(loads.sum()) / (loads.shape[1] * int(loads.max(axis=1).sum()))


def imbalance(loads: Integers) -> NDArray[np.float64]:
    """(meetings,) largest over mean load, for loads of shape (meetings, ranks); 1 where nobody has any."""
    return loads.max(axis=1).clip(1) * loads.shape[1] / loads.sum(axis=1).clip(loads.shape[1])


def spread(loads: Integers) -> Integers:
    """(meetings,) largest minus smallest load, for loads of shape (meetings, ranks)."""
    return loads.max(axis=1) - loads.min(axis=1)


def minimum_steps(
    lengths: ArrayLike, capacity: int, packs_per_step: int, max_documents: int | None = None
) -> int:
    """A proven lower bound on the steps of these documents: `minimum_packs`, packs_per_step at a time."""
    return -(-minimum_packs(lengths, capacity, max_documents) // packs_per_step)


def mean_length_spread(plan: Plan) -> float | None:
    """How far the mean lengths of steps differ, over how far those of random steps as large would.

    Below 1, steps are more alike than random ones; above 1, documents of like length share steps. None where
    random steps would not differ: one step, or documents of one length.
    """
    lengths = plan.lengths[plan.order]
    first = plan.pack_offsets[plan.step_offsets[:-1]]
    sizes = np.diff(plan.pack_offsets[plan.step_offsets])
    means = np.add.reduceat(lengths, first) / sizes
    documents, mean = len(lengths), lengths.mean()
    variance = float(((lengths - mean) ** 2).sum()) / max(documents - 1, 1)
    expected = variance * float((1 / sizes - 1 / documents).sum())
    return math.sqrt(float(((means - mean) ** 2).sum()) / expected) if expected > 0 else None


def displacement(plan: Plan) -> NDArray[np.float64]:
    """(documents,) steps between each document's place in the plan's order and the middle of its step.

    The place is where the document would train if the order were simply cut into equal parts by slots (or by
    documents, where a pack may hold so few that their number decides): up to half a step is no displacement.
    """
    numbers = np.arange(len(plan.lengths), dtype=np.int64)
    own = permutation(plan.seed, plan.epoch, len(numbers)) if plan.options.order == "shuffled" else numbers
    sequence = np.concatenate([plan.carried_in, own])
    steps = np.repeat(np.arange(plan.num_steps), np.diff(plan.pack_offsets[plan.step_offsets]))
    positions = _positions(plan, sequence)
    planned = np.zeros(len(sequence), dtype=np.bool_)
    planned[positions] = True
    taken = np.flatnonzero(planned)
    limit = plan.options.max_documents
    least = plan.capacity // limit if limit else 1
    share = np.maximum(plan.slots[sequence[taken]], least)
    middle = np.cumsum(share) - share / 2
    place = np.empty(len(sequence))
    place[taken] = middle * plan.num_steps / share.sum()
    return np.abs(steps + 0.5 - place[positions])


def _positions(plan: Plan, sequence: Integers) -> Integers:
    """For each document of the plan, in plan order, its position in the sequence (first ones first)."""
    if len(sequence) == len(plan.lengths):  # nothing carried in: every document occurs once
        position_of = np.empty(len(sequence), dtype=np.int64)
        position_of[sequence] = np.arange(len(sequence))
        return position_of[plan.order]
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
    by = keys(plan.seed, plan.epoch, documents) if plan.options.order == "shuffled" else documents
    return documents[np.argsort(by, kind="stable")]
