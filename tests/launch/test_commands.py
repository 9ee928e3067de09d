import json
import re
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multipack.cli import app, launch_commands
from multipack.machine import Finding
from multipack.training.checks import check
from multipack.training.run_config import compose_run

ROOT = Path(__file__).parents[2]
PAGES = [page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
TEXTS = [*PAGES, launch_commands.launch.__doc__, launch_commands.submit.__doc__]
COMMAND = re.compile(r"^ *multipack ((?:launch|submit) [^|#\n]*-- train[^|#\n]*)", re.MULTILINE)
DOCUMENTED = sorted({found.strip() for text in TEXTS for found in COMMAND.findall(text)})
LAUNCH = ("launch", "-n", "2", "--dry-run")
SUBMIT = ("submit", "--scheduler", "slurm")


@pytest.fixture
def run(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_launch_prints_its_command(run):
    done = run(*LAUNCH, "--flags", "--log-dir 'my logs'", "--", "train", "model=tiny", "out=a b")
    assert done.exit_code == 0, done.output
    command = "--rdzv-backend loopback --nproc-per-node 2 --log-dir 'my logs' -m multipack train model=tiny 'out=a b'"
    assert done.output.strip().endswith(command)


def test_mistakes_are_found_before_anything_starts(run, tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    monkeypatch.chdir(tmp_path)
    mistakes = (
        (["trian"], "did you mean train"),
        (["train", "nonsense=1"], "nonsense"),
        ([], "after --"),
    )
    for command, (words, named) in product((LAUNCH, SUBMIT), mistakes):
        done = run(*command, "--", *words)
        assert isinstance(done.exception, ValueError), words
        assert named in str(done.exception), words
    for start in (
        ("launch", "-n", "3", "--dry-run"),
        ("launch", "--hostfile", "hosts", "--dry-run"),
        ("submit", "--scheduler", "pbs", "-N", "3"),
    ):
        done = run(*start, "--", "train", "parallel.tensor=2")
        assert isinstance(done.exception, ValueError)
        assert "parallel.tensor=2" in str(done.exception)


def test_submit_prints_or_writes(run, tmp_path):
    words = ["submit", "--scheduler", "pbs", "-N", "2", "--ppn", "4", "--time", "02:00:00"]
    printed = run(*words, "--", "train", "plan.packs_per_step=8").output
    assert printed.startswith("#!/bin/bash\n#PBS -N multipack\n#PBS -l select=2:mpiprocs=4\n")
    path = tmp_path / "job.sh"
    done = run(*words, "-o", str(path), "--", "train", "plan.packs_per_step=8")
    assert path.read_text() == printed
    assert f"qsub {path}" in done.output


def test_doctors_exit_code_and_json(run, monkeypatch):
    for status, code in (("ok", 0), ("warn", 0), ("fail", 1)):
        remedy = "" if status == "ok" else "mend it"
        found = [Finding("gpu", status, "seen", remedy, "devices")]
        monkeypatch.setattr("multipack.launch.doctor.examine", lambda *_, found=found: found)
        done = run("doctor", "--json")
        assert done.exit_code == code
        report = json.loads(done.stdout)
        assert report["findings"] == [vars(found[0])]
        assert report["counts"] == {status: 1}
        assert ("→ mend it" in run("doctor").output) == bool(remedy)


def test_quick_starts_no_processes(run, monkeypatch):
    monkeypatch.setattr("multipack.launch.doctor.run_collectives", lambda *_: pytest.fail("it started some"))
    assert run("doctor", "--quick", "--json").exit_code == 0


def test_documented_commands_are_legal(tmp_path, monkeypatch):
    """Also with the files that the pages tell to write."""
    assert len(DOCUMENTED) >= 15
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"`(\w+\.yaml)`:\n\n```yaml\n(.*?)```", "\n".join(PAGES), re.DOTALL):
        Path(name).write_text(text)
    for command in DOCUMENTED:
        options, _, words = command.partition(" -- train")
        given = {name: int(number) for name, number in re.findall(r"(-n|-N|--ppn) (\d+)", options)}
        processes = given.get("-n", given.get("-N", 1) * given.get("--ppn", 1))
        check(compose_run(words.split()), processes)
