"""benchmarks/integrations.py: every row runs, and the stored figures are those of a whole run."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_stored_figures():
    saved = json.loads((ROOT / "benchmarks" / "results" / "integrations.json").read_text())
    (attention,) = (table for table in saved["tables"] if table["name"] == "attention")
    assert not saved["quick"]
    for row in attention["rows"]:
        figures = dict(zip(attention["columns"], row, strict=True))
        assert figures["times faster"] > 1
        assert figures["largest tensor, MB"] < figures["beside, MB"]


def test_quick_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import integrations

    table = integrations.attention_table(quick=True)
    assert len(table.rows) == len(integrations.MODELS)
    sys.modules.pop("integrations")
