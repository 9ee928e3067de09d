"""Plans of millions of documents in a new process, and 1,024 ranks: CPU time, quality, peak memory."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from multipack.planning.cost import CostModel
from multipack.planning.plan import plan
from multipack.planning.report import kappa, report
from planning_tables.lengths import lognormal, sft_mix
from planning_tables.table import Table

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
    each = None if before is None or peak is None else (peak - before) / len(lengths)
    return {**report(made, PACKS).to_dict(), "cpu": seconds, "peak": each}


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
        names = (
            "cost_utilization",
            "ceiling_reached",
            "mean_length_spread",
            "displacement_p99",
            "longest_wait",
        )
        quality = (found[name] for name in (*names, "peak"))
        made.row(documents, found["cpu"], found["steps"], found["minimum_steps"], ratio, *quality)
        name = f"whole plan of {documents:,}"
        if documents == 10_000_000:
            made.at_most(f"{name}: CPU s", found["cpu"], 4.0, ".2f")
        made.at_most(f"{name}: steps / minimum", ratio, 1.0005, ".5f")
        made.at_least(f"{name}: cost utilization", found["cost_utilization"], 0.995, "%")
    made.notes.append(
        "peak: the largest resident memory while planning over that before, without the given lengths"
    )
    return made


def thousand(quick: bool) -> Table:
    """One pack a rank on 1,024 ranks, with packs that may differ in tokens and with full packs."""
    ranks, steps, fill = 1024, 1 if quick else 3, 0.99
    columns = {
        "mean of a pack": ",", "capacity": ",", "seed": "", "steps": ",", "cost utilization": "%", "ceiling": "%",
        "share of it": "%", "CPU s a step": ".3f",
    }  # fmt: skip
    title = "1,024 ranks, one pack each: 99.89 % of mean 1 k tokens, 0.11 % of mean 37 k, at most 131,072"
    made = Table("thousand", title, columns)
    report(plan(sft_mix(30_000), capacity=131_072, packs_per_step=8, window=1), 8)  # compiles
    cost, share, slowest = 1.0, 1.0, 0.0
    for seed in range(1 if quick else 3):
        lengths = sft_mix(1_400_000, seed)
        longest = int(lengths.max())
        budget = int(1.05 * kappa(lengths, CostModel.from_shape().cost(lengths)) * longest)
        for mean, capacity in ((budget, budget * 11 // 10), (longest, longest)):
            enough = int(np.searchsorted(np.cumsum(lengths), fill * steps * ranks * mean))
            options: Any = {"capacity": capacity, "packs_per_step": ranks, "budget": mean, "window": 1}
            start = time.process_time()
            epoch = plan(lengths[:enough], seed=seed, **options)
            for step in range(epoch.num_steps):
                epoch.deal(step, ranks)
            seconds = (time.process_time() - start) / epoch.num_steps
            found = report(epoch, ranks)
            reached, ceiling = found.cost_utilization, found.cost_utilization_ceiling
            made.row(mean, capacity, seed, epoch.num_steps, reached, ceiling, found.ceiling_reached, seconds)
            slowest = max(slowest, seconds)
            if mean == budget:
                cost = min(cost, reached)
            else:
                share = min(share, found.ceiling_reached)
    made.at_least("1,024 ranks, budget: cost utilization", cost, 0.9995, "%")
    made.at_least("1,024 ranks, C = Lmax: share of the ceiling", share, 0.999, "%")
    made.at_most("1,024 ranks: CPU s a step", slowest, 0.2, ".3f")
    made.notes.append("seconds: planning and dealing; budget: 1.05 · κ · Lmax, and a capacity of 1.1 of that")
    return made
