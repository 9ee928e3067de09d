"""This planner beside itself at former commits: the ratio of CPU seconds, with and without AVX-512 in numpy.

The commits' sources come from git. Each runs in a process of its own, and the processes take turns, so that a busy
machine slows all of them alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from planning_tables.lengths import DATA
from planning_tables.table import Table
from result import cpu_model

ROOT = Path(__file__).resolve().parents[2]
COMMITS = ("32c4eac", "c4d3aee")
CASES = {
    "best fit": (0, 5, 1.0),
    "OpenChat, joint": (1, 5, 1.0),
    "plan": (1, 1, 1.0),
}
"""Case → number of the commit that it must not be slower than, rounds, largest ratio."""
NOISE = 0.1
"""Ratio of two equal sources on a busy machine, minus 1."""

CHILD = """
import sys, time
import numpy
from multipack import pack, plan

drawn = numpy.random.default_rng(0).lognormal(5.7, 1.0, int(sys.argv[1]))
drawn = drawn.clip(1, 8192).astype(numpy.int64)
real = numpy.load(sys.argv[2]).astype(numpy.int64)

def joint(lengths=real):
    made = plan(lengths, capacity=32768, packs_per_step=8, balance="joint", window=1)
    for step in range(made.num_steps):
        made.deal(step, 8)

cases = {
    "best fit": lambda lengths=drawn: pack(lengths, 8192),
    "plan": lambda lengths=drawn: plan(lengths, capacity=8192, packs_per_step=8, window=16),
    "OpenChat, joint": joint,
}
for case in cases.values():
    case(real[:2000].clip(1, 2048))  # compiles
for line in sys.stdin:
    start = time.process_time()
    cases[line.strip()]()
    print(time.process_time() - start, flush=True)
"""


def avx512() -> str:
    """Names by which numpy knows its code for AVX-512, for NPY_DISABLE_CPU_FEATURES."""
    from numpy._core._multiarray_umath import __cpu_dispatch__

    return " ".join(name for name in __cpu_dispatch__ if "512" in name or name == "X86_V4")


class Planner:
    """A process that plans with the sources of a folder."""

    def __init__(self, source: Path, documents: int, disabled: str) -> None:
        variables = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        if disabled:
            variables["NPY_DISABLE_CPU_FEATURES"] = disabled
        words = [sys.executable, "-c", CHILD, str(documents), str(DATA / "openchat_v1.npy")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env=variables, **pipes)  # type: ignore[call-overload]

    def seconds(self, case: str) -> float:
        """CPU seconds of a case."""
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(60)


def table(quick: bool) -> Table:
    """Seconds here, and their ratio to those of the former commits."""
    documents = 1_000_000 if quick else 10_000_000
    columns = {"": "", "numpy": "", "CPU s": ".3f"}
    columns |= {
        f"{text} {commit}": form for commit in COMMITS for text, form in (("at", ".3f"), ("over", ".2f"))
    }
    title = f"CPU seconds of {documents:,} documents and of OpenChat, over those of former commits, in turns"
    made = Table("former", title, columns)
    if not (DATA / "openchat_v1.npy").exists():
        made.notes.append("skipped: ../shared/data/lengths/openchat_v1.npy is not there")
        return made
    made.notes.append(f"measured on {cpu_model()}, numpy {np.__version__}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sources = [ROOT / "src"]
        for commit in COMMITS:
            archive = subprocess.run(
                ["git", "-C", ROOT, "archive", commit, "src/multipack"], capture_output=True, check=False
            )
            if archive.returncode:
                made.notes.append(f"skipped: git has no commit {commit} here")
                return made
            place = Path(folder) / commit
            place.mkdir()
            subprocess.run(["tar", "x", "-C", place], input=archive.stdout, check=True)
            sources.append(place / "src")
        for name, disabled in (("all features", ""), ("no AVX-512", avx512())):
            planners = [Planner(source, documents, disabled) for source in sources]
            for planner in planners:
                stack.callback(planner.close)
            for case, (commit, rounds, most) in CASES.items():
                rows = [
                    [planner.seconds(case) for planner in planners] for _ in range(1 if quick else rounds)
                ]
                own, *former = (min(column) for column in zip(*rows, strict=True))
                ratios = [own / each for each in former]
                pairs = [value for pair in zip(former, ratios, strict=True) for value in pair]
                made.row(case, name, own, *pairs)
                figure = f"{case}, {name}: CPU seconds over those of {COMMITS[commit]}"
                made.at_most(figure, ratios[commit], most + NOISE, ".2f")
    return made
