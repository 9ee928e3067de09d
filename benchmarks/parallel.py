"""Cost and traffic of parallel methods: scaling, overhead, bytes against formulas, a thousand simulated ranks.

    python benchmarks/parallel.py                     every table, about five minutes on a quiet machine
    python benchmarks/parallel.py --quick             every table with less work, about a minute
    python benchmarks/parallel.py --table traffic     one table; give the option again for more
    python benchmarks/parallel.py --show              the figures that were written last, without measuring
    python benchmarks/parallel.py --page              the same, into docs/parallel.md

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

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel_tables import overhead, scaling, simulated, traffic
from planning_tables.table import Table, aligned, grid, markdown, verdicts
from result import write_result

RESULTS = Path(__file__).parent / "results" / "parallel.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "parallel.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

TABLES: dict[str, Callable[[bool], Table]] = {
    "scaling": scaling.table,
    "overhead": overhead.table,
    "traffic": traffic.table,
    "simulated": simulated.table,
}


def measure(names: list[str], quick: bool) -> list[dict[str, Any]]:
    """Make and print these tables; each keeps its time and the load before and after."""
    made = []
    for name in names:
        before, began = os.getloadavg()[0], time.perf_counter()
        table = TABLES[name](quick)
        seconds, load = time.perf_counter() - began, [round(each, 2) for each in (before, os.getloadavg()[0])]
        made.append({**table.to_dict(), "seconds": round(seconds, 1), "load_before_and_after": load})
        show(made[-1])
    return made


def parts(values: dict[str, Any]) -> tuple[Table, str]:
    """A table, and its time and load as text."""
    own = {name: value for name, value in values.items() if name not in ("seconds", "load_before_and_after")}
    before, after = values["load_before_and_after"]
    return Table.from_dict(own), f"{values['seconds']:.0f} s, load {before:g} before and {after:g} after"


def show(values: dict[str, Any]) -> None:
    """Print a table, its verdicts and its notes."""
    table, how = parts(values)
    print(f"\n{table.name}: {table.title} ({how})\n")
    print(aligned(grid(table)) if table.rows else "  no rows")
    if table.asked:
        print("\n" + aligned(verdicts(table.asked)))
    for note in table.notes:
        print(f"  {note}")


def page(saved: dict[str, Any]) -> str:
    """The tables in Markdown."""
    machine = saved["machine"]
    text = [f"Measured on {machine['cpu']}, torch {machine['torch']}, one thread for each process."]
    for values in saved["tables"]:
        table, how = parts(values)
        text += [
            f"### {table.name}\n\n{table.title[0].upper()}{table.title[1:]} ({how}).",
            markdown(grid(table)),
        ]
        if table.asked:
            text.append(markdown(verdicts(table.asked)))
        text.append("\n".join(f"- {note}." for note in table.notes))
    return "\n\n".join(text)


def write_page(saved: dict[str, Any]) -> None:
    """Put the tables between the marks of docs/parallel.md."""
    text = PAGE.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{PAGE} lacks the marks {BEGIN} and {END}, between which the tables go")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(saved)}\n\n{END}{after}", encoding="utf-8")
    print(f"wrote {PAGE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = list(TABLES)
    parser.add_argument("--table", action="append", choices=known, help="only this; may be repeated")
    parser.add_argument(
        "--quick", action="store_true", help="less work: for a look, not for figures to quote"
    )
    parser.add_argument("--show", action="store_true", help="print what was written last, measure nothing")
    parser.add_argument("--page", action="store_true", help="write what was written last to docs/parallel.md")
    parser.add_argument("--out", type=Path, help=f"JSON file; {RESULTS.name} in results/ after a full run")
    options = parser.parse_args()
    names = options.table or known
    if options.show or options.page:
        saved = json.loads((options.out or RESULTS).read_text(encoding="utf-8"))
        if options.page:
            write_page(saved)
        for values in saved["tables"] if options.show else []:
            if values["name"] in names:
                show(values)
        return
    made = [values for values in measure(names, options.quick) if values["rows"]]
    if options.out is not None or not (options.quick or options.table):
        write_result(options.out or RESULTS, {"quick": options.quick, "tables": made})


if __name__ == "__main__":
    main()
