"""One step of a parallel method, counted: what a rank holds, and what it sends. Takes seconds, on CPU processes.

    python benchmarks/method.py -n 4 data=zero3
    python benchmarks/method.py -n 4 tensor=2 pipeline=2 schedule=gpipe

Words are the settings `parallel.*` without that prefix. The same small decoder, packs and AdamW as in the table
`traffic` of benchmarks/parallel.py, whose formulas stand beside the counted bytes. Bytes are counted as tensors are
handed to collectives and as storages exist; they do not depend on the machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a thread for each process

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import AbstractContextManager

from multipack.parallel.parallel_config import ParallelConfig
from multipack.words import merge
from parallel_tables.ranks import Ranks
from parallel_tables.step import (
    HELD,
    INSTANTS,
    MICRO_BATCHES,
    SHAPE,
    SLOTS,
    Step,
    formula,
    measure,
    parameters,
)

KIB = 1024


def shown(steps: list[Step], config: ParallelConfig) -> str:
    """The counts of a step as text: of the rank that holds most and of the rank that sends most."""
    largest = max(steps, key=lambda step: step.saved + max(sum(held.values()) for held in step.held.values()))
    busiest = max(steps, key=lambda step: step.sent.total())
    lines = [
        f"{len(steps)} ranks; a decoder of {parameters():,} parameters in {SHAPE.layers} layers",
        f"{MICRO_BATCHES} packs of {SLOTS} slots for each replica",
        "",
        f"{'KiB held':28}" + "".join(f"{kind:>12}" for kind in HELD[:3]),
    ]
    for instant in INSTANTS:
        held = largest.held[instant]
        lines.append(f"  {instant:26}" + "".join(f"{held[kind] / KIB:12,.0f}" for kind in HELD[:3]))
    lines += [f"  {'saved for backward, at most':30}{largest.saved / KIB:8,.0f}", ""]
    lines.append(f"{'KiB sent':28}{'calls':>12}{'counted':>12}{'formula':>12}")
    predicted = formula(config, len(steps))
    for kind in predicted:
        name, counted = kind.replace("_", "-"), busiest.sent[kind] / KIB
        lines.append(f"  {name:26}{busiest.calls[kind]:12}{counted:12,.0f}{predicted[kind] / KIB:12,.0f}")
    return "\n".join(lines)


def main(arguments: list[str], open_ranks: Callable[[int], AbstractContextManager[Ranks]] = Ranks) -> None:
    """Measure what the command line says, on processes that `open_ranks` gives for their number."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=4, help="number of processes")
    parser.add_argument("words", nargs="*", help="settings, such as data=zero3 tensor=2")
    given = parser.parse_args(arguments)
    config = merge(ParallelConfig, given.words)
    with open_ranks(given.n) as processes:
        print(shown(measure(config, processes), config))


if __name__ == "__main__":
    main(sys.argv[1:])
