"""What compilation costs: once after installation, and in each process that finds the code in its cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from planning_tables.table import Table

FIRST_USE = """
import json, time
clock = time.process_time
began = clock()
import numpy, numba
imported = clock()
from multipack import plan, report, pack
from numba.core.dispatcher import Dispatcher
lengths = numpy.random.default_rng(0).lognormal(6, 1, 1500).clip(1, 2048).astype(numpy.int64)
at_import = sum(isinstance(f, Dispatcher) for f in __import__("gc").get_objects())
loaded = clock()
report(plan(lengths, capacity=2048, packs_per_step=8), 8)
planned = clock()
made = plan(lengths, capacity=2048, packs_per_step=8, balance="joint", tail="drop")
made.deal(0, 8), made.deal(0, 3, "step")
for method in ("next_fit", "first_fit_decreasing", "best_fit", "fewest"):
    pack(lengths, 2048, method)
print(json.dumps({"imports": imported - began, "plan": planned - loaded, "rest": clock() - planned,
                  "at_import": at_import}))
"""


def child(folder: str) -> dict[str, float]:
    """CPU seconds of the parts of a first use in a process with this cache folder."""
    variables = {**os.environ, "NUMBA_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE], env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a process that uses the planner for the first time failed:\n{done.stderr}")
    parts: dict[str, float] = json.loads(done.stdout)
    return parts


def table(quick: bool) -> Table:
    """Empty cache, and from the cache."""
    columns = {"": "", "import numpy, numba": ".2f", "plan and report": ".3f", "every other kernel": ".3f"}
    made = Table(
        "compilation",
        "Compilation: CPU seconds of a process that plans, deals, reports and packs once",
        columns,
    )
    with tempfile.TemporaryDirectory() as folder:
        cold = child(folder)
        warm = min((child(folder) for _ in range(3)), key=lambda each: each["plan"])
    made.row("empty cache", cold["imports"], cold["plan"], cold["rest"])
    made.row("from the cache", warm["imports"], warm["plan"], warm["rest"])
    made.at_most("JIT: functions compiled at import", cold["at_import"], 0)
    made.at_most("JIT: plan and report with an empty cache, CPU s", cold["plan"], 8.0, ".1f")
    made.at_most("JIT: plan and report from the cache, CPU s", warm["plan"], 0.35, ".3f")
    return made
