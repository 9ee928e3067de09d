"""`report`: measures of a plan's packing, balance and randomness.

Ranks wait for each other at *sync points*: every micro-batch, or once per step (`sync="step"`). `PlanReport` says what
each measure is, with x the tokens (or the cost) of a rank between two sync points of the epoch, and W ranks.

Efficiency, utilization and L² lag are multipack's own (README of multipack_sampler V2). The ratio of the largest to the
mean is what balancing papers call the degree of imbalance (Wang et al. 2025, WLB-LLM, arXiv:2503.17924). The *ceiling*
is a proven upper bound on the cost utilization for the given documents of each step; another plan with other steps may
have another ceiling.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.deal import least_step_cost, rank_loads
from multipack.planning.lengths import Integers, Packs, check_integer, check_lengths
from multipack.planning.options import Sync
from multipack.planning.plan import Plan
from multipack.planning.steps import BATCHES, permutation

SAMPLE = 1000
"""Default maximum number of steps that a report assigns to ranks."""


@dataclass(frozen=True)
class PlanReport:
    """Measures of a plan's packing, balance and randomness for a number of ranks."""

    data_parallel_size: int
    """Number of ranks that share a step."""
    sync: Sync
    """Where ranks wait for each other: `micro` or `step`."""
    steps: int
    """Number of global steps of the epoch."""
    measured_steps: int
    """Number of evenly spaced steps in which utilization, cost, balance, lag and ceiling were measured."""
    minimum_steps: int
    """Proven lower bound on the number of steps of any plan of these documents."""
    packs: int
    """Number of packs of the epoch as planned."""
    minimum_packs: int
    """Proven lower bound on the number of packs of these documents."""
    documents: int
    """Number of documents in the steps."""
    tokens: int
    """Number of tokens in the steps."""
    dropped_documents: int
    """Number of documents dropped by `tail="drop"`."""
    dropped_tokens: int
    """Number of tokens of the dropped documents."""
    carried_documents: int
    """Number of documents left for the next epoch."""
    slots: int
    """Number of slots that the documents in the steps take: their tokens, each common beginning of an item once."""
    minimum_slots: int
    """Proven lower bound on the slots of any packs of these documents."""
    efficiency: float
    """Tokens over slots (steps × packs_per_step × capacity); above 1 where documents share beginnings."""
    efficiency_but_last: float
    """Efficiency without the last step, which may be small; of all steps if there is only one."""
    padding: float
    """Share of slots without a token if every pack that ranks run were padded to the capacity."""
    utilization: float
    """Mean over maximum tokens of a rank, over all sync points: Σ x / (W · Σ max x)."""
    cost_utilization: float
    """The same for cost."""
    cost_utilization_ceiling: float
    """Proven upper bound on the cost utilization of these steps' documents."""
    ceiling_reached: float
    """Cost utilization over its ceiling."""
    imbalance_mean: float
    """Maximum over mean cost of a rank, W · max x / Σ x, averaged over the sync points."""
    imbalance_max: float
    """The same at the worst sync point."""
    l2_lag_mean: float
    """√ of the mean over the sync points of max − min Σ l², in tokens."""
    l2_lag_max: float
    """√ of the largest max − min Σ l² of a sync point, in tokens."""
    displacement_median: float
    """Median number of steps between a document's place in the order and its step."""
    displacement_p99: float
    """99th percentile of that number of steps."""
    displacement_max: float
    """Maximum of that number of steps."""
    longest_wait: int
    """Maximum number of steps between the first step with a later document and a document's own step."""
    mean_length_spread: float | None
    """See the function `mean_length_spread`."""
    kappa: float
    """See the function `kappa`."""
    seconds: float
    """Time that planning the epoch took, in seconds."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def report(
    made: Plan,
    data_parallel_size: int = 1,
    sync: Sync = "micro",
    sample: int | None = SAMPLE,
) -> PlanReport:
    """Measure a plan for a number of ranks.

    Args:
        made: the plan.
        data_parallel_size: number of ranks that share a step.
        sync: where ranks wait for each other.
        sample: maximum number of evenly spaced steps to assign to ranks; None = every step. Measures that do not
            depend on ranks are computed over all steps.

    Raises:
        ValueError: there are more ranks than packs in a step, `sync` is unknown, or `sample` is below 1.
    """
    world, order, count = data_parallel_size, made.order, made.num_steps
    steps = evenly_spaced(count, count if sample is None else check_integer("sample", sample))
    planned, moved = made.slots[order], displacement(made)
    tokens, slots = int(made.lengths[made.document_order].sum()), int(planned.sum())
    last = made.tokens(count - 1) if count > 1 else 0
    least, packs = made.items.least(order, made.options)
    return PlanReport(
        data_parallel_size=world,
        sync=sync,
        steps=count,
        measured_steps=len(steps),
        minimum_steps=-(-packs // made.packs_per_step),
        packs=made.num_packs,
        minimum_packs=packs,
        documents=made.num_documents,
        tokens=tokens,
        dropped_documents=len(made.dropped),
        dropped_tokens=int(made.lengths[made.dropped].sum()),
        carried_documents=len(made.carried),
        slots=slots,
        minimum_slots=least,
        efficiency=efficiency(tokens, count, made.packs_per_step, made.capacity),
        efficiency_but_last=efficiency(tokens - last, max(count - 1, 1), made.packs_per_step, made.capacity),
        padding=1 - efficiency(min(tokens, slots), count, world * made.micro_batches(world), made.capacity),
        displacement_median=float(np.median(moved)),
        displacement_p99=float(np.quantile(moved, 0.99, method="inverted_cdf")),
        displacement_max=float(moved.max()),
        longest_wait=longest_wait(made),
        mean_length_spread=mean_length_spread(made),
        kappa=kappa(planned, made.costs(order)),
        seconds=made.seconds,
        **_of_ranks(made, steps, world, sync),
    )


def _of_ranks(made: Plan, steps: Integers, ranks: int, sync: Sync) -> dict[str, Any]:
    """The fields of a report that depend on the assignment to ranks, measured over these steps."""
    slots, costs = made.slots, made.costs(np.arange(len(made.slots)))
    rows: list[tuple[Integers, ...]] = []
    micro_batches, least = made.micro_batches(ranks), 0
    for step in steps.tolist():
        dealt = made.deal(step, ranks, sync)
        rows.append(
            tuple(rank_loads(dealt.totals(each), ranks, sync) for each in (slots, costs, slots * slots))
        )
        inside = dealt.order
        least += least_step_cost(slots[inside], costs[inside], ranks, micro_batches, made.capacity, sync)
    tokens, cost, squares = (np.concatenate(column) for column in zip(*rows, strict=True))
    reached, ceiling = utilization(cost), min(1.0, int(cost.sum()) / (ranks * least))
    imbalance = cost.max(axis=1) * ranks / cost.sum(axis=1).clip(1)
    return {
        "utilization": utilization(tokens),
        "cost_utilization": reached,
        "cost_utilization_ceiling": ceiling,
        "ceiling_reached": reached / ceiling,
        "imbalance_mean": float(imbalance.clip(1).mean()),
        "imbalance_max": float(imbalance.clip(1).max()),
        "l2_lag_mean": math.sqrt(spread(squares).mean()),
        "l2_lag_max": math.sqrt(spread(squares).max()),
    }


def kappa(lengths: Integers, costs: Integers) -> float:
    """κ: the cost per token of the longest document over the mean cost of a token.

    For cost(l) = L*·l + l(l+1) that is (L* + Lmax) / (L* + Σl²/Σl), but for the 1 of l + 1. Where every step has
    such a document and packs are full, no arrangement has a higher cost utilization than 1 / κ; with packs
    of κ · Lmax tokens on average the other packs can reach its cost.
    """
    longest = int(np.argmax(lengths))
    return int(costs[longest]) / int(lengths[longest]) / (int(costs.sum()) / int(lengths.sum()))


def evenly_spaced(steps: int, sample: int) -> Integers:
    """At most `sample` step numbers, evenly spaced and symmetric about the middle of the epoch."""
    count = min(steps, sample)
    return (2 * np.arange(count, dtype=np.int64) + 1) * steps // (2 * count)


def efficiency(tokens: int, steps: int, packs_per_step: int, capacity: int) -> float:
    """Share of all slots that hold tokens."""
    return tokens / (steps * packs_per_step * capacity)


def utilization(loads: Integers) -> float:
    """Σ loads / (ranks · Σ over sync points of the largest load), for loads of shape (sync points, ranks)."""
    return int(loads.sum()) / (loads.shape[1] * int(loads.max(axis=1).sum()))


def spread(loads: Integers) -> Integers:
    """(sync points,) largest minus smallest load, for loads of shape (sync points, ranks)."""
    return loads.max(axis=1) - loads.min(axis=1)


def mean_length_spread(plan: Plan) -> float | None:
    """Standard deviation of the steps' mean lengths, relative to random steps of the same sizes.

    √(Σ (mean − μ)² / Σ S²(1/n − 1/N)) over the steps: the variance of the mean of n of N lengths drawn without
    replacement, S² being their variance over N − 1 (Cochran 1977, Sampling Techniques, §2.4). Below 1, steps are more
    similar than random ones; above 1, documents of similar length share steps. None where random steps would not
    differ: one step, or documents of one length.
    """
    lengths = plan.lengths[plan.document_order]
    bounds = _bounds(plan)
    first, sizes = bounds[:-1], np.diff(bounds)
    means = np.add.reduceat(lengths, first) / sizes
    documents, mean = len(lengths), lengths.mean()
    variance = float(((lengths - mean) ** 2).sum()) / max(documents - 1, 1)
    expected = variance * float((1 / sizes - 1 / documents).sum())
    return math.sqrt(float(((means - mean) ** 2).sum()) / expected) if expected > 0 else None


def displacement(plan: Plan) -> NDArray[np.float64]:
    """(documents,) steps between each document's place in the plan's order and the middle of its step.

    The place is where the document would train if the order were divided into equal parts by slots (or by documents, if
    `max_documents` limits packs). A document in its own step is up to half a step away.
    """
    limit, steps = plan.options.max_documents, np.repeat(np.arange(plan.num_steps), np.diff(_bounds(plan)))
    sizes = plan.lengths[plan.document_order]
    by_place = np.argsort(plan.items.places(plan.division.entries))
    share = np.maximum(sizes[by_place], plan.capacity // limit if limit else 1)
    place = np.empty(len(share))
    place[by_place] = (np.cumsum(share) - share / 2) * plan.num_steps / share.sum()
    return np.abs(steps + 0.5 - place)


def longest_wait(plan: Plan) -> int:
    """Maximum number of steps between the first step with the same or a later document and a document's own step."""
    positions, starts = plan.division.entries, plan.pack_offsets[plan.step_offsets]
    latest = np.maximum.accumulate(np.maximum.reduceat(positions, starts[:-1]))
    steps = np.repeat(np.arange(plan.num_steps), np.diff(starts))
    return int((steps - np.searchsorted(latest, positions)).max())


def _bounds(plan: Plan) -> Integers:
    """(steps + 1,) start of each step in `document_order`."""
    return plan.of_documents(Packs(plan.order, plan.pack_offsets)).offsets[plan.step_offsets]


PADDED_BATCH_SIZE = 8
"""Documents in a padded batch, with which packs are compared."""


def padded_share(lengths: ArrayLike, batch_size: int = PADDED_BATCH_SIZE, seed: int = 0) -> float:
    """Share of real tokens when random batches of `batch_size` documents are padded to their longest.

    The last batch may be smaller. This is the efficiency of a conventional loader without packing.
    """
    checked = check_lengths(lengths)
    size = check_integer("batch_size", batch_size)
    shuffled = checked[permutation(seed, 0, len(checked), BATCHES)]
    starts = np.arange(0, len(shuffled), size)
    rows = np.diff(np.append(starts, len(shuffled)))
    slots = int((np.maximum.reduceat(shuffled, starts) * rows).sum())
    return int(checked.sum()) / slots


def seeded_order(plan: Plan, step: int) -> Integers:
    """(items of the step,) item numbers in the order of the plan's epoch."""
    positions = np.sort(plan.division.packs(step % plan.num_steps).order)
    return plan.items.sequence[positions].astype(np.int64)
