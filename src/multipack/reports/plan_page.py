"""The page of a plan: packs beside padded batches, cost over ranks, lengths and measures, drawn by `plan_page.js`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

import multipack
from multipack.data.text.skipped import counted
from multipack.planning.deal import least_step_cost, rank_loads
from multipack.planning.items import SharedItems
from multipack.planning.plan import Plan
from multipack.planning.report import PlanReport, evenly_spaced
from multipack.reports.trees import nodes_of, rows_of
from multipack.reports.web_page import web_page

Integers = NDArray[np.int64]

MOST_DOCUMENTS = 3000
"""Most documents drawn as blocks; of more, evenly spaced packs are drawn."""
FEWEST_PACKS = 24
"""Packs drawn as blocks, of several steps if one has fewer."""
MOST_CELLS = 40_000
"""Cells of the heat map, unless four steps have more."""
MOST_STEPS = 120
"""Steps of the heat map, evenly spaced over the epoch."""
BINS = 48
"""Bars of the histogram of lengths."""
MOST_TREES = 3
"""Packs whose nodes are drawn, where documents share their beginnings."""
MOST_ROWS = 64
"""Most documents drawn of such a pack."""


def plan_view(
    made: Plan, found: PlanReport, batch_size: int, padded_share: float, command: str
) -> dict[str, Any]:
    """The values that the page of a plan, with its report, shows.

    `padded_share` is the share of tokens in padded batches of the whole epoch, `command` trains with this plan.
    """
    packs = f"{found.packs:,} packs of {made.capacity:,} tokens (at least {found.minimum_packs:,})"
    steps = f"{found.steps:,} steps (at least {found.minimum_steps:,})"
    ranks = counted(found.data_parallel_size, "ranks")
    return found.to_dict() | {
        "headline": f"{found.documents:,} documents in {packs}, {steps}, {ranks}",
        "capacity": made.capacity,
        "ranks": found.data_parallel_size,
        "padded_share": padded_share,
        "batch_size": batch_size,
        "blocks": _blocks(made, batch_size),
        "trees": _trees(made),
        "heat": _heat(made, found),
        "histogram": _histogram(made),
        "dials": _dials(made, found),
        "command": command,
    }


def _blocks(made: Plan, batch_size: int) -> dict[str, Any]:
    """Documents of some packs: their places in the packs, and in padded batches in the order of the epoch.

    Of each document: length, tokens that no other document of its item has, place in the order, pack, and the slots
    below it in the pack; of each padded batch: its longest document.
    """
    steps = min(int(np.searchsorted(made.step_offsets, FEWEST_PACKS)), made.num_steps)
    packs = np.arange(made.step_offsets[steps])
    starts, ends = made.pack_offsets[packs], made.pack_offsets[packs + 1]
    drawn = len(packs)
    if (count := int((ends - starts).sum())) > MOST_DOCUMENTS:
        drawn = max(len(packs) * MOST_DOCUMENTS // count, 1)
    chosen = evenly_spaced(len(packs), drawn)
    places = [
        np.arange(start, min(end, start + MOST_DOCUMENTS))
        for start, end in zip(starts[chosen], ends[chosen], strict=True)
    ]
    found = [_documents(made, each) for each in places]
    pack_of = np.repeat(np.arange(len(found)), [len(each[0]) for each in found])
    lengths, added, order = (np.concatenate(each) for each in zip(*found, strict=True))
    below = [np.cumsum(each) - each for _, each, _ in found]
    place = np.argsort(np.argsort(order, kind="stable"))
    in_order = lengths[np.argsort(place)]
    longest = np.maximum.reduceat(in_order, np.arange(0, len(in_order), batch_size))
    widths = np.minimum(batch_size, len(in_order) - batch_size * np.arange(len(longest)))
    return {
        "steps": steps,
        "packs": drawn,
        "all_packs": len(packs),
        "length": lengths.tolist(),
        "added": added.tolist(),
        "place": place.tolist(),
        "pack": pack_of.tolist(),
        "below": np.concatenate(below).tolist(),
        "longest": longest.tolist(),
        "padded_slots": int((longest * widths).sum()),
    }


def _documents(made: Plan, places: Integers) -> tuple[Integers, Integers, Integers]:
    """Length, added tokens and place in the epoch's order of the documents at `places` of `made.order`."""
    items, inside = made.items, made.order[places]
    lengths, added = items.lengths[items.documents(inside)], items.added(inside)
    return lengths, added, items.places(made.division.entries[places])


