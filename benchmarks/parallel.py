"""Parallel methods: bytes sent against formulas, and steps of a thousand simulated ranks.

    python benchmarks/parallel.py                     both tables, about a minute
    python benchmarks/parallel.py --quick             both tables with less work
    python benchmarks/parallel.py --table traffic     one table
    python benchmarks/parallel.py --show              the figures that were written last, without measuring
    python benchmarks/parallel.py --page              the same, into docs/parallel/measured.md

    traffic     bytes handed to collectives against launch/traffic.py, on 2 and 4 processes
    simulated   8 to 1,024 ranks: a step's time under a cost measured here, against perfect balance

A full run writes results/parallel.json; a quick or partial run writes only to --out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a thread for each process

from parallel_tables import simulated, traffic
from planning_tables.command import Suite

SUITE = Suite(
    name="parallel",
    document="parallel/measured",
    tables={
        "traffic": traffic.table,
        "simulated": simulated.table,
    },
    measured_on=lambda machine: (
        f"Measured on {machine['cpu']}, torch {machine['torch']}, one thread for each process."
    ),
)

if __name__ == "__main__":
    SUITE.main(__doc__)
