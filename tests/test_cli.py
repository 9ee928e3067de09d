"""The commands as a user types them."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from multipack.cli import app, main


@pytest.fixture
def run():
    def invoke(*words):
        return CliRunner().invoke(app, list(words), catch_exceptions=False)

    return invoke


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(10, 900, 500))
    return path


def _fails(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["multipack", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


def test_help_names_every_command_and_settings_are_listed(run):
    shown = run("--help").output
    for command in ("train", "prepare", "plan", "generate", "config"):
        assert command in shown
    assert "multipack train data=jsonl" in run("train", "--help").output
    settings = run("train", "--settings").output
    assert "plan.packs_per_step" in settings
    assert "data=jsonl|" in settings
    assert "Peak learning rate." in settings


def test_help_needs_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from multipack.cli import app;"
        "CliRunner().invoke(app, ['train', '--help']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_prints_what_starts_the_same_run(run, tmp_path):
    shown = run("config", "model=tiny", "train.steps=3").output
    (tmp_path / "config.yaml").write_text(shown)
    assert run("config", f"config={tmp_path / 'config.yaml'}").output == shown
    assert "layers: 2" in shown


def test_plan_reports_and_draws(run, lengths_file):
    shown = run(
        "plan", str(lengths_file), "plan.capacity=2048", "plan.packs_per_step=4", "world_size=2"
    ).output
    for told in (
        "packing efficiency",
        "cost utilization",
        "padding instead",
        "cu_seqlens",
        "padded to the longest",
    ):
        assert told in shown
    assert "2 ranks" in shown


def test_plan_as_json_is_json_alone(run, lengths_file):
    words = (
        "plan",
        str(lengths_file),
        "plan.capacity=2048",
        "plan.packs_per_step=4",
        "world_size=2",
        "--json",
    )
    report = json.loads(run(*words).output)
    assert report["documents"] == 500
    assert report["steps"] >= report["minimum_steps"]
    assert 0 < report["padded_share"] < 1
    assert json.loads(run(*words).output)["fingerprint"] == report["fingerprint"]


def test_a_store_is_prepared_planned_trained_and_asked(run, words, tmp_path):
    store, out = tmp_path / "pairs.store", tmp_path / "run"
    data = [word for word in words if word.startswith("data")]
    shown = run("prepare", *data, "tokenizer=byte", "--store", str(store)).output
    assert "documents   120" in shown
    assert (
        "packing efficiency" in run("plan", str(store), "plan.capacity=256", "plan.packs_per_step=2").output
    )
    rest = [word for word in words if not word.startswith(("data", "tokenizer"))]
    trained = run("train", "data=store", f"data.path={store}", *rest, f"out={out}")
    assert trained.exit_code == 0
    assert "final validation loss" in trained.output
    ask = ("generate", str(out), "--prompt", "Q1: pack", "--max-tokens", "5", "--temperature", "0")
    answer = run(*ask).output
    assert answer.startswith("Q1: pack")
    assert run(*ask).output == answer
    by_checkpoint = run("generate", str(out / "checkpoints" / "step-00000006"), *ask[2:]).output
    assert by_checkpoint == answer


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "train.stepz=2"], "did you mean train.steps"),
        (["train", "data=text", "data.path=nowhere.txt"], "nowhere.txt"),
        (["plan", "nowhere.npy"], "nowhere.npy does not exist"),
        (["generate", "nowhere", "--prompt", "x"], "neither a run directory"),
        (["prepare", "data=jsonl"], "data.path"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(monkeypatch, capsys, words, told):
    code, error = _fails(monkeypatch, capsys, *words)
    assert code == 2
    assert error.startswith("error: ")
    assert told in error
    assert error.count("\n") == 1


def test_other_ranks_say_who_they_are(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert _fails(monkeypatch, capsys, "plan", "nowhere.npy")[1].startswith("[rank 3] error: ")


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.array([3, 0, 5]), "document 1"),
        (np.array([3, -2, 5]), "document 1"),
        (np.array([3.0, 2.5]), "float"),
        (np.array([], dtype=np.int64), "empty"),
        (np.array([10, 5000]), "5,000"),
    ],
)
def test_lengths_that_cannot_be_are_refused(monkeypatch, capsys, tmp_path, array, told):
    np.save(tmp_path / "bad.npy", array)
    code, error = _fails(monkeypatch, capsys, "plan", str(tmp_path / "bad.npy"), "plan.capacity=4096")
    assert code == 2
    assert told in error


def test_a_file_that_is_no_array_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "text.npy").write_text("hello")
    assert "not a .npy file of lengths" in _fails(monkeypatch, capsys, "plan", str(tmp_path / "text.npy"))[1]


def test_python_dash_m_is_the_same_program():
    done = subprocess.run([sys.executable, "-m", "multipack", "version"], capture_output=True, text=True)
    assert done.stdout.strip() == "0.1.0"


def test_a_stream_is_planned_as_training_would_cut_it(run, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 40)
    store = tmp_path / "text.store"
    words = ("data=text", f"data.path={tmp_path / 'text.txt'}", "data.documents=stream", "tokenizer=char")
    run("prepare", *words, "--store", str(store))
    report = json.loads(
        run("plan", str(store), "plan.capacity=100", "plan.packs_per_step=2", "--json").output
    )
    assert (report["documents"], report["tokens"]) == (18, 1720)


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    from multipack import config

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(config, "compose_run", interrupt)
    code, error = _fails(monkeypatch, capsys, "config")
    assert code == 130
    assert "interrupted" in error
