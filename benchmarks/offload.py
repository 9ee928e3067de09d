"""Memory that a decoder of 29 million parameters adds to one process, with its state in memory and in files.

    python benchmarks/offload.py

MiB after two steps, of /proc/self/smaps_rollup (Linux): the process's own, and all that is resident, with pages of
files, which the kernel may drop.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a thread for each process

import ctypes
import gc
import re
import tempfile
from pathlib import Path
from typing import Any

from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.world import World
from multipack.shapes import ModelShape
from parallel_tables.ranks import Ranks
from parallel_tables.setups import engine_of, pack_of, train_step

SMALL = ModelShape(layers=1, heads=2, d_model=16, d_ff=32, context=64, vocabulary_size=64, tied=False)
WIDE = ModelShape(layers=8, heads=8, d_model=512, d_ff=1408, context=64, vocabulary_size=4096, tied=False)
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp offload=disk": {"offload": "disk"},
    "zero3": {"data": "zero3"},
    "zero3 offload=disk": {"data": "zero3", "offload": "disk"},
}


def offloaded() -> dict[str, tuple[float, float]]:
    """Way → MiB that a decoder adds to a process after two steps: its own, and with pages of files."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed tensors go back to the system
    found = {}
    for name, words in WAYS.items():
        with tempfile.TemporaryDirectory() as folder, Ranks(1) as ranks:
            folders = {"offload_folder": folder} if "offload" in words else {}
            (found[name],) = ranks.run(_resident, ParallelConfig(**words, **folders))
    return found


def _resident(world: World, config: ParallelConfig) -> tuple[float, float]:
    pack = pack_of([64], 64, WIDE.vocabulary_size)
    small = engine_of(world, SMALL)  # what a first step loads is not counted
    train_step(small, [pack_of([64], 64, SMALL.vocabulary_size)], 1)
    before = _memory()
    engine = engine_of(world, WIDE, config)
    for _ in range(2):
        train_step(engine, [pack], 1)
        for parameter in engine.parameters.values():
            parameter.grad = None
    own, resident = (after - least for after, least in zip(_memory(), before, strict=True))
    return own, resident


def _memory() -> tuple[float, float]:
    """MiB of this process that no file backs, and all of its resident MiB; freed memory is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/smaps_rollup").read_text()
    anonymous, resident = (
        re.search(rf"^{name}: +(\d+)", text, re.MULTILINE) for name in ("Anonymous", "Rss")
    )
    assert anonymous
    assert resident
    return int(anonymous[1]) / 1024, int(resident[1]) / 1024


if __name__ == "__main__":
    print(f"{'parallel.…':22}{'own MiB':>10}{'resident MiB':>14}")
    for name, (own, resident) in offloaded().items():
        print(f"{name:22}{own:10,.0f}{resident:14,.0f}", flush=True)
