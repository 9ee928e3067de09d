"""Steps 3 to 5 of llama-1b traced: the share of time in which the device works, and where it goes.

Writes the trace itself (for https://ui.perfetto.dev) beside the JSON file.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_parts.common import options_of, random_corpus, write_part
from multipack.training.run_config import compose
from multipack.training.train import train

KINDS = {
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "aten::mm", "aten::addmm", "xmma"),
    "attention": ("flash", "fmha", "attention", "flex", "attn"),
    "collectives": ("nccl",),
    "copies": ("memcpy", "memset", "copy_"),
    "compiled": ("triton",),
}
"""Kind → parts of the names of its kernels; the first kind that fits counts, and all others are elementwise."""


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    lower = name.lower()
    return next(
        (kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "elementwise"
    )


def busy_microseconds(spans: list[tuple[float, float]]) -> float:
    """Length of the union of (start, end) spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def summary(events: list[dict[str, Any]], category: str) -> dict[str, Any]:
    """Busy share, time by kind and the longest kernels of the events of a category."""
    found = [event for event in events if event.get("cat") == category and "dur" in event]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in found]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    kinds, names = Counter(), Counter()
    for event in found:
        kinds[kind_of(event["name"])] += event["dur"]
        names[event["name"][:120]] += event["dur"]
    return {
        "milliseconds": whole / 1e3,
        "kernels": len(found),
        "busy_share": busy_microseconds(spans) / whole,
        "share_by_kind": {name: time / whole for name, time in kinds.most_common()},
        "longest": [{"name": name, "share": time / whole} for name, time in names.most_common(25)],
    }


def main() -> None:
    options = options_of(__doc__)
    capacity, packs = (256, 2) if options.small else (8192, 2)
    shape = ["model=tiny"] if options.small else ["model=llama-1b", "train.dtype=bf16"]
    corpus = random_corpus(options, capacity, packs, 6, 512 if options.small else 128_256)
    with (
        corpus as (words, _),
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        run = Path(folder) / "run"
        words += [*shape, "train.steps=6", f"out={run}", "train.profile=true"]
        train(compose([*words, "train.eval_every=0"]))
        events = json.loads((run / "trace.json").read_text())["traceEvents"]
        if not options.small:
            shutil.copyfile(run / "trace.json", options.out.with_suffix(".trace.json"))
    found = summary(events, "kernel" if options.device == "cuda" else "cpu_op")
    print(json.dumps({name: value for name, value in found.items() if name != "longest"}, indent=1))
    write_part(options, found)


if __name__ == "__main__":
    main()
