"""Packing tools side by side: nineteen rows on thirteen sets of lengths, each set with a proven bound.

    python benchmarks/packing                      everything, about five minutes on one core
    python benchmarks/packing --page               the page and the picture again, from the last figures

The whole run writes results/packing.json, docs/packing-benchmark.md and docs/packing-benchmark.png. A row is added by a
function and a line in `tools.py`, a set by a line in `sets.py`. Tools of packages run where these are installed:

    pip install 'multipack[bench]' && pip install --no-deps axolotl
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: CPU seconds of one thread

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of a script it is this folder

from multipack.planning.packing import pack
from packing import page
from packing.measure import RANKS, measure
from packing.sets import ONE_TOO_LONG, SETS, Lengths
from packing.tools import TOOLS, Tool
from planning_tables.table import aligned
from result import parser_of, write_result


def figures_of(each: Lengths, lengths: np.ndarray[Any, Any], tools: list[Tool]) -> dict[str, Any]:
    """A set's bound, and the measures of every tool on it; of a tool that refuses, the error's first line."""
    fits = lengths[lengths <= each.capacity]
    fewest, found = pack(fits, each.capacity, "fewest"), {}
    for tool in tools:
        try:
            found[tool.name] = asdict(measure(tool, lengths, each.capacity, fewest))
        except (ValueError, RuntimeError) as error:
            found[tool.name] = {"refused": str(error).splitlines()[0]}
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "capacity": each.capacity,
        "longest": int(lengths.max()),
        "fewest": len(fewest),
        "bound": fewest.lower_bound,
        "tools": found,
    }


def main() -> None:
    """Measure, print, and write."""
    parser = parser_of(__doc__, "packing")
    parser.add_argument("--page", action="store_true", help="write page and picture from the last figures")
    options = parser.parse_args()
    if not options.page:
        write_result(options.out, run())
    page.write(json.loads(options.out.read_text(encoding="utf-8")))


def run() -> dict[str, Any]:
    """Measure the tools that are installed on all sets, and print each table."""
    tools = [tool for tool in TOOLS if not tool.absent]
    start = time.perf_counter()
    for tool in tools:
        tool.run(np.arange(1, 400), 512, RANKS, 0)  # imports and compiles
    sets: dict[str, Any] = {}
    for each in SETS:
        if (lengths := each.read()) is None:
            print(f"\n{each.name}: left out, the lengths in ../shared/data/lengths are not there")
            continue
        sets[each.name] = figures_of(each, lengths, tools)
        print(
            f"\n{page.title(each.name, sets[each.name])}\n\n{aligned(page.set_rows(sets[each.name]))}",
            flush=True,
        )
    lengths = ONE_TOO_LONG.read()
    assert lengths is not None
    too_long = figures_of(ONE_TOO_LONG, lengths, tools)
    print("\none document is too long\n\n" + aligned(page.too_long_rows(too_long)))
    absent = sorted({str(tool.package) for tool in TOOLS if tool.absent})
    print(f"\n{time.perf_counter() - start:.0f} s" + f"; not installed: {', '.join(absent)}" * bool(absent))
    return {
        "ranks": RANKS,
        "tools": {tool.name: {"how": tool.how, "source": tool.source} for tool in tools},
        "absent": absent,
        "sets": sets,
        "one too long": too_long,
    }


if __name__ == "__main__":
    main()
