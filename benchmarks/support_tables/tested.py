"""Which settings the tests of several processes run, read from their tables of cases.

Each case of `FAST` and `SLOW` in tests/distributed/test_parity.py, and of `RUNS` and `SLOW_RUNS` in test_runs.py, is
compared with one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "tests"
TESTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "": ("parity", lambda case: not (case.adapter or case.shares)),
    "parallel.offload=disk parallel.offload_folder=.": (
        "parity",
        lambda case: "offload=disk" in case.strategy,
    ),
    "optimizer.name=muon": ("parity", lambda case: case.optimizer == "muon"),
    "optimizer.name=adamw_bf16": ("parity", lambda case: case.optimizer == "adamw_bf16"),
    "optimizer.name=adamw_8bit": ("parity", lambda case: case.optimizer == "adamw_8bit"),
    "adapter=lora adapter.base=FOLDER": ("parity", lambda case: case.adapter == "lora"),
    "adapter=qlora adapter.base=FOLDER": ("parity", lambda case: case.adapter == "qlora"),
    "preference pairs (DPO)": ("runs", lambda case: case.data == "pairs" and "reward" not in case.shared),
    "preference pairs (DPO) preference.loss=reward": (
        "runs",
        lambda case: case.data == "pairs" and "reward" in case.shared,
    ),
    "labeled answers (KTO)": ("runs", lambda case: case.data == "labels"),
    "data.readers=1": ("runs", lambda case: "data.readers=1" in case.parallel),
    "parallel.offload=cpu": ("parity", lambda case: "offload=cpu" in case.strategy),
}
"""Row of the table of multipack train → a table of cases, and which of them have the row's settings."""
DEFAULT = {"data": "ddp", "schedule": "1f1b"}


def runs(row: str, method: str) -> bool:
    """Whether a test runs a row's settings under a method, and compares them with one process.

    Args:
        row: settings, as in `TESTS`.
        method: settings of the method; empty = DDP.
    """
    return _method(_fields_of_words(method)) in map(_method, _fields(row))


def is_run_alone(row: str) -> bool:
    """Whether a test compares several processes with one process under a row's settings."""
    return any(True for _ in _fields(row))


def _fields(row: str) -> Iterator[dict[str, Any]]:
    """Fields of `ParallelConfig` of each case with a row's settings."""
    if row not in TESTS:
        return
    table, has = TESTS[row]
    module = _module(table)
    if table == "parity":
        yield from (module.fields_of(each.strategy) for each in (*module.FAST, *module.SLOW) if has(each))
    else:
        yield from (
            _fields_of_words(each.parallel) for each in (*module.RUNS, *module.SLOW_RUNS) if has(each)
        )


def _fields_of_words(text: str) -> dict[str, Any]:
    words = [word.removeprefix("parallel.") for word in text.split() if word.startswith("parallel.")]
    return dict(word.split("=") for word in words)


def _method(fields: dict[str, Any]) -> dict[str, str]:
    """What distinguishes the columns; the schedule of a pipeline beside other methods does not."""
    values = {name: str(value) for name, value in fields.items() if name not in ("offload", "replicate")}
    if values.get("schedule") == "gpipe" or len(values) > 2:
        values.pop("schedule", None)
    return {name: value for name, value in values.items() if DEFAULT.get(name) != value}


@cache
def _module(table: str) -> Any:
    folders = [str(FOLDER), str(FOLDER / "distributed")]
    sys.path[:0] = folders
    try:
        return import_module(f"test_{table}")
    finally:
        for folder in folders:
            sys.path.remove(folder)
