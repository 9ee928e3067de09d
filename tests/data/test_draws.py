"""docs/parallel/reading.md: its table is the benchmark's, which runs."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallel" / "reading.md").read_text()


@pytest.fixture
def draws(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("draws_benchmark", ROOT / "benchmarks" / "draws.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_runs_and_the_page_shows_its_figures(draws):
    result = json.loads((ROOT / "benchmarks" / "results" / "draws.json").read_text())
    assert draws.table(result["rows"], result["epochs"]) in PAGE
    rows = draws.measure(300, (1, 2), 2)
    assert [(row["ranks"], row["way"]) for row in rows] == [
        (ranks, way) for ranks in (1, 2) for way in ("plan", "with replacement", "own shuffles")
    ]
