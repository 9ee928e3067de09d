"""What a training step spends outside forward, backward and optimizer, and waiting for data, as shares of it.

    python benchmarks/overhead.py --steps 30

Trains the default model on the embedded corpus and reads its own metrics.jsonl. A second run without prefetching
shows what the background thread hides. Results go to results/overhead.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
from pathlib import Path

from multipack.run import RunDirectory
from multipack.training.run_config import compose
from multipack.training.trainer import train
from result import write_result

RESULTS = Path(__file__).parent / "results" / "overhead.json"


def shares(words: list[str], steps: int) -> dict[str, float]:
    """Median shares of a step's time, the first three steps left out."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["train.eval_every=0", "train.compare_padding=false", "log.every=0"]
        with contextlib.redirect_stdout(io.StringIO()):
            train(compose([*quiet, *words, f"train.steps={steps}", f"out={folder}/run"]))
        records = list(RunDirectory.at(f"{folder}/run").records())[3:]
    parts = {
        "forward": lambda r: r["dtf"],
        "backward": lambda r: r["dtb"],
        "optimizer": lambda r: r["dto"],
        "data": lambda r: r["data_time"],
        "rest": lambda r: r["dt"] - r["dtf"] - r["dtb"] - r["dto"] - r["data_time"],
    }
    found = {name: statistics.median(part(r) / r["dt"] for r in records) for name, part in parts.items()}
    return {**found, "seconds": statistics.median(r["dt"] for r in records)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to write")
    parser.add_argument("words", nargs="*", help="more settings")
    options = parser.parse_args()
    rows = []
    for prefetch in (2, 0):
        found = shares([*options.words, f"train.prefetch={prefetch}"], options.steps)
        told = "  ".join(f"{name} {value:.2%}" for name, value in found.items() if name != "seconds")
        print(f"prefetch {prefetch}: {found['seconds']:.3f} s a step;  {told}", flush=True)
        rows.append({"prefetch": prefetch, **found})
    write_result(options.out, {"rows": rows, "words": options.words})


if __name__ == "__main__":
    main()
