"""Plans of millions of documents in a process of their own, and streams: CPU time, quality, memory at its peak."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from multipack.planning.plan import plan
from multipack.planning.report import report
from multipack.planning.stream import PackStream
from planning_tables.lengths import Integers, lognormal
from planning_tables.table import Table, cpu_seconds

PACKS, CAPACITY = 8, 8192


def memory(field: str) -> int | None:
    """Bytes of resident memory: now (VmRSS), or at the peak (VmHWM); None where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [line.split()[1] for line in lines if line.startswith(field + ":")]
    return 1024 * int(found[0]) if found else None


def whole_plan(path: str, window: int) -> dict[str, Any]:
    """Plan the lengths in a file; called in a new process, so that the peak is the plan's own."""
    lengths = np.load(path, allow_pickle=False)
    options = {"capacity": CAPACITY, "packs_per_step": PACKS, "window": window}
    report(plan(lengths[:5000], **options), PACKS)  # compiles
    before, start = memory("VmRSS"), time.process_time()
    made = plan(lengths, **options)
    seconds, peak = time.process_time() - start, memory("VmHWM")
    found = report(made, PACKS)
    return {
        **found.to_dict(),
        "cpu": seconds,
        "peak": None if before is None or peak is None else (peak - before) / len(lengths),
    }


def table(quick: bool) -> Table:
    """The whole plan of 1 M and 10 M documents."""
    columns = {
        "documents": ",", "CPU s": ".2f", "steps": ",", "minimum": ",", "steps / minimum": ".5f",
        "cost utilization": "%", "of its ceiling": "%", "spread": ".2f", "displacement p99": ".1f",
        "longest wait": "", "peak bytes a document": ".1f",
    }  # fmt: skip
    title = (
        f"Whole plan of lognormal (5.7, 1.0) lengths clipped to {CAPACITY:,}: {PACKS} packs a step, window 16"
    )
    made = Table("large", title, columns)
    for documents in (1_000_000,) if quick else (1_000_000, 10_000_000):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lengths.npy"
            np.save(path, lognormal(documents, 5.7, 1.0, CAPACITY))
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found = pool.submit(whole_plan, str(path), 16).result()
        ratio = found["steps"] / found["minimum_steps"]
        made.row(
            documents, found["cpu"], found["steps"], found["minimum_steps"], ratio, found["cost_utilization"],
            found["ceiling_reached"], found["mean_length_spread"], found["displacement_p99"],
            found["longest_wait"], found["peak"],
        )  # fmt: skip
        name = f"whole plan of {documents:,}"
        if documents == 10_000_000:
            made.at_most(f"{name}: CPU s", found["cpu"], 4.0, ".2f")
        made.at_most(f"{name}: steps / minimum", ratio, 1.0005, ".5f")
        made.at_least(f"{name}: cost utilization", found["cost_utilization"], 0.995, "%")
    made.notes.append(
        "peak: the largest resident memory while planning over that before, without the given lengths"
    )
    return made


def stream(quick: bool) -> Table:
    """Documents a second of the planner over an iterator."""
    documents = 100_000 if quick else 1_000_000
    title = (
        f"Stream of {documents:,} lognormal (5.7, 1.0) lengths clipped to {CAPACITY:,}: {PACKS} packs a step"
    )
    columns = {
        "": "", "steps": ",", "filled": "%", "longest wait": "", "CPU s": ".2f", "documents a second": ",.0f",
    }  # fmt: skip
    made = Table("stream", title, columns)
    lengths = lognormal(documents, 5.7, 1.0, CAPACITY)

    def consume(values: Integers, window: int, state_every: int) -> tuple[int, int, int]:
        steps = tokens = 0
        stream = PackStream(
            values.tolist(), length=int, capacity=CAPACITY, packs_per_step=PACKS, window=window
        )
        for step in stream:
            steps, tokens = steps + 1, tokens + int(step.packs.totals(step.lengths).sum())
            if state_every and steps % state_every == 0:
                step.state_dict()
        return steps, tokens, stream.longest_wait

    for window, state_every in ((4, 0), (16, 0), (16, 100)):
        consume(lengths[:30_000], window, state_every)  # compiles
        seconds, (steps, tokens, wait) = cpu_seconds(partial(consume, lengths, window, state_every), 1)
        name = f"window {window}" + (f", state every {state_every} steps" if state_every else "")
        made.row(name, steps, tokens / (steps * PACKS * CAPACITY), wait, seconds, documents / seconds)
    return made
