"""`multipack doctor RUN` finds what is damaged, says what resuming would do, and names the next command."""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from multipack.cli import main
from multipack.run import RunDirectory, resume_command
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose_run
from multipack.training.run_doctor import examine_run
from multipack.training.run_files import divide_log
from multipack.training.train import train


def _failed(path):
    return {one.name: one for one in examine_run(path) if one.status == "fail"}


def test_a_whole_run_has_no_findings_and_leftovers_are_named(finished):
    found = examine_run(finished)
    assert {one.status for one in found} == {"ok"}
    details = {one.name: one.detail for one in found}
    assert details["metrics.jsonl"] == "6 steps, each once and in order"
    assert details["resume"] == "continues after step 6 (step-00000006)"
    (finished / "checkpoints" / ".latest.1f3a.partial").touch()
    with (finished / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    warned = {one.name: one.remedy for one in examine_run(finished) if one.status != "ok"}
    assert warned.keys() == {"leftovers", "last line"}
    assert not _failed(finished)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (
            lambda run: os.truncate(run.latest_checkpoint() / "tokenizer.json", 9),
            {"step-00000006", "latest", "best"},
        ),
        (lambda run: shutil.rmtree(run.latest_checkpoint()), {"latest", "best", "resume"}),
        (
            lambda run: _edit(run.latest_checkpoint() / "state.json", '"format": ', '"format": 9'),
            {"step-00000006", "resume"},
        ),
        (lambda run: run.best.write_bytes(b"\xff"), {"best"}),
        (lambda run: run.latest.write_text("step-00000009"), {"latest", "resume"}),
        (lambda run: run.config.write_text("train: {steps: -1}"), {"config.yaml"}),
        (lambda run: run.metrics.unlink(), {"metrics.jsonl", "resume"}),
        (lambda run: run.samples.write_text("other"), {"resume"}),
        (lambda run: _edit(run.metrics, '"step": 2,', '"step": 3,'), {"metrics.jsonl", "resume"}),
        (lambda run: _edit(run.metrics, '"loss": ', '"loss": NaN, "was": '), {"metrics.jsonl", "resume"}),
        (lambda run: _edit(run.metrics, '"step": 2,', '"step": "two",'), {"metrics.jsonl", "resume"}),
        (
            lambda run: _edit(run.metrics, '"loss": ', f'"loss": {10**400}, "was": '),
            {"metrics.jsonl", "resume"},
        ),
        (
            lambda run: _edit(run.metrics, '"loss": ', f'"a": {"[" * 9**5}, "loss": '),
            {"metrics.jsonl", "resume"},
        ),
    ],
)
def test_damage_is_named(finished, damage, names):
    damage(RunDirectory(finished))
    failed = _failed(finished)
    assert names <= failed.keys() <= names | {"resume"}
    assert all(one.remedy and "\n" not in one.detail + one.remedy for one in failed.values())
    remedy = failed["resume"].remedy if "resume" in failed else ""
    if remedy.startswith("multipack"):  # from a checkpoint that the log agrees with
        checkpoint = load_checkpoint(Path(remedy.rpartition("=")[2]))
        assert divide_log(RunDirectory(finished), checkpoint.progress["marks"])


def _edit(file, old, new):
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_a_run_without_its_checkpoints_never_begins_again_in_silence(finished, capsys, files):
    run, again = RunDirectory(finished), compose_run([f"out={finished}", "train.resume=true"])
    records, before = run.metrics.read_text(), files(finished).untimed
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ValueError, match=r"checkpoints is missing, but metrics\.jsonl has records"):
        train(again)
    assert "checkpoints is missing" in _failed(finished)["resume"].detail
    assert run.metrics.read_text() == records
    run.checkpoints.mkdir()
    assert not _failed(finished)
    train(again)
    assert files(finished).untimed == before
    assert "begins again with step 1; 9 records move to metrics.jsonl.cut" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (finished / "metrics.jsonl.cut").read_text() == records


def test_commands_to_paste_name_one_folder(tmp_path):
    """A shell reads the folder of a run as one word, whatever its name holds."""
    words = shlex.split(resume_command(tmp_path / "my run; $(id)"))
    assert words == ["multipack", "train", "train.resume=true", f"out={tmp_path}/my run; $(id)"]


def test_the_command_that_is_recommended_continues_the_run(finished, monkeypatch, capsys, files):
    before = files(finished).untimed
    os.truncate(RunDirectory(finished).latest_checkpoint() / "config.yaml", 9)
    monkeypatch.setattr("sys.argv", ["multipack", "doctor", str(finished)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    remedy = _failed(finished)["resume"].remedy
    assert shlex.split(remedy)[-1] in "".join(capsys.readouterr().out.split())
    train(compose_run(remedy.split()[2:]))
    assert files(finished).untimed == before
