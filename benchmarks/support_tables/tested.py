"""Which settings the tests of several processes run, read from their parameters.

@pytest.mark.parametrize(("ranks", "words"), …)    tests/distributed: test_parity.py, test_strategies.py
def test_the_whole_matrix(…)                       each case is compared with one process
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "tests" / "distributed"
TESTS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "": (("test_parity.test_every_method_alone_on_two_ranks", {}), ("test_parity.test_the_whole_matrix", {})),
    "parallel.offload=disk parallel.offload_folder=.": (
        ("test_parity.test_files_on_ranks", {"words.offload": "disk"}),
    ),
    "optimizer.name=muon": (("test_parity.test_muon", {}),),
    "optimizer.name=adamw_bf16": (("test_parity.test_compact_moments", {"optimizer": "adamw_bf16"}),),
    "optimizer.name=adamw_8bit": (("test_parity.test_compact_moments", {"optimizer": "adamw_8bit"}),),
    "adapter=lora adapter.base=FOLDER": (("test_parity.test_adapters", {"adapter": "lora"}),),
    "adapter=qlora adapter.base=FOLDER": (
        ("test_parity.test_quantized_weights_equal_dequantized_ones_in_one_process", {"adapter": "qlora"}),
    ),
    "preference pairs (DPO)": (("test_strategies.test_preferences_are_trained_on_divided_models", {}),),
    "preference pairs (DPO) preference.loss=reward": (
        ("test_strategies.test_rewards_are_trained_on_ranks", {}),
    ),
    "labeled answers (KTO)": (("test_strategies.test_labels_and_weights_are_trained_on_ranks", {}),),
    "data.readers=1": (
        ("test_strategies.test_labels_and_weights_are_trained_on_ranks", {"parallel": "data.readers=1"}),
    ),
    "parallel.offload=cpu": (("test_parity.test_the_whole_matrix", {"words.offload": "cpu"}),),
}
"""Row of the table of multipack train → tests with that setting, and which of their parameters have it."""
DEFAULT = {"data": "ddp", "schedule": "1f1b"}


def runs(row: str, method: str) -> bool:
    """Whether a test runs a row's settings under a method, and compares them with one process.

    Args:
        row: settings, as in `TESTS`.
        method: settings of the method; empty = DDP.
    """
    cases = [
        case for test, which in TESTS.get(row, ()) for case in _cases(test) if which.items() <= case.items()
    ]
    wanted = _method(dict(word.removeprefix("parallel.").split("=") for word in method.split()))
    return any(_method(_given(case)) == wanted for case in cases)


def is_run_alone(row: str) -> bool:
    """Whether a test compares several processes with one process under a row's settings."""
    return any(True for test, _ in TESTS.get(row, ()) for _ in _cases(test))


def _given(case: dict[str, Any]) -> dict[str, Any]:
    """Methods of a case: of its dictionary `words`, or its text `parallel`."""
    found = {name.removeprefix("words."): value for name, value in case.items() if name.startswith("words.")}
    words = [word for word in str(case.get("parallel", "")).split() if word.startswith("parallel.")]
    return found | dict(word.removeprefix("parallel.").split("=") for word in words)


def _method(given: dict[str, Any]) -> dict[str, str]:
    """What distinguishes the columns; the schedule of a pipeline beside other methods does not."""
    values = {name: str(value) for name, value in given.items() if name not in ("offload", "replicate")}
    if values.get("schedule") == "gpipe" or len(values) > 2:
        values.pop("schedule", None)
    return {name: value for name, value in values.items() if DEFAULT.get(name) != value}


@cache
def _cases(test: str) -> tuple[dict[str, Any], ...]:
    """The parameters of each case of a test, whose dictionaries are taken apart: {"words.data": "zero3", …}."""
    module, _, function = test.partition(".")
    sys.path.insert(0, str(FOLDER))
    try:
        marks = getattr(importlib.import_module(module), function).pytestmark
    finally:
        sys.path.remove(str(FOLDER))
    lists = [list(_values(mark)) for mark in marks if mark.name == "parametrize"]
    return tuple(
        {name: value for part in chosen for name, value in part.items()} for chosen in product(*lists)
    )


def _values(mark: Any) -> Iterator[dict[str, Any]]:
    names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
    for given in mark.args[1]:
        values = given.values if hasattr(given, "marks") else given  # of pytest.param
        if not isinstance(values, tuple):
            values = (values,)
        case: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            is_dict = isinstance(value, dict)
            case |= {f"{name}.{key}": each for key, each in value.items()} if is_dict else {name: value}
        yield case
