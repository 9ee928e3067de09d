"""What people type first, and the words that they are answered with."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from multipack.cli import app, main
from multipack.run import find_run
from multipack.training.apply import StopRequest


@pytest.fixture
def run():
    return lambda *words: CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.fixture
def fails(monkeypatch, capsys):
    """The message of a command that is refused, which is one line with exit code 2."""

    def invoke(*words):
        monkeypatch.setattr(sys, "argv", ["multipack", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        error = capsys.readouterr().err
        assert (ended.value.code, error.count("\n"), error[:7]) == (2, 1, "error: ")
        return error

    return invoke


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train data.path=chats.jsonl", "set data=jsonl to read chats.jsonl"),
        ("train data.path=web/part.parquet", "set data=parquet"),
        ("train out=runs/none train.resume=true", "there is no folder runs/none"),
        ("train train.steps=ten", "train.steps=ten: must be a whole number"),
        ("train train.lora=true", "set adapter=lora"),
        ("train train.wd=0.1", "set optimizer.weight_decay"),
        ("train optimizer.type=adam", "optimizer.name"),
        ("train train.qwxyz=1", "--settings"),
        ("plan lengths.npy plan.xyzzy=1", "--settings"),
        ("train --settings xyzzy", "no setting has xyzzy"),
        ("generate nowhere hello", "nowhere"),
    ],
)
def test_mistakes_are_answered_with_what_to_type(fails, words, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = fails(*words.split())
    assert answer in message
    assert "did you mean" not in message


def test_without_a_command_there_is_help_and_no_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multipack"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr()
    assert "Commands:" in shown.out + shown.err
    assert "error:" not in shown.out + shown.err


def test_a_misspelt_word_is_answered_before_torch_is_imported():
    code = (
        "import sys\nfrom multipack.cli import main\nsys.argv = ['multipack', 'train', 'train.stepz=2']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "assert not {'torch', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, "did you mean train.steps" in done.stderr) == (0, True), done.stderr


def test_settings_are_found_by_words_and_config_shows_what_was_changed(run):
    shown = run("train", "--settings", "overlap").output
    assert "data.overlap" in shown
    assert "train.steps" not in shown
    changed = run("config", "--changed", "train.steps=3", "data.validation=0.2").output
    assert changed.split() == ["data:", "validation:", "0.2", "train:", "steps:", "3"]


def test_the_capacity_has_one_name_and_others_are_understood(run):
    words = ["model=tiny", "model.vocabulary_size=512", "devices=1", "--json"]
    found = [
        json.loads(run("advise", f"{name}=1024", *words).output)
        for name in ("plan.capacity", "capacity", "max_length", "sequence_len")
    ]
    assert all(each == found[0] for each in found)
    for command in ("train", "plan", "pack", "advise"):
        assert "  plan.capacity  " in run(command, "--settings").output


def test_a_signal_is_answered_at_once(capfd):
    for number, said in ((signal.SIGTERM, "after this step\n"), (signal.SIGINT, "Ctrl-C once more")):
        with StopRequest(announces=True) as stop:
            os.kill(os.getpid(), number)
            assert stop.signal == number
            error = capfd.readouterr().err
            assert f"{number.name}: the run saves and stops after this step" in error
            assert said in error


def test_torchrun_reports_the_reason(fails, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    message = fails("train", "train.stepz=2")
    written = json.loads((tmp_path / "error.json").read_text())
    assert written["message"]["message"] in message


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a run directory"):
        find_run(tmp_path)
