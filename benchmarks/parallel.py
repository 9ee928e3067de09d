"""Bytes that parallel methods send in a step, counted as they are handed to collectives, against launch/traffic.py.

    python benchmarks/parallel.py            on 2 and 4 processes, about a minute
    python benchmarks/parallel.py --quick    on 2 processes
    python benchmarks/parallel.py --page     the figures that were written last, into docs/parallel/measured.md

A full run writes results/parallel.json; a quick run writes only to --out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a thread for each process

from parallel_tables import traffic
from planning_tables.command import Suite

SUITE = Suite(
    name="parallel",
    document="parallel/measured",
    tables={"traffic": traffic.table},
    measured_on=lambda machine: (
        f"Measured on {machine['cpu']}, torch {machine['torch']}, one thread for each process."
    ),
)

if __name__ == "__main__":
    SUITE.main(__doc__)
