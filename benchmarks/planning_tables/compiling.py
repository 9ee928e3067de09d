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
SCIPY
scipy_imported = clock()
from numba.core.registry import cpu_target
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
numba_started = clock()
from multipack import pack, plan
from multipack.planning.report import report
loaded = clock()
compiled = lambda: [f for f in __import__("gc").get_objects() if isinstance(f, numba.core.dispatcher.Dispatcher)]
at_import = sum(len(f.signatures) for f in compiled())
counted = clock()  # looking through all objects is this script's work, not the planner's
lengths = numpy.random.default_rng(0).lognormal(6, 1, 400).clip(1, 2048).astype(numpy.int64)
made = plan(lengths, capacity=2048, packs_per_step=4, window=2)
made.deal(0, 4)
planned = clock()
MORE
finished = clock()
print(json.dumps({
    "imports": imported - began, "scipy": scipy_imported - imported,
    "numba": numba_started - scipy_imported, "module": loaded - numba_started,
    "plan": planned - counted, "rest": finished - planned,
    "total": finished - began - (counted - loaded), "at_import": at_import,
}))
"""

EVERY_KERNEL = """
for sync in ("step", "micro"):
    made.deal(0, 2, sync)
for balance in ("joint", "tokens"):
    plan(lengths, capacity=2048, packs_per_step=4, window=2, balance=balance, tail="drop").deal(0, 4)
report(made, 4)
for method in ("next_fit", "first_fit_decreasing", "best_fit", "fewest"):
    pack(lengths, 2048, method)
"""

# Numba tries no folder but the one that is named; below a file none can be made.
ONLY_THE_NAMED_FOLDER = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}


def child(folder: str, everything: bool, **environment: str) -> dict[str, float]:
    """CPU seconds of the parts of a first use in a process with this cache folder."""
    code = FIRST_USE.replace("MORE", EVERY_KERNEL if everything else "")
    code = code.replace("SCIPY", "import scipy.optimize, scipy.sparse" if everything else "")
    variables = {**os.environ, "NUMBA_CACHE_DIR": folder, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a process that uses the planner for the first time failed:\n{done.stderr}")
    parts: dict[str, float] = json.loads(done.stdout)
    return parts


def table(quick: bool) -> Table:
    """Cold, from the cache, and where no cache can be written."""
    made = Table(
        "compilation",
        "Compilation: CPU seconds of a process that plans, deals and packs once",
        {
            "": "",
            "import numpy, numba": ".2f",
            "import scipy": ".2f",
            "start of numba": ".3f",
            "import multipack": ".3f",
            "plan and deal": ".3f",
            "everything else": ".3f",
            "beyond imports": ".3f",
        },
    )

    def beyond(found: dict[str, float]) -> float:
        return found["numba"] + found["module"] + found["plan"] + found["rest"]

    def row(name: str, found: dict[str, float]) -> None:
        parts = [found[part] for part in ("imports", "scipy", "numba", "module", "plan", "rest")]
        made.row(name, *parts, beyond(found))

    with tempfile.TemporaryDirectory() as folder:
        cold = child(folder, everything=True)
        row("empty cache, every kernel", cold)
        again = [child(folder, everything=True) for _ in range(2 if quick else 5)]
        warm = min(again, key=beyond)
        row("from the cache, every kernel", warm)
        lean = min((child(folder, everything=False) for _ in range(2 if quick else 5)), key=beyond)
        row("from the cache, plan and deal", lean)
    made.at_most("JIT: functions compiled at import", cold["at_import"], 0, ",")
    made.at_most("JIT: first use after installation, CPU s", cold["total"], 25.0, ".1f")
    made.at_most("JIT: from the cache, plan and deal, CPU s beyond imports", beyond(lean), 0.35, ".3f")
    made.at_most("JIT: from the cache, every kernel, CPU s beyond imports", beyond(warm), 0.35, ".3f")
    if not quick:
        name, failures = "cache folder cannot be written, plan and deal", 0
        try:
            row(name, child(os.devnull + "/cache", everything=False, **ONLY_THE_NAMED_FOLDER))
        except RuntimeError as error:
            failures = 1
            made.notes.append(f"{name}: {error}")
        made.at_most("JIT: failures where no cache folder can be written", failures, 0)
    made.notes.append(
        "least of several processes where the cache is warm; beyond imports: all but the imports of numpy, numba and"
        " SciPy; start of numba, counted among what is beyond them: the modules of its own, and the BLAS of SciPy, that"
        " numba loads at the first call of any cached function"
    )
    return made
