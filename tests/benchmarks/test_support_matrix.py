"""benchmarks/support_matrix.py: what the code answers today, against the committed page and answers."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "support_matrix.json"
AGAIN = "run `python benchmarks/support_matrix.py`"
for host in ("transformers", "accelerate", "pydantic", "datasets"):
    pytest.importorskip(host, reason=f"{host} is not installed")


@pytest.fixture(scope="module")
def matrix(script):
    return script("support_matrix")


@pytest.fixture(scope="module")
def saved(matrix):
    return matrix.saved(RESULTS)


def test_the_page_shows_the_saved_answers(matrix, saved):
    assert (ROOT / "docs" / "support.md").read_text() == matrix.page(saved), AGAIN
    assert list(saved) == list(matrix.TABLES)


def test_every_table_has_refusals_of_one_line(saved):
    for table in saved.values():
        answers = [text for row in table.rows.values() for text in row]
        assert len({text for text in answers if len(text) > 20}) >= 5, table.title
        assert "" in answers, table.title
        assert not any("\n" in text for text in answers), table.title


def test_what_is_shown_as_run_is_run_by_a_test(matrix, saved):
    """FSDP and DeepSpeed under hosts have no test yet."""
    from support_tables.own import METHODS
    from support_tables.table import ACCEPTED
    from support_tables.tested import TESTS, is_run_alone, runs

    assert all(is_run_alone(row) for row in TESTS)
    rows = saved["own_trainer"].rows
    assert TESTS.keys() <= rows.keys()
    for row, answers in rows.items():
        for found, (count, words) in zip(answers, METHODS.values(), strict=True):
            assert (found == "") <= (runs(row, words) if count > 1 else is_run_alone(row)), (row, words)
    assert not runs("", "parallel.data=zero3 parallel.context=8")
    engines = [row for name, row in saved["trainers"].rows.items() if name.startswith(("FSDP", "DeepSpeed"))]
    assert engines == [[ACCEPTED] * 2] * 2


@pytest.mark.parametrize("name", ["attention", "axolotl", "models"])
def test_tables_are_as_on_the_page(matrix, saved, name):
    assert matrix.TABLES[name]() == saved[name], AGAIN


@pytest.mark.parametrize("row", ["train.dtype=fp16", "model.attention=loop", "preference pairs (DPO)"])
def test_settings_of_the_own_trainer_are_as_on_the_page(matrix, saved, row):
    from support_tables.own import METHODS, ask_own_trainer

    answers = dict(zip(METHODS, saved["own_trainer"].rows[row], strict=True))
    some = ["one process", "ZeRO 3", "planned"]
    assert ask_own_trainer(row, some) == [answers[name] for name in some], AGAIN


@pytest.mark.parametrize("row", ["`use_cache=True`", "`packing=True`", "Mamba (recurrent state)"])
def test_settings_of_trainers_are_as_on_the_page(matrix, saved, row):
    from support_tables.trainers import ask_trainers

    assert ask_trainers(row, ("transformers",)) == saved["trainers"].rows[row][:1], AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_trainer", "trainers", "loops", "rollouts"])
def test_whole_tables_are_as_on_the_page(matrix, saved, name):
    for host in ("trl", "peft", "lightning", "torchdata"):
        pytest.importorskip(host, reason=f"{host} is not installed")
    for host, wanted in json.loads(RESULTS.read_text())["versions"].items():
        if name != "own_trainer" and version(host) != wanted:
            pytest.skip(f"the page is of {host} {wanted}")
    assert matrix.TABLES[name]() == saved[name], AGAIN
