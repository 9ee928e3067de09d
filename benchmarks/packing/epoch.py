"""`Epoch`: the packs that ranks train in an epoch, as flat arrays, and how tools share packs out to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Epoch:
    """An epoch of any tool: pack m · ranks + r is what rank r computes in micro-batch m.

    Attributes:
        order: (entries,) document numbers, pack after pack. A document may be missing, or occur more than once.
        offsets: (packs + 1,) start of each pack in `order`. A rank without documents has an empty pack.
        rows: what is computed for a pack: its `documents`, each attending to itself; one sequence of all (`joined`); or
            a row a document, `padded` to the longest.
        tokens: (entries,) tokens of each entry where documents are cut or truncated; None = whole documents.
        step_of: (micro-batches,) optimizer step of each; None = each is a step.
        seconds: CPU seconds of the tool's own call, where the function also converts data; None = all of it.
    """

    order: Integers
    offsets: Integers
    rows: Literal["documents", "joined", "padded"] = "documents"
    tokens: Integers | None = None
    step_of: Integers | None = None
    seconds: float | None = None


def flat(packs: Iterable[Sequence[int] | Integers]) -> tuple[Integers, Integers]:
    """`order` and `offsets` of packs given as lists or arrays of document numbers."""
    arrays = [np.asarray(pack, dtype=np.int64) for pack in packs]
    offsets = np.cumsum([0, *map(len, arrays)])
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64), offsets


def by_pack(pack_of: Integers, documents: Integers) -> list[Integers]:
    """Packs from the pack number of each document; documents with −1 are in none."""
    documents, pack_of = documents[pack_of >= 0], pack_of[pack_of >= 0]
    inside = documents[np.argsort(pack_of, kind="stable")]
    return np.split(inside, np.cumsum(np.bincount(pack_of))[:-1]) if len(inside) else []


def shuffled(documents: int, seed: int | None) -> Integers:
    """Document numbers in a random order, or in their own (seed None)."""
    return np.arange(documents) if seed is None else np.random.default_rng(seed).permutation(documents)


def repeated(packs: Sequence[Integers], ranks: int, seed: int | None) -> list[Integers]:
    """Packs in a random order (in their own with seed None), the first ones again until the last step is whole.

    torch's DistributedSampler and accelerate's `even_batches` share a data set of packs out in this way.
    """
    packs = [packs[number] for number in shuffled(len(packs), seed)]
    return packs + [packs[number % len(packs)] for number in range(-len(packs) % ranks)]


def whole_steps(packs: Sequence[Integers], ranks: int) -> Sequence[Integers]:
    """Packs without those of the last step, if they are fewer than the ranks (`drop_last`)."""
    return packs[: len(packs) // ranks * ranks]
