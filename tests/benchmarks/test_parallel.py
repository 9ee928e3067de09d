"""benchmarks/parallel.py: what its table computes, that it runs, and that the page shows its last figures."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def module(name):
    return importlib.import_module(f"parallel_tables.{name}")


@pytest.fixture(scope="module")
def parallel(script):
    return script("parallel")


@pytest.mark.parametrize("slots", [2, 3, 100, 4096])
def test_lengths_fill_a_pack(slots):
    lengths = module("setups").filling(slots, 30)
    assert sum(lengths) == slots
    assert min(lengths) >= 2


# Traffic


def test_a_row_compares_totals_and_the_worst_kind():
    traffic = module("traffic")
    case, sent = traffic.Case(2, {"data": "zero2"}), Counter()
    sent += module("step").formula(case.config, case.ranks)
    total, calls = sent.total(), Counter(all_gather=5, reduce_scatter=20)
    row = traffic.compared(case, calls, sent)
    assert row == ["data=zero2", 2, "5 all-gather, 20 reduce-scatter", total, total, 1.0, 1.0]
    sent["all_gather"] //= 2
    sent["all_reduce"] = total - sent.total()  # as many bytes, of another kind
    assert traffic.compared(case, calls, sent)[5:] == [1.0, pytest.approx(0.5)]


def test_an_unknown_collective_is_an_error():
    with pytest.raises(ValueError, match="torch's collective barter is not counted"):
        module("step").Counting().count("barter", [])


@pytest.mark.slow
def test_an_error_of_a_rank_is_raised(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "distributed"))
    traffic, ranks, pool = module("traffic"), module("ranks"), importlib.import_module("pool")
    # This process has one fork server, which the pools of other tests use as well.
    monkeypatch.setattr(ranks, "PRELOADED", pool.PRELOADED)
    with pytest.raises(ValueError, match=r"parallel\.tensor=3"), ranks.Ranks(1) as processes:
        module("step").measure(traffic.Case(1, {"tensor": 3}).config, processes)


# The script and its page


def test_every_table_is_written_for_the_page(parallel, tmp_path, monkeypatch):
    monkeypatch.setitem(parallel.SUITE.tables, "traffic", _small)
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["parallel.py", "--table", "traffic", "--quick", "--out", str(out)])
    parallel.SUITE.main("")
    saved = json.loads(out.read_text())
    assert saved["quick"] is True
    assert [values["name"] for values in saved["tables"]] == ["traffic"]
    assert "load" in saved["tables"][0]["how"]
    assert "| data=ddp | 2 |" in parallel.SUITE.page(saved)


def _small(quick):
    assert quick
    made = importlib.import_module("planning_tables.table").Table(
        "traffic", "bytes of a step", {"settings": "", "ranks": ""}
    )
    made.row("data=ddp", 2)
    made.notes.append("few")
    return made


def test_the_page_shows_the_figures_of_the_last_full_run(parallel, figures):
    saved = figures("parallel")
    assert saved["quick"] is False
    assert [values["name"] for values in saved["tables"]] == list(parallel.SUITE.tables)
    assert parallel.SUITE.page(saved) in (ROOT / "docs" / "parallel" / "measured.md").read_text()


@pytest.mark.slow
def test_the_table_runs(parallel, tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["parallel.py", "--quick", "--out", str(out)])
    parallel.SUITE.main("")
    (table,) = json.loads(out.read_text())["tables"]
    assert all(each["reached"] <= each["asked"] for each in table["asked"])
