"""The sets of lengths: real ones where they are at hand, and drawn ones. A set is added by adding a row.

Real sets lie in ../shared/data/lengths, beside the repository (`planning_tables/lengths.py`); absent ones are left out.
Drawn ones come from numpy's default_rng, whose streams are the same on every platform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planning_tables.lengths import load, lognormal, sft_mix

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Lengths:
    """A set of lengths: its name, the capacity of a pack, and a function that reads or draws (documents,) lengths."""

    name: str
    capacity: int
    read: Callable[[], Integers | None]
    """Returns None where a real set is absent."""


def drawn(seed: int = 0) -> np.random.Generator:
    """A generator of lengths."""
    return np.random.default_rng(seed)


def of_histogram(name: str) -> Integers | None:
    """20,000 lengths of a histogram of Krell et al."""
    counts = load(name)
    return None if counts is None else drawn().choice(len(counts), 20_000, p=counts / counts.sum()) + 1


def bimodal(documents: int) -> Integers:
    """Four in five of about 250 tokens, one in five of about 5,000: chats and articles, say."""
    short, long = drawn().normal(250, 80, documents), drawn(1).normal(5_000, 600, documents)
    return np.where(drawn(2).random(documents) < 0.2, long, short).clip(16, 8192).astype(np.int64)


SETS = (
    Lengths("OpenChat V1", 32_768, lambda: load("openchat_v1")),
    Lengths("InstructLab", 8192, lambda: load("instructlab_sdg_24k")),
    Lengths("Natural Instructions", 8192, lambda: load("natural_instructions_193k")),
    Lengths("GSM8K", 2048, lambda: load("gsm8k_train")),
    Lengths("Python functions", 8192, lambda: load("stdlib311_doc2src")),
    Lengths("Shakespeare", 2048, lambda: load("tinyshakespeare_speeches")),
    Lengths("SQuAD", 384, lambda: of_histogram("squad384_histogram")),
    Lengths("Wikipedia", 512, lambda: of_histogram("wikipedia512_histogram")),
    Lengths("lognormal", 8192, lambda: lognormal(20_000, 5.7, 1.0, 8192)),
    Lengths("uniform", 8192, lambda: drawn().integers(1, 8193, 5_000)),
    Lengths("bimodal", 8192, lambda: bimodal(10_000)),
    Lengths("SFT mix", 131_072, lambda: sft_mix(30_000)),
    Lengths("just over half", 2048, lambda: drawn().integers(1025, 1100, 4_000)),
)

ONE_TOO_LONG = Lengths("one too long", 2048, lambda: np.insert(lognormal(2_000, 5.7, 1.0, 2048), 100, 2100))
"""Document 100 does not fit into a pack: what each tool does with it."""
