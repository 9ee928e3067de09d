"""Fewest packs and fast best fit: Krell's histograms, LightBinPack's benchmark, speed beside peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from multipack.planning.packing import Method, Packs, pack
from planning_tables.lengths import ABSENT, Integers, from_histogram, lognormal
from planning_tables.table import MEASURED, PUBLISHED, Table, cpu_seconds, missing

CAPACITY = 8192


def checked(packs: Packs, lengths: Integers, capacity: int) -> Packs:
    """These packs, unless one is too full or a document is not in exactly one.

    Raises:
        ValueError: the packs are no packing of these documents.
    """
    times = np.bincount(packs.order, minlength=len(lengths))
    if len(times) != len(lengths) or (times != 1).any() or packs.totals(lengths).max() > capacity:
        raise ValueError(f"{packs!r} is no packing into packs of at most {capacity:,} tokens")
    return packs


COLUMNS = {
    "": "", "source": "", "documents": ",", "packs": ",", "bound": ",", "gap": ",", "filled": "%", "CPU s": ".2f",
}  # fmt: skip
PUBLISHED_ROWS = {
    "wikipedia512_histogram": (
        ("SPFHP", 8_166_708, 0.996040),
        ("LPFHP, depth 12", 8_149_619, 0.998129),
        ("LPFHP (best fit)", 8_138_483, 0.999494),
        ("NNLSHP, depth 3", None, 0.9975),
    ),
    "squad384_histogram": (("SPFHP", 40_711, 0.975466), ("LPFHP (best fit)", 40_631, 0.977386)),
}
ASKED = {
    "wikipedia512_histogram": ("Wikipedia", 512, 8_135_728, 8_135_727, 0.99949),
    "squad384_histogram": ("SQuAD", 384, 40_196, 40_195, 0.97739),
}


def krell(quick: bool) -> Table:
    """The two histograms of Krell et al. 2021 (arXiv:2107.02027)."""
    made = Table("krell", "Histograms of Krell et al. 2021: packs, proven bound, share filled", COLUMNS)
    pack([1, 2, 3], 4, "best_fit")
    pack([1, 2, 3], 4, "fewest")  # compiles, and loads SciPy
    for name, (title, capacity, packs, bound, best) in ASKED.items():
        for other, number, filled in PUBLISHED_ROWS[name]:
            made.row(f"{title}: {other}", PUBLISHED, None, number, None, None, filled, None)
        lengths = from_histogram(name)
        if lengths is None:
            made.notes.append(f"{title}: {ABSENT}")
            continue
        tokens = int(lengths.sum())
        methods: tuple[Method, ...] = ("best_fit", "fewest")
        for method in methods:
            seconds, found = cpu_seconds(partial(pack, lengths, capacity, method), 1)
            checked(found, lengths, capacity)
            filled = tokens / (len(found) * capacity)
            values = (len(lengths), len(found), found.lower_bound, found.gap, filled, seconds)
            made.row(f"{title}: multipack {method}", MEASURED, *values)
        made.at_most(f"{title}: packs of fewest", len(found), packs)
        made.at_least(f"{title}: proven bound", found.lower_bound, bound)
        made.at_least(f"{title}: filled, published best {best:.3%}", filled, best, "%")
        made.at_most(f"{title}: CPU s of fewest", seconds, 10.0, ".2f")
    made.notes.append(
        "published: Krell et al. 2021 and the code beside it; packs counted from its algorithms"
    )
    return made


def speed(quick: bool) -> Table:
    """Best fit of many documents to flat arrays, beside the peers' best fits in the same process."""
    columns = {
        "": "", "documents": ",", "packs": ",", "gap": ",", "CPU s": ".4f", "documents a second": ",.0f",
        "ratio": ".1f",
    }  # fmt: skip
    title = f"Best fit of lognormal (5.7, 1.0) lengths clipped to {CAPACITY:,}, alternating in one process"
    made = Table("speed", title, columns)
    pack([1, 2, 3], 4)
    peers = {"LightBinPack obfd": missing("lightbinpack"), "TRL bfd": missing("trl", "datasets", "pyarrow")}
    made.notes += [f"{name}: {absent}" for name, absent in peers.items() if absent]
    asked = {1_000_000: 0.04, 10_000_000: 0.4}
    for documents in (100_000, 1_000_000) if quick else (100_000, 1_000_000, 10_000_000):
        lengths = lognormal(documents, 5.7, 1.0, CAPACITY)
        ways: dict[str, Callable[[], Any]] = {"multipack best_fit": partial(pack, lengths, CAPACITY)}
        if not peers["LightBinPack obfd"] and documents <= 1_000_000:
            ways["LightBinPack obfd"] = _lightbinpack(lengths)
        if not peers["TRL bfd"] and documents <= 100_000:  # its Python takes minutes for more
            ways["TRL bfd"] = _trl(lengths)
        best, bound = None, 0
        for name, way in ways.items():
            spent, packs = cpu_seconds(way, 2)
            if best is None:
                best, bound = spent, checked(packs, lengths, CAPACITY).lower_bound
            number = packs if isinstance(packs, int) else len(packs)
            made.row(name, documents, number, number - bound, spent, documents / spent, spent / best)
        if documents in asked:
            made.at_most(f"best fit of {documents:,}: CPU s", best, asked[documents], ".4f")
    made.notes.append(
        "ratio: CPU time over multipack's; TRL packs all rows as one batch (its default packs each 1,000 by"
        " themselves) and moves one byte a token; LightBinPack takes and gives Python lists, made beforehand"
    )
    made.notes.append("published: LightBinPack packs 10 M in 2.8 s, multipack V2 in 3.1 s a rank (two cores)")
    return made


def _lightbinpack(lengths: Integers) -> Callable[[], Any]:
    """LightBinPack's best fit on a list."""
    import lightbinpack

    return partial(lightbinpack.obfd, lengths.tolist(), CAPACITY)


def _trl(lengths: Integers) -> Callable[[], int]:
    """TRL's best fit on a table of documents, one byte a token."""
    import pyarrow
    from trl.data_utils import _pack_bfd

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pyarrow.array(np.zeros(offsets[-1], dtype=np.int8))
    documents = pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(pyarrow.array(offsets), tokens)})
    return lambda: len(_pack_bfd(documents, CAPACITY))
