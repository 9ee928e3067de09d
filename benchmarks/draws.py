"""What random draws repeat and miss in an epoch, beside a plan, which does neither.

    python benchmarks/draws.py              # a table, and results/draws.json; seconds
    python benchmarks/draws.py --page       # the same into docs/parallel-io.md

Documents of lognormal lengths (seeded) are given to N data-parallel ranks in three ways: a plan's partition; draws with
replacement, each rank with its own seed; and a shuffle of all documents on each rank, again with its own seed, of which
it takes its share. Everything is counted over all ranks' packs of one epoch; what is expected is a formula (see
`multipack/data/random_draws.py`). `unseen` is the share of documents that no rank has been given after several epochs.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.random_draws import RandomDraws, coverage, expected_coverage
from multipack.data.sampler import PackedBatchSampler
from result import write_result

RESULTS = Path(__file__).parent / "results" / "draws.json"
PAGE = Path(__file__).parents[1] / "docs" / "parallel-io.md"
MARKS = ("<!-- draws: begin -->", "<!-- draws: end -->")
CAPACITY, MEAN_LOG, SPREAD_LOG = 4096, 5.8, 0.9
WAYS = {"with replacement": True, "own shuffles": False}


def lengths_of(documents: int) -> NDArray[np.int64]:
    """Seeded lognormal lengths, at least 2 and at most a quarter of the capacity."""
    drawn = np.random.default_rng(11).lognormal(MEAN_LOG, SPREAD_LOG, documents)
    return np.clip(drawn, 2, CAPACITY // 4).astype(np.int64)


def planned(lengths: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """The documents that a plan gives all ranks in an epoch."""
    sampler = PackedBatchSampler(lengths, capacity=CAPACITY, packs_per_step=max(8, ranks), world_size=ranks)
    return np.concatenate([sampler.deal_of(step).order for step in range(sampler.steps_per_epoch)])


def drawn(lengths: NDArray[np.int64], ranks: int, replacement: bool, epoch: int) -> NDArray[np.int64]:
    """The documents that all ranks draw in an epoch."""
    given = []
    for rank in range(ranks):
        sampler = RandomDraws(lengths, CAPACITY, rank=rank, world_size=ranks, replacement=replacement)
        sampler.set_epoch(epoch)
        given += [number for pack in sampler for number in pack]
    return np.array(given)


def measure(documents: int, ranks: list[int], epochs: int) -> list[dict[str, Any]]:
    """A row for each number of ranks and each way."""
    lengths, rows = lengths_of(documents), []
    for world_size in ranks:
        seen = planned(lengths, world_size)
        missed, repeated = coverage(seen, documents)
        row = {"ranks": world_size, "way": "plan", "draws": len(seen), "missed": missed, "repeated": repeated}
        rows.append({**row, "expected_missed": 0.0, "expected_repeated": 0.0, "unseen": missed})
        for way, replacement in WAYS.items():
            each = [drawn(lengths, world_size, replacement, epoch) for epoch in range(epochs)]
            missed, repeated = coverage(each[0], documents)
            expected = expected_coverage(len(each[0]), documents, world_size, replacement)
            rows.append(
                {
                    "ranks": world_size,
                    "way": way,
                    "draws": len(each[0]),
                    "missed": missed,
                    "repeated": repeated,
                    "expected_missed": expected[0],
                    "expected_repeated": expected[1],
                    "unseen": coverage(np.concatenate(each), documents)[0],
                }
            )
    return rows


def table(rows: list[dict[str, Any]], epochs: int) -> str:
    """The rows in Markdown."""
    head = (
        "ranks",
        "way",
        "draws",
        "missed",
        "expected",
        "repeated",
        "expected",
        f"unseen after {epochs} epochs",
    )
    lines = [f"| {' | '.join(head)} |", "|---:|---|---:|---:|---:|---:|---:|---:|"]
    for last, row in pairwise([None, *rows]):
        ranks = "" if last and last["ranks"] == row["ranks"] else f"{row['ranks']}"
        shares = ("missed", "expected_missed", "repeated", "expected_repeated", "unseen")
        cells = (ranks, row["way"], f"{row['draws']:,}", *(f"{row[name]:.2%}" for name in shares))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 64])
    parser.add_argument(
        "--epochs", type=int, default=4, help="epochs after which documents are counted as unseen"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to write")
    parser.add_argument("--page", action="store_true", help="write the table into docs/parallel-io.md too")
    options = parser.parse_args()
    rows = measure(options.documents, options.ranks, options.epochs)
    text = table(rows, options.epochs)
    print(text)
    write_result(options.out, {"documents": options.documents, "epochs": options.epochs, "rows": rows})
    if options.page:
        page = PAGE.read_text()
        before, after = page[: page.index(MARKS[0])], page[page.index(MARKS[1]) :]
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{after}")


if __name__ == "__main__":
    main()
