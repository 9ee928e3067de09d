"""What a tool makes of an epoch: packs, fill, balance, lost documents, order, randomness, seconds."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multipack.planning.cost import CostModel
from multipack.planning.histogram import count, simple_bound
from multipack.planning.lengths import offsets_of
from multipack.planning.packing import Packs
from multipack.planning.report import utilization
from packing.epoch import Epoch, Integers
from packing.tools import Tool

RANKS = 8
COST = CostModel.from_shape()
"""Cost of documents for Llama 3 8B: 57,256·l + l(l + 1)."""


@dataclass(frozen=True)
class Measures:
    """Measures of an epoch of one tool on one set."""

    steps: int
    """Micro-batches that every rank runs; the epoch has ranks × steps packs."""
    least_steps: int
    """Proven lower bound on that number for the documents that were trained."""
    fill: float
    """Tokens of documents, each counted once, over slots (packs × capacity)."""
    balance: float
    """Slowest over mean cost of the ranks, summed over the micro-batches."""
    work: float
    """The slowest ranks' cost over the documents' own, divided among the ranks: with padding, repeats and waiting."""
    lost: int
    """Documents of which no token is trained."""
    repeated: int
    """Documents of which at least one token is trained twice."""
    cut: int
    """Documents that are cut or truncated."""
    over: int
    """Packs over the capacity."""
    empty: int
    """Packs without a document: ranks that wait."""
    spread: float | None
    """Standard deviation of the steps' mean lengths over that of random steps: 1 = random."""
    moved: float | None
    """Mean distance of documents from their place where the data's order is to be kept, over the epoch; None: it cannot
    be kept. A random order has 1 / 3."""
    seconds: float
    """CPU seconds, the least of several calls."""


def measure(tool: Tool, lengths: Integers, capacity: int, fewest: Packs, ranks: int = RANKS) -> Measures:
    """Run a tool with a seed, and without one.

    Args:
        tool: the tool.
        lengths: (documents,) tokens.
        capacity: most tokens of a pack.
        fewest: packs of the method `fewest`, with their bound.
        ranks: packs that run at the same time.
    """
    seconds, epoch = timed(lambda: tool.run(lengths, capacity, ranks, 0))
    given = tool.run(lengths, capacity, ranks, None)
    order, loads = epoch.order, loads_of(epoch, lengths, COST.cost).reshape(-1, ranks)
    tokens = lengths[order] if epoch.tokens is None else epoch.tokens
    trained = np.bincount(order, weights=tokens, minlength=len(lengths)).astype(np.int64)
    cut = np.unique(order[tokens != lengths[order]])
    once, sizes = np.minimum(trained, lengths), np.diff(epoch.offsets)
    slots = loads_of(epoch, lengths, lambda tokens: tokens)
    return Measures(
        steps=len(loads),
        least_steps=least_steps(once, capacity, fewest, ranks, bool(len(cut))),
        fill=int(once.sum()) / max(len(slots) * capacity, 1),
        balance=1 / utilization(loads) if loads.any() else math.inf,
        work=ranks * int(loads.max(axis=1).sum()) / int(COST.cost(once[once > 0]).sum())
        if loads.any()
        else math.inf,
        lost=int((trained == 0).sum()),
        repeated=int((trained > lengths).sum()),
        cut=len(cut),
        over=int((slots > capacity).sum()),
        empty=int((sizes == 0).sum()),
        spread=spread(epoch, lengths, ranks),
        moved=None if given is None else moved(given, lengths, ranks),
        seconds=seconds,
    )


def timed(run: Callable[[], Epoch], enough: float = 1.0, most: int = 5) -> tuple[float, Epoch]:
    """Least CPU seconds of at most `most` calls, none more after `enough` seconds, and the last epoch.

    Objects of other tools are frozen: a collection of garbage, which Axolotl's sampler asks for, does not visit them.
    """
    best, spent, calls = math.inf, 0.0, 0
    gc.collect()
    gc.freeze()
    while calls == 0 or (calls < most and spent < enough):
        start = time.process_time()
        epoch = run()
        seconds = time.process_time() - start
        calls, spent = calls + 1, spent + seconds
        best = min(best, seconds if epoch.seconds is None else epoch.seconds)
    return best, epoch


def loads_of(epoch: Epoch, lengths: Integers, value: Callable[[Integers], Integers]) -> Integers:
    """(packs,) sums of a value of the sequences that are computed for each pack."""
    tokens = lengths[epoch.order] if epoch.tokens is None else epoch.tokens
    sizes, held = np.diff(epoch.offsets), np.flatnonzero(np.diff(epoch.offsets))
    loads = np.zeros(len(sizes), dtype=np.int64)
    if epoch.rows == "documents":
        loads = np.diff(offsets_of(value(tokens))[epoch.offsets]) if len(tokens) else loads
    elif epoch.rows == "joined":
        loads[held] = value(np.diff(offsets_of(tokens)[epoch.offsets])[held])
    else:
        loads[held] = sizes[held] * value(np.maximum.reduceat(tokens, epoch.offsets[held]))
    return loads


def least_steps(trained: Integers, capacity: int, fewest: Packs, ranks: int, cut: bool) -> int:
    """A proven lower bound on the micro-batches for the trained documents.

    Without k documents, k packs less may be enough and no fewer: each of the k could have a pack of its own.
    """
    packs = -(-int(trained.sum()) // capacity)
    held = trained[trained > 0]
    if not cut and len(held):
        packs = max(
            simple_bound(count(held), capacity, len(held)), fewest.lower_bound - len(trained) + len(held)
        )
    return -(-packs // ranks)


def steps_of(epoch: Epoch, ranks: int) -> Integers:
    """(entries,) optimizer step of each entry."""
    micro_batch = np.repeat(np.arange(len(epoch.offsets) - 1), np.diff(epoch.offsets)) // ranks
    return micro_batch if epoch.step_of is None else epoch.step_of[micro_batch]


def spread(epoch: Epoch, lengths: Integers, ranks: int) -> float | None:
    """Deviation of the steps' mean lengths over that of random steps, as `multipack.planning.report` defines it."""
    steps, used = steps_of(epoch, ranks), lengths[epoch.order].astype(np.float64)
    sizes = np.bincount(steps)
    sums = np.bincount(steps, weights=used)[sizes > 0]
    sizes = sizes[sizes > 0]
    expected = used.var(ddof=1) * float((1 / sizes - 1 / len(used)).sum()) if len(used) > 1 else 0.0
    return math.sqrt(float(((sums / sizes - used.mean()) ** 2).sum()) / expected) if expected > 0 else None


def moved(epoch: Epoch, lengths: Integers, ranks: int) -> float:
    """Mean distance in tokens of trained documents from their step, over all tokens; 0 if the order is kept.

    The place of a document is the middle of its tokens in the data's order. A step lasts from the tokens of all steps
    before it to the end of its own.
    """
    documents, first = np.unique(epoch.order, return_index=True)
    tokens, step = lengths[documents], np.unique(steps_of(epoch, ranks)[first], return_inverse=True)[1]
    sums = np.bincount(step, weights=tokens)
    ends = np.cumsum(sums)
    place = np.cumsum(tokens) - tokens / 2
    distance: NDArray[np.float64] = np.maximum(np.maximum((ends - sums)[step] - place, place - ends[step]), 0)
    return float(distance.mean() / tokens.sum())
