"""The scripts of benchmarks/, which import each other by name, and the figures that they have written."""

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def script():
    """Name → module; processes that scripts start find them by this path too."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def figures():
    """Name → the figures of the last whole run."""
    return lambda name: json.loads((FOLDER / "results" / f"{name}.json").read_text(encoding="utf-8"))