def _trees(made: Plan) -> list[dict[str, Any]]:
    """The nodes of the first packs, if documents share their beginnings."""
    if not isinstance(made.items, SharedItems):
        return []
    trees = []
    for pack in islice(made.packs(0), MOST_TREES):
        rows = rows_of(made.items, pack)
        drawn = rows[:MOST_ROWS]
        trees.append(
            {
                "documents": len(rows),
                "rows": len(drawn),
                "tokens": sum(row.length for row in rows),
                "slots": int(made.slots[pack].sum()),
                "deepest": max(row.length for row in drawn),
                "nodes": nodes_of(drawn),
            }
        )
    return trees


def _heat(made: Plan, found: PlanReport) -> dict[str, Any]:
    """Cost of every rank's micro-batches over steps, relative to the mean pack, and the slowest rank of each step.

    `cost` is (steps, micro-batches, ranks). `slowest` (steps,) is the cost of a step's slowest ranks over the
    mean of all ranks, `least` its proven lower bound.
    """
    ranks, sync = found.data_parallel_size, found.sync
    micro_batches = made.micro_batches(ranks)
    costs = made.costs(np.arange(len(made.slots)))
    steps = evenly_spaced(made.num_steps, min(MOST_STEPS, max(MOST_CELLS // (ranks * micro_batches), 4)))
    cells, waits, least = [], [], []
    for step in steps.tolist():
        dealt = made.deal(step, ranks, sync)
        packs, inside = dealt.totals(costs), dealt.order
        mean = int(packs.sum()) / ranks
        bound = least_step_cost(made.slots[inside], costs[inside], ranks, micro_batches, made.capacity, sync)
        cells.append(packs.reshape(micro_batches, ranks))
        waits.append(float(rank_loads(packs, ranks, sync).max(axis=1).sum()) / mean)
        least.append(min(bound / mean, waits[-1]))
    table = np.stack(cells)
    return {
        "steps": steps.tolist(),
        "micro_batches": micro_batches,
        "cost": np.round(table / max(table.mean(), 1e-300), 3).tolist(),
        "slowest_rank": table.sum(axis=1).argmax(axis=1).tolist(),
        "slowest": waits,
        "least": least,
    }


def _histogram(made: Plan) -> dict[str, Any]:
    """Documents by length, in bars of equal width on a logarithmic axis."""
    lengths = made.lengths[made.document_order]
    edges = np.geomspace(lengths.min(), lengths.max() + 1, BINS + 1)
    counts, edges = np.histogram(lengths, np.unique(np.round(edges).astype(np.int64)))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _dials(made: Plan, found: PlanReport) -> list[dict[str, Any]]:
    """Fill, balance and randomness as positions from 0 to 1, with ceilings, marks of the scale, and text."""
    ranks, window, moved = found.data_parallel_size, made.options.window, found.displacement_p99
    best = found.tokens / (max(found.minimum_steps, 1) * made.packs_per_step * made.capacity)
    best = min(best, max(found.tokens / found.minimum_slots, 1.0))
    filled = "real tokens over slots" if found.slots < found.tokens else "of the slots hold tokens"
    shares = [("fill", found.efficiency, best, filled)]
    if ranks > 1:
        balance = f"mean cost of {ranks} ranks over maximum"
        shares += [("balance", found.cost_utilization, found.cost_utilization_ceiling, balance)]
    dials = [
        {
            "name": name,
            "value": nines(value),
            "ceiling": nines(ceiling),
            "shown": f"{100 * value:.2f} %",
            "text": f"{text}; ceiling {100 * ceiling:.2f} %",
            "marks": [[nines(share), f"{100 * share:g}"] for share in (0.0, 0.9, 0.99, 0.999)],
        }
        for name, value, ceiling, text in shares
    ]
    most = 2 * max(window, 1)
    randomness = {
        "name": "randomness",
        "value": max(0.0, 1 - moved / most),
        "ceiling": 1 - window / most,
        "shown": f"{moved:.1f} steps",
        "text": f"99 % of the documents are at most this far from their random place; line: window {window}",
        "marks": [[0.0, f"{most}"], [1.0, "0"]],
    }
    return [*dials, randomness]


def nines(share: float) -> float:
    """A share on a scale on which 0, 0.9, 0.99, 0.999 and 0.9999 are equally far apart, from 0 to 1."""
    return min(-math.log10(max(1 - share, 1e-4)) / 4, 1.0)


def plan_page(view: dict[str, Any], title: str, rows: Sequence[tuple[str, str]]) -> bytes:
    """The HTML page of a `plan_view` and of the rows of the plan's report."""
    more = {"title": title, "rows": rows, "made": f"multipack {multipack.__version__}"}
    return web_page(f"{title} · multipack", "plan_page.js", view | more)
