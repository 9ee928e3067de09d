"""Document lengths that the tables are made of: real ones where they are at hand, and drawn ones.

Drawn lengths come from numpy's default_rng, whose streams are the same on every platform.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "lengths"
"""Where real lengths lie, beside the repository; tables that need them are skipped where they do not."""

ABSENT = "skipped: the lengths in ../shared/data/lengths are not there"


def load(name: str) -> Integers | None:
    """Lengths of a real data set; None where they are not there."""
    path = DATA / f"{name}.npy"
    return np.load(path, allow_pickle=False).astype(np.int64) if path.exists() else None


def from_histogram(name: str) -> Integers | None:
    """Lengths from counts, of which entry i is that of i + 1 tokens; None where they are not there."""
    counts = load(name)
    return None if counts is None else np.repeat(np.arange(1, len(counts) + 1), counts)


def lognormal(documents: int, mean: float, sigma: float, most: int, seed: int = 0) -> Integers:
    """⌊e^x⌋ for normal x, clipped to 1 … most; `mean` and `sigma` are those of x."""
    drawn = np.random.default_rng(seed).lognormal(mean, sigma, documents)
    return drawn.clip(1, most).astype(np.int64)


def sft_mix(documents: int, seed: int = 0) -> Integers:
    """99.89 % of mean 1,000 tokens (σ 0.9) and 0.11 % of mean 37,000 (σ 0.6), lognormal, at most 131,072.

    A stand-in for the fine-tuning mix of Llama 3 as Skrull (arXiv:2505.19609) quotes it.
    """
    rng = np.random.default_rng(seed)
    short = rng.lognormal(np.log(1_000) - 0.9**2 / 2, 0.9, documents)
    long = rng.lognormal(np.log(37_000) - 0.6**2 / 2, 0.6, documents)
    return np.where(rng.random(documents) < 0.0011, long, short).clip(1, 131_072).astype(np.int64)


def python_files() -> Integers:
    """A quarter of the bytes of each file of this Python's standard library: about its tokens, heavy-tailed."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return np.array([max(1, path.stat().st_size // 4) for path in files], dtype=np.int64)


def real_sets() -> Iterator[tuple[str, Integers]]:
    """The real sets of short documents that are at hand."""
    for name in (
        "openchat_v1",
        "instructlab_sdg_24k",
        "natural_instructions_193k",
        "stdlib311_doc2src",
        "gsm8k_train",
        "tinyshakespeare_speeches",
    ):
        lengths = load(name)
        if lengths is not None:
            yield name, lengths


def heavy_sets(capacity: int) -> list[tuple[str, Integers]]:
    """Sets with heavy tails, cut to the capacity: real file lengths, and drawn ones like known corpora."""
    return [
        ("Python files (real)", python_files().clip(max=capacity)),
        ("lognormal (5.7, 1.0)", lognormal(100_000, 5.7, 1.0, min(capacity, 8192))),
        ("code-like (6.5, 1.5)", lognormal(30_000, 6.5, 1.5, capacity)),
        ("prose-like (8.0, 1.2)", lognormal(10_000, 8.0, 1.2, capacity)),
        ("mail-like (5.0, 1.3)", lognormal(50_000, 5.0, 1.3, capacity)),
    ]
