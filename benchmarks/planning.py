"""The planner's tables: packs, steps, balance, speed and compilation, each beside what was asked and published.

    python benchmarks/planning.py                     every table, a few minutes
    python benchmarks/planning.py --quick             every table with less data, under a minute
    python benchmarks/planning.py --table openchat    one table; give the option again for more
    python benchmarks/planning.py --show              the figures that were written last, without measuring
    python benchmarks/planning.py --page              the same, into docs/planning.md

One thread; seconds are CPU seconds of the process, the least of several calls, so that a busy machine matters
little; compilation is apart, in a table of its own. Everything is measured here but the rows marked `published` and
the figures under `asked`. LightBinPack and TRL run beside ours where they are installed: pip install
'multipack[bench]'. A full run writes results/planning.json; a quick or partial one only where --out says so.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: CPU seconds of one thread

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from planning_tables import compiling, dealing, epochs, large, openchat, packing
from planning_tables.table import Table, aligned, grid, markdown, verdicts

RESULTS = Path(__file__).parent / "results" / "planning.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
LONG = 20  # rows; longer tables are folded in the page
NOTE = (
    "The two cores were shared with four to ten other processes: CPU seconds are 2 to 2.5 times those of an idle"
    " machine. The ceiling is looser than that of version 4. 48 ranks with 64 packs of prose reach 81.9 % at each"
    " micro-batch (85.6 % in version 4). Since this run, 256 ranks with 512 packs of the SFT mix reach 71.3 %."
)
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

TABLES: dict[str, Callable[[bool], Table]] = {
    "openchat": openchat.table,
    "krell": packing.krell,
    "speed": packing.speed,
    "large": large.table,
    "thousand": dealing.thousand,
    "real": epochs.real,
    "heavy": epochs.heavy,
    "dealing": dealing.table,
    "adversarial": epochs.adversarial,
    "compilation": compiling.table,
    "stream": large.stream,
}


def show(table: Table) -> None:
    """Print a table, what was asked of it, and its notes."""
    print(f"\n{table.name}: {table.title}\n")
    print(aligned(grid(table)))
    if table.asked:
        print("\n" + aligned(verdicts(table.asked)))
    for note in table.notes:
        print(f"  {note}")


def summary(tables: list[Table]) -> str:
    """The number of asked figures that were reached."""
    every = [each for table in tables for each in table.asked]
    return f"asked: {sum(each.met is True for each in every)} of {len(every)} reached"


def closing(tables: list[Table]) -> None:
    """Print every asked figure and what was reached."""
    print("\nasked and reached\n")
    print(aligned(verdicts([each for table in tables for each in table.asked])))
    print("\n" + summary(tables))


def write_page(tables: list[Table], machine: dict[str, object], quick: bool) -> None:
    """Put the tables between the marks of docs/planning.md."""
    less = " With --quick: one seed and less data." if quick else ""
    note = f" {NOTE}" if NOTE else ""
    parts = [
        f"Measured on {machine['cpu']}, Python {machine['python']}, numpy {machine['numpy']}, one thread.{less}{note}"
    ]
    parts.append("## Asked and reached\n\n" + summary(tables) + ".")
    parts.append(markdown(verdicts([each for table in tables for each in table.asked])))
    for table in tables:
        rows = markdown(grid(table))
        if len(table.rows) > LONG:
            rows = f"<details><summary>{len(table.rows)} rows</summary>\n\n{rows}\n\n</details>"
        parts += [f"## {table.name}\n\n{table.title}.", rows]
        parts += ["\n".join(f"- {note}." for note in table.notes)] if table.notes else []
    text = PAGE.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{PAGE} lacks the marks {BEGIN} and {END}, between which the tables go")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n\n" + "\n\n".join(parts) + "\n\n" + END + after, encoding="utf-8")
    print(f"wrote {PAGE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", action="append", choices=list(TABLES), help="only this; may be repeated")
    parser.add_argument(
        "--quick", action="store_true", help="less data: for a look, not for figures to quote"
    )
    parser.add_argument("--show", action="store_true", help="print what was written last, measure nothing")
    parser.add_argument("--page", action="store_true", help="write what was written last to docs/planning.md")
    parser.add_argument("--out", type=Path, help=f"JSON file; {RESULTS.name} in results/ after a full run")
    options = parser.parse_args()
    names = options.table or list(TABLES)
    if options.show or options.page:
        saved = json.loads((options.out or RESULTS).read_text(encoding="utf-8"))
        tables = [Table.from_dict(each) for each in saved["tables"] if each["name"] in names]
    else:
        tables = measure(names, options)
    if options.page:
        if options.table:
            raise SystemExit("the page shows every table of a run: leave out --table")
        write_page(tables, saved["machine"], saved["quick"])
        return
    for table in tables if options.show else []:
        show(table)
    closing(tables)


def measure(names: list[str], options: argparse.Namespace) -> list[Table]:
    """Make these tables one after the other, print each, and write them."""
    tables, began = [], time.perf_counter()
    for name in names:
        tables.append(TABLES[name](options.quick))
        show(tables[-1])
        print(f"  ({time.perf_counter() - began:.0f} s since the beginning)", flush=True)
    out = options.out or (RESULTS if set(names) == set(TABLES) and not options.quick else None)
    if out is not None:
        from result import write_result

        figures = {
            "clock": "CPU seconds of the process",
            "quick": options.quick,
            "tables": [table.to_dict() for table in tables],
        }
        write_result(out, figures)
    return tables


if __name__ == "__main__":
    main()
