"""Plans of millions of documents in a process of their own: CPU time, quality, and memory at its peak."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from multipack.planning import report as measure
from multipack.planning.plan import plan
from planning_tables.lengths import Integers, lognormal
from planning_tables.table import Table, cpu_seconds

PACKS, CAPACITY = 8, 8192


def memory(field: str) -> int | None:
    """Bytes of resident memory: now (VmRSS), or the most at once (VmHWM); None where the system does not say.

    getrusage is of no use here: a process that was started inherits the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [line.split()[1] for line in lines if line.startswith(field + ":")]
    return 1024 * int(found[0]) if found else None


def whole_plan(path: str, window: int) -> dict[str, Any]:
    """Plan the lengths in a file; a fresh process calls this, so that the peak is the plan's own."""
    lengths = np.load(path, allow_pickle=False)
    small = plan(lengths[:2000], capacity=CAPACITY, packs_per_step=PACKS, window=window)  # compiles
    measure.report(small, PACKS)
    before, start = memory("VmRSS"), time.process_time()
    made = plan(lengths, capacity=CAPACITY, packs_per_step=PACKS, window=window)
    seconds, peak = time.process_time() - start, memory("VmHWM")
    arrays = [value for value in vars(made).values() if isinstance(value, np.ndarray)]
    owners = {id(array if array.base is None else array.base): array for array in arrays}
    held = sum(array.nbytes for array in owners.values() if not np.shares_memory(array, made.lengths))
    report = measure.report(made, PACKS, sample=1000)
    return {
        "seconds": seconds,
        "steps": made.num_steps,
        "minimum": report.minimum_steps,
        "cost_utilization": report.cost_utilization,
        "ceiling_reached": report.ceiling_reached,
        "spread": report.mean_length_spread,
        "p99": report.displacement_p99,
        "peak": None if before is None or peak is None else (peak - before) / len(lengths),
        "held": held / len(lengths),
    }


def table(quick: bool) -> Table:
    """The whole plan of 1 M and 10 M documents."""
    made = Table(
        "large",
        f"Whole plan of lognormal (5.7, 1.0) lengths clipped to {CAPACITY:,}: {PACKS} packs a step, window 16",
        {
            "documents": ",",
            "CPU s": ".2f",
            "steps": ",",
            "minimum": ",",
            "steps / minimum": ".5f",
            "cost utilization": "%",
            "of its ceiling": "%",
            "spread": ".2f",
            "displacement p99": ".1f",
            "peak bytes a document": ".1f",
            "held bytes a document": ".1f",
        },
    )
    for documents in (1_000_000,) if quick else (1_000_000, 10_000_000):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lengths.npy"
            np.save(path, lognormal(documents, 5.7, 1.0, CAPACITY))
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found = pool.submit(whole_plan, str(path), 16).result()
        ratio = found["steps"] / found["minimum"]
        made.row(
            documents,
            found["seconds"],
            found["steps"],
            found["minimum"],
            ratio,
            found["cost_utilization"],
            found["ceiling_reached"],
            found["spread"],
            found["p99"],
            found["peak"],
            found["held"],
        )
        name = f"whole plan of {documents:,}"
        if documents == 10_000_000:
            made.at_most(f"{name}: CPU s", found["seconds"], 4.0, ".2f")
            made.at_most(
                f"{name}: bytes a document beyond the lengths, at the peak", found["peak"], 24, ".1f"
            )
        made.at_most(f"{name}: steps / minimum", ratio, 1.0005, ".5f")
        made.at_least(f"{name}: cost utilization", found["cost_utilization"], 0.995, "%")
        made.at_most(f"{name}: bytes a document beyond the lengths, held", found["held"], 24, ".1f")
    made.notes.append(
        "peak: the largest resident memory while planning, over that before, the given int64 lengths apart;"
        " held: the plan's own arrays but for the lengths, which it shares with the caller"
    )
    return made


def stream(quick: bool) -> Table:
    """Documents a second of the planner over an iterator."""
    documents = 500_000 if quick else 2_000_000
    made = Table(
        "stream",
        f"Stream of {documents:,} lognormal (5.7, 1.0) lengths clipped to {CAPACITY:,}: {PACKS} packs a step",
        {"": "", "steps": ",", "documents": ",", "filled": "%", "CPU s": ".2f", "documents a second": ",.0f"},
    )
    import multipack

    stream_class = getattr(multipack, "PackStream", None)
    if stream_class is None:
        made.notes.append("skipped: multipack.PackStream is not there")
        made.at_least("stream: documents a second", None, 1e6, ",.0f", note="no PackStream")
        return made
    lengths = lognormal(documents, 5.7, 1.0, CAPACITY)

    def consume(values: Integers, lookahead: int, state_every: int) -> tuple[int, int, int]:
        steps = trained = tokens = 0
        chunks = np.array_split(values, -(-len(values) // 65_536))
        stream = stream_class(
            chunks, length=None, capacity=CAPACITY, packs_per_step=PACKS, lookahead=lookahead
        )
        for step in stream:
            steps, trained, tokens = (
                steps + 1,
                trained + len(step),
                tokens + step.packs.totals(step.lengths).sum(),
            )
            if state_every and steps % state_every == 0:
                step.state_dict()
        return steps, trained, int(tokens)

    slowest = float("inf")
    for lookahead, state_every in ((4, 0), (16, 0), (16, 100)):
        consume(lengths[:30_000], lookahead, state_every)  # compiles
        seconds, (steps, trained, tokens) = cpu_seconds(partial(consume, lengths, lookahead, state_every), 2)
        name = f"lookahead {lookahead}" + (f", state every {state_every} steps" if state_every else "")
        filled = tokens / (steps * PACKS * CAPACITY)
        made.row(name, steps, trained, filled, seconds, documents / seconds)
        slowest = min(slowest, documents / seconds)
        if trained != documents:
            raise ValueError(f"the stream trained {trained:,} of {documents:,} documents")
    made.at_least("stream, known lengths: documents a second, slowest row", slowest, 1e6, ",.0f")
    made.notes.append("lengths arrive in chunks of 65,536; each step's packs are made")
    return made
