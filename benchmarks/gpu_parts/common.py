"""What the parts share: a command line, a corpus of random tokens, timed runs, and a file of figures."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planning_tables.table import Asked
from result import device_name, records_of, write_result


def options_of(
    doc: str | None, add: Callable[[argparse.ArgumentParser], object] = bool
) -> argparse.Namespace:
    """The command line of a part; `add` adds arguments of its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="seconds of work, to see that the part runs")
    add(parser)
    return parser.parse_args()


def write_part(
    options: argparse.Namespace, figures: dict[str, Any], asked: list[Asked] | None = None
) -> None:
    """Write the figures of a part, and those that are asked of it."""
    judged = [asdict(each) for each in asked or []]
    common = {"device": device_name(options.device), "small": options.small, "asked": judged}
    write_result(options.out, {**common, **figures})


def at_least(figure: str, reached: float, bound: float, options: argparse.Namespace) -> list[Asked]:
    """A figure that is asked for on a GPU; nothing is asked of a small run."""
    return [] if options.small else [Asked(figure, reached, bound, at_most=False, format=".2f")]


def random_lengths(tokens: int, mean: float, longest: int, seed: int = 0) -> list[int]:
    """Lognormal lengths of documents with this mean (before they are clipped) that hold about `tokens` tokens."""
    spread = 0.9
    draw = np.random.default_rng(seed).lognormal(
        np.log(mean) - spread**2 / 2, spread, 2 + int(2 * tokens / mean)
    )
    lengths = draw.astype(np.int64).clip(2, longest)
    return lengths[: int(np.searchsorted(lengths.cumsum(), tokens)) + 1].tolist()


def write_store(folder: Path, lengths: list[int], vocabulary: int) -> np.ndarray:
    """Write a token store of documents of random tokens; returns all tokens in a row."""
    import tokenizers

    from multipack.data.stores.writer import StoreWriter
    from multipack.data.text.tokenizer import Tokenizer

    words = tokenizers.models.WordLevel({f"t{number}": number for number in range(vocabulary)})
    tokens = np.random.default_rng(1).integers(0, vocabulary, sum(lengths), dtype=np.uint32)
    ends = np.cumsum(lengths)
    with StoreWriter(folder, Tokenizer(tokenizers.Tokenizer(words).to_str())) as writer:
        for number, document in enumerate(np.split(tokens, ends[:-1])):
            writer.add(str(number), [(document.tolist(), True)])
    return tokens


@contextmanager
def random_corpus(
    options: argparse.Namespace,
    capacity: int,
    packs: int,
    steps: int,
    vocabulary: int,
    mean: float = 300,
    longest: int = 0,
) -> Iterator[tuple[list[str], np.ndarray]]:
    """A temporary store for a run: documents of random tokens that fill `steps` steps, and some more.

    Yields:
        The settings of a run on it, and all tokens in a row.
    """
    lengths = random_lengths(capacity * packs * (steps + 4), mean, longest or capacity)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "documents.store"
        tokens = write_store(store, lengths, vocabulary)
        words = ["data=store", f"data.path={store}", "data.validation=0", f"train.device={options.device}"]
        yield [*words, f"plan.capacity={capacity}", f"plan.packs_per_step={packs}"], tokens


@dataclass(frozen=True)
class Run:
    """Figures of a run of the trainer, over the steps after those that compile and allocate.

    Attributes:
        tokens_per_second: tokens of documents over the time of the steps.
        mfu: model FLOPs over the peak of the device, in percent.
        step_seconds: median.
        memory_gib: peak memory of the device.
        seconds_of_first_steps: with compilation.
    """

    tokens_per_second: float
    mfu: float
    step_seconds: float
    memory_gib: float
    seconds_of_first_steps: float


def timed_run(words: list[str], skipped: int) -> Run:
    """Train with these settings; the first `skipped` steps do not count."""
    records = [record for record in records_of([*words, "train.eval_every=0"]) if "dt" in record]
    counted = records[skipped:]
    seconds = sum(record["dt"] for record in counted)
    return Run(
        tokens_per_second=sum(record["tps"] * record["dt"] for record in counted) / seconds,
        mfu=sum(record["mfu"] * record["dt"] for record in counted) / seconds,
        step_seconds=statistics.median(record["dt"] for record in counted),
        memory_gib=max(record["memory"] for record in records),
        seconds_of_first_steps=sum(record["dt"] for record in records[:skipped]),
    )
