"""benchmarks/integrations.py: every row runs, and the stored figures are those of a whole run."""

from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def integrations(script):
    return script("integrations")


def test_stored_figures(figures):
    saved = figures("integrations")
    assert not saved["quick"]
    rows = {
        table["name"]: [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        for table in saved["tables"]
    }
    for row in rows["attention"]:
        assert row["times faster"] > 1
        assert row["largest tensor, MB"] < row["beside, MB"]
    for row in rows["hosts"]:
        assert row["trained"] == row["of"]  # by TRL too: none is longer than a pack
        assert row["multipack over it"] > (1.5 if row["way"] == "TRL bfd" else 0.9)


def test_the_page_of_hosts_has_the_stored_figures(integrations, figures):
    """Written by `python benchmarks/integrations.py --page`."""
    assert integrations.SUITE.page(figures("integrations")) in (ROOT / "docs" / "hosts.md").read_text()


def test_attention(integrations):
    assert len(integrations.attention_table(quick=True).rows) == len(integrations.MODELS)


@pytest.mark.parametrize("way", ["multipack", "TRL bfd", "padded", "group_by_length"])
def test_every_host_trains_every_document(script, way):
    for package in ("transformers", "accelerate", "datasets", *(["trl"] if way == "TRL bfd" else [])):
        pytest.importorskip(package, reason=f"{package} is not installed")
    host_runs = script("host_runs")

    fields = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    documents = [[2 + number] * length for number, length in enumerate([9, 30, 4, 17, 25, 12])]
    speed = host_runs.run(way, documents, fields, 40, 2, clock=count().__next__)
    assert speed.documents == 6
    assert speed.tokens <= speed.slots
    assert speed.steps == speed.seconds > 0
