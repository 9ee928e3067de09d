"""The planner's tables: packs, steps, balance, speed and compilation, each beside what was asked and published.

    python benchmarks/planning.py                     every table, a few minutes
    python benchmarks/planning.py --quick             every table with less data, under a minute
    python benchmarks/planning.py --table openchat    one table; give the option again for more
    python benchmarks/planning.py --page              the figures that were written last, into docs/planning.md

One thread; seconds are CPU seconds of the process, the least of several calls, so that a busy machine matters
little; compilation has a separate table. Everything is measured here but the rows marked `published` and
the figures under `asked`. LightBinPack and TRL run beside ours where they are installed: pip install
'multipack[bench]'. A full run writes results/planning.json; a quick or partial one only where --out says so.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: CPU seconds of one thread

from planning_tables import compiling, epochs, former, large, openchat, packing
from planning_tables.command import Suite

NOTE = (
    "Bounds on CPU seconds were asked for a machine two to three times as fast: on this one the planner before the"
    " rewrite takes 142 ms (OpenChat), 10 to 11 s (10 M documents), 0.53 s (1,024 ranks) and 35 s (empty cache)."
)

SUITE = Suite(
    name="planning",
    tables={
        "openchat": openchat.table,
        "krell": packing.krell,
        "speed": packing.speed,
        "large": large.table,
        "thousand": large.thousand,
        "real": epochs.real,
        "heavy": epochs.heavy,
        "compilation": compiling.table,
        "former": former.table,
    },
    measured_on=lambda machine: (
        f"Measured on {machine['cpu']}, Python {machine['python']}, numpy {machine['numpy']}, one thread. {NOTE}"
    ),
)

if __name__ == "__main__":
    SUITE.main(__doc__)
