"""Documents that a plan, and random draws, show and miss in an epoch.

    python benchmarks/draws.py              # seconds; results/draws.json, and the table in docs/parallel/reading.md

Documents of seeded lognormal lengths are given to W data-parallel ranks in three ways: the partition of a plan; draws
with replacement, where each rank has its own seed; and a shuffle of all documents on each rank, again with its own
seed, of which the rank takes its share. Draws fill packs in order (next fit), and a rank draws further until it has as
many packs as the other ranks. All packs of an epoch are counted over all ranks.

Of n documents and m draws with replacement, a document is missed with probability (1 − 1/n)^m: 36.8 % for m = n, for
any number of ranks. With a shuffle on each of W ranks it is (1 − 1/W)^W: 0 for one rank, 25 % for two. `unseen` is the
share of documents that no rank was given after several epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.planning.packing import pack
from result import DOCS, parser_of, write_between, write_result

Integers = NDArray[np.int64]
CAPACITY, MEAN_LOG, SPREAD_LOG = 4096, 5.8, 0.9
DOCUMENTS, RANKS, EPOCHS = 50_000, (1, 2, 8, 64), 4
"""The last is the number of epochs that `unseen` is counted over."""
WAYS = {"with replacement": True, "own shuffles": False}


def lengths_of(documents: int) -> Integers:
    """Seeded lognormal lengths, at least 2 and at most a quarter of the capacity."""
    drawn = np.random.default_rng(11).lognormal(MEAN_LOG, SPREAD_LOG, documents)
    return np.clip(drawn, 2, CAPACITY // 4).astype(np.int64)


def planned(lengths: Integers, ranks: int) -> Integers:
    """The documents that a plan gives all ranks in an epoch."""
    sampler = PackedBatchSampler(lengths, capacity=CAPACITY, packs_per_step=max(8, ranks), world_size=ranks)
    return np.concatenate([sampler.deal_of(step).order for step in range(sampler.steps_per_epoch)])


def draws(documents: int, share: int, rank: int, replacement: bool, epoch: int) -> Iterator[Integers]:
    """Draws of one rank without end, `share` at a time, from `SeedSequence([0, epoch, rank])`."""
    generator = np.random.default_rng(np.random.SeedSequence([0, epoch, rank]))
    rest = np.empty(0, dtype=np.int64)
    while True:
        if replacement:
            yield generator.integers(0, documents, share)
            continue
        if len(rest) < share:
            rest = np.concatenate([rest, generator.permutation(documents)])
        part, rest = rest[:share], rest[share:]
        yield part


def drawn(lengths: Integers, ranks: int, replacement: bool, epoch: int) -> Integers:
    """The documents that all ranks draw in an epoch; every rank has the same number of packs."""
    share = -(-len(lengths) // ranks)
    streams = [draws(len(lengths), share, rank, replacement, epoch) for rank in range(ranks)]
    given = [next(stream) for stream in streams]
    needed = max(len(pack(lengths[part], CAPACITY, "next_fit")) for part in given)
    found = []
    for stream, part in zip(streams, given, strict=True):
        while len(packs := pack(lengths[part], CAPACITY, "next_fit")) < needed:
            part = np.concatenate([part, next(stream)])
        found.append(part[packs.order[: packs.offsets[needed]]])
    return np.concatenate(found)


def coverage(seen: Integers, documents: int) -> tuple[float, float]:
    """Shares of the documents that were missed, and that were shown more than once."""
    times = np.bincount(seen, minlength=documents)
    return float((times == 0).mean()), float((times > 1).mean())


def expected_coverage(draws: int, documents: int, ranks: int, replacement: bool) -> tuple[float, float]:
    """The same in expectation, from the binomial distribution of the number of times a document is drawn.

    With replacement each of `draws` trials has probability 1/n. Without, each of `ranks` ranks draws a document at
    most once, with probability draws / (ranks · n).
    """
    trials, chance = (draws, 1 / documents) if replacement else (ranks, draws / (ranks * documents))
    missed = (1 - chance) ** trials
    return missed, 1 - missed - trials * chance * (1 - chance) ** (trials - 1)


def measure(documents: int, ranks: Sequence[int], epochs: int) -> list[dict[str, Any]]:
    """A row for each number of ranks and each way."""
    lengths, rows = lengths_of(documents), []
    for world_size in ranks:
        seen = {"plan": [planned(lengths, world_size)]}
        for way, replacement in WAYS.items():
            seen[way] = [drawn(lengths, world_size, replacement, epoch) for epoch in range(epochs)]
        for way, each in seen.items():
            missed, repeated = coverage(each[0], documents)
            expected = (0.0, 0.0)
            if way in WAYS:
                expected = expected_coverage(len(each[0]), documents, world_size, WAYS[way])
            row = {
                "ranks": world_size,
                "way": way,
                "draws": len(each[0]),
                "missed": missed,
                "repeated": repeated,
            }
            row |= {"expected_missed": expected[0], "expected_repeated": expected[1]}
            rows.append({**row, "unseen": coverage(np.concatenate(each), documents)[0]})
    return rows


def table(rows: list[dict[str, Any]], epochs: int) -> str:
    """The rows in Markdown."""
    head = f"| ranks | way | draws | missed | expected | repeated | expected | unseen after {epochs} epochs |"
    lines = [head, "|---:|---|---:|---:|---:|---:|---:|---:|"]
    for last, row in pairwise([None, *rows]):
        ranks = "" if last and last["ranks"] == row["ranks"] else f"{row['ranks']}"
        shares = ("missed", "expected_missed", "repeated", "expected_repeated", "unseen")
        cells = (ranks, row["way"], f"{row['draws']:,}", *(f"{row[name]:.2%}" for name in shares))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = parser_of(__doc__, "draws").parse_args()
    rows = measure(DOCUMENTS, RANKS, EPOCHS)
    print(text := table(rows, EPOCHS))
    write_result(options.out, {"documents": DOCUMENTS, "epochs": EPOCHS, "rows": rows})
    write_between(DOCS / "parallel" / "reading.md", "draws", text)


if __name__ == "__main__":
    main()
