"""Cost and traffic of parallel methods: scaling, overhead, bytes against formulas, a thousand simulated ranks.

    python benchmarks/parallel.py                     every table, about five minutes on a quiet machine
    python benchmarks/parallel.py --quick             every table with less work, about a minute
    python benchmarks/parallel.py --table traffic     one table; give the option again for more
    python benchmarks/parallel.py --show              the figures that were written last, without measuring
    python benchmarks/parallel.py --page              the same, into docs/parallel/measured.md

    scaling     weak scaling of ddp and zero3 from one process to two, beside two processes that do not communicate
    overhead    every strategy applied to a single process, against plain training
    traffic     bytes handed to collectives against launch/traffic.py, on 2 and 4 processes
    simulated   8 to 1,024 ranks: a step's time under a cost measured here, against perfect balance

Processes have one thread each. Ratios are of measurements that alternate in one run. Each table keeps the machine's
load; seconds on the wall mean little if it exceeds the number of processes. A full run writes results/parallel.json;
a quick or partial run writes only to --out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a thread for each process

from parallel_tables import overhead, scaling, simulated, traffic
from planning_tables.command import Suite

SUITE = Suite(
    name="parallel",
    document="parallel/measured",
    tables={
        "scaling": scaling.table,
        "overhead": overhead.table,
        "traffic": traffic.table,
        "simulated": simulated.table,
    },
    measured_on=lambda machine: (
        f"Measured on {machine['cpu']}, torch {machine['torch']}, one thread for each process."
    ),
)

if __name__ == "__main__":
    SUITE.main(__doc__)
