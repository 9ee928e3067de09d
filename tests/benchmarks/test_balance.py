"""benchmarks/balance.py: the method that ours is compared with, and the stored figures."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def test_karmarkar_karp_divides_as_published(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    method = importlib.import_module("balance").karmarkar_karp
    weights = np.array([8, 7, 6, 5, 4])
    assert sorted(int(weights[part].sum()) for part in method(weights, 2)) == [14, 16]
    assert [] in method(np.array([3, 3, 0, 0]), 4)
    sys.modules.pop("balance")


def test_stored_figures_are_those_asked_for():
    saved = json.loads((ROOT / "benchmarks" / "results" / "balance.json").read_text())
    asked = [each for table in saved["tables"] for each in table["asked"]]
    assert not saved["quick"]
    assert len(asked) == 3
    assert all(each["reached"] <= each["asked"] for each in asked)
