"""benchmarks/leak_census.py: a few architectures again, against the committed page and figures."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
transformers = pytest.importorskip("transformers")


@pytest.fixture
def census(script):
    return script("leak_census")


@pytest.fixture
def saved(figures):
    return figures("leak_census")


def test_stored_figures_are_those_asked_for(census, saved):
    counts = saved["counts"]
    assert counts["built"] >= 150
    assert counts["silent"] == []
    assert counts["ok"] + counts["ok_with_4d_mask"] + counts["refused"] == counts["built"]
    assert counts == {**counts, **census.counts(saved["rows"])}
    assert (ROOT / "docs" / "leak-census.md").read_text() == census.page(saved["rows"], saved["versions"])


@pytest.mark.parametrize("name", ["llama", "opt", "mamba"])
def test_architectures_are_as_on_the_page(census, saved, name):
    if saved["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the page is of another version of transformers")
    (stored,) = (row for row in saved["rows"] if row["name"] == name)
    census.register()
    assert census.summary(census.row_of(name)) == census.summary(stored)


def test_what_cannot_be_built_is_listed(census):
    rows = [{"name": "one", "not_built": "too large"}]
    assert "- one: too large" in census.page(rows, {"transformers": "5", "torch": "2"})
    assert census.counts(rows)["not_built"] == 1
