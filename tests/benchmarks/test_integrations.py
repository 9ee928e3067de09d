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
    assert all(row["times faster"] > 2 for row in rows["collation"])


def test_the_page_of_hosts_has_the_stored_figures(integrations, figures):
    """Written by `python benchmarks/integrations.py --page`."""
    assert integrations.SUITE.page(figures("integrations")) in (ROOT / "docs" / "hosts.md").read_text()


def test_attention(integrations):
    assert len(integrations.attention_table(quick=True).rows) == len(integrations.MODELS)


def test_collation(integrations):
    pytest.importorskip("transformers", reason="transformers is not installed")
    table = integrations.collation_table(quick=True)
    assert len(table.rows) == 12
    assert all(row[-1] > 0 for row in table.rows)


def test_start_up(integrations, monkeypatch):
    monkeypatch.setattr(integrations, "COMMANDS", dict(list(integrations.COMMANDS.items())[:3]))
    table = integrations.start_up_table(quick=True)
    assert [row[0] for row in table.rows] == list(integrations.COMMANDS)
    assert all(wall > 0 for _, wall, _ in table.rows)


@pytest.mark.parametrize("way", ["multipack", "multipack, sdpa", "TRL bfd", "padded", "group_by_length"])
def test_every_host_trains_every_document(script, way):
    for package in ("transformers", "accelerate", "datasets", *(["trl"] if way == "TRL bfd" else [])):
        pytest.importorskip(package, reason=f"{package} is not installed")
    host_runs = script("host_runs")

    shape = host_runs.ModelShape(layers=1, heads=2, d_model=16, d_ff=16, vocabulary_size=64)
    documents = [[2 + number] * length for number, length in enumerate([9, 30, 4, 17, 25, 12])]
    speed = host_runs.run(way, documents, shape, 40, 2, clock=count().__next__)
    assert speed.documents == 6
    assert speed.tokens <= speed.slots
    assert speed.steps == speed.seconds > 0
