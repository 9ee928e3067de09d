"""What a training step spends outside forward, backward and optimizer, and its MFU.

    python benchmarks/overhead.py

Trains the default model on the embedded corpus and reads its own metrics.jsonl; a second run without prefetching shows
what the background thread hides. Then two wider models in fp32, for MFU against the measured matmul peak. Results go
to results/overhead.json.
"""

from __future__ import annotations

import statistics

from result import parser_of, records_of, write_result

STEPS = 30
FP32 = [
    "train.eval_every=1",
    "train.eval_packs=1",
    "train.dtype=fp32",
    "plan.packs_per_step=1",
    "plan.capacity=4096",
]
RUNS = {
    "prefetch 2": ["train.eval_every=0", "train.prefetch=2"],
    "prefetch 0": ["train.eval_every=0", "train.prefetch=0"],
    "6 x 384": [*FP32, "model.layers=6", "model.d_model=384", "model.heads=6", "model.d_ff=1024"],
    "6 x 512": [*FP32, "model.layers=6", "model.d_model=512", "model.heads=8", "model.d_ff=1376"],
}


def shares(words: list[str]) -> dict[str, float]:
    """Median shares of a step's time, the first three steps left out; seconds of a step, and MFU in percent."""
    records = records_of([*words, f"train.steps={STEPS}"])
    records = [record for record in records if "dt" in record][3:]
    parts = {
        "forward": lambda r: r["dtf"] / r["dt"],
        "backward": lambda r: r["dtb"] / r["dt"],
        "optimizer": lambda r: r["dto"] / r["dt"],
        "data": lambda r: r["data_time"] / r["dt"],
        "rest": lambda r: 1 - (r["dtf"] + r["dtb"] + r["dto"] + r["data_time"]) / r["dt"],
        "seconds": lambda r: r["dt"],
        "mfu": lambda r: r["mfu"],
    }
    return {name: statistics.median(map(part, records)) for name, part in parts.items()}


def main() -> None:
    options, rows = parser_of(__doc__, "overhead").parse_args(), []
    for run, words in RUNS.items():
        found = shares(words)
        times = "  ".join(f"{name} {value:.2%}" for name, value in list(found.items())[:5])
        print(f"{run}: {found['seconds']:.3f} s a step, MFU {found['mfu']:.1f} %;  {times}", flush=True)
        rows.append({"run": run, **found})
    write_result(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
