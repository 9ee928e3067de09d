"""What a training step spends outside forward, backward and optimizer, and waiting for data, as shares of it.

    python benchmarks/overhead.py --steps 30

Trains the default model on the embedded corpus and reads its own metrics.jsonl. A second run without prefetching
shows what the background thread hides. Results go to results/overhead.json.
"""

from __future__ import annotations

import statistics

from result import parser_of, records_of, write_result


def shares(words: list[str], steps: int) -> dict[str, float]:
    """Median shares of a step's time, the first three steps left out."""
    records = records_of(["train.eval_every=0", *words, f"train.steps={steps}"])[3:]
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
    parser = parser_of(__doc__, "overhead")
    parser.add_argument("--steps", type=int, default=30)
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
