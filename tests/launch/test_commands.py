import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multipack.cli import app, launch_commands
from multipack.launch.doctor import Finding
from multipack.training.run_config import compose_run

ROOT = Path(__file__).parents[2]
PAGES = [page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
TEXTS = [*PAGES, launch_commands.launch.__doc__, launch_commands.submit.__doc__]
COMMAND = re.compile(r"^ *multipack ((?:launch|submit) [^|#\n]*-- train[^|#\n]*)", re.MULTILINE)
DOCUMENTED = sorted({found.strip() for text in TEXTS for found in COMMAND.findall(text)})


@pytest.fixture
def run(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_launch_prints_its_command(run):
    done = run("launch", "-n", "2", "--dry-run", "--", "train", "model=tiny", "out=a b")
    assert done.exit_code == 0, done.output
    assert done.output.strip().endswith(
        "--standalone --nproc-per-node 2 -m multipack train model=tiny 'out=a b'"
    )


def test_flags_go_to_the_launcher(run):
    done = run("launch", "-n", "2", "--flags", "--log-dir 'my logs'", "--dry-run", "--", "train")
    assert "--log-dir 'my logs' -m multipack train" in done.output


@pytest.mark.parametrize("start", [["launch", "-n", "2", "--dry-run"], ["submit", "--scheduler", "slurm"]])
@pytest.mark.parametrize(
    ("words", "message"),
    [(["trian"], "did you mean train"), (["train", "nonsense=1"], "nonsense"), ([], "after --")],
)
def test_mistakes_are_found_before_anything_starts(run, start, words, message):
    done = run(*start, "--", *words)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    "start",
    [
        ["launch", "-n", "3", "--dry-run"],
        ["launch", "--hostfile", "hosts", "--dry-run"],
        ["submit", "--scheduler", "pbs", "-N", "3"],
    ],
)
def test_settings_that_so_many_processes_cannot_run_are_refused(run, start, tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    monkeypatch.chdir(tmp_path)
    done = run(*start, "--", "train", "parallel.tensor=2")
    assert isinstance(done.exception, ValueError)
    assert "parallel.tensor=2: 2 ranks hold one model, which do not divide the 3 processes" in str(
        done.exception
    )


@pytest.mark.parametrize("start", [["launch", "-n", "2", "--dry-run"], ["submit", "--scheduler", "slurm"]])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], r"--max-restarts 3.* add train.resume=auto out=RUN_DIR"),
        (["train", "out=run"], r"add train.resume=auto"),
        (["train", "train.resume=auto"], r"add out=RUN_DIR"),
        (
            ["train", "train.resume=runs/a/checkpoints/step-00000002", "out=runs/a"],
            r"add train.resume=auto",
        ),
        (["doctor"], r"`multipack doctor`"),
    ],
)
def test_restarts_of_what_cannot_go_on_are_refused(run, start, words, message):
    done = run(*start, "--max-restarts", "3", "--", *words)
    assert isinstance(done.exception, ValueError)
    assert re.search(message, str(done.exception))


def test_restarts_of_what_goes_on(run):
    done = run(
        *("launch", "-n", "2", "--max-restarts", "3", "--dry-run", "--"),
        "train",
        "train.resume=auto",
        "out=run",
    )
    assert done.output.strip().endswith("--max-restarts 3 -m multipack train train.resume=auto out=run")


def test_submit_prints_or_writes(run, tmp_path):
    words = ["submit", "--scheduler", "pbs", "-N", "2", "--ppn", "4", "--time", "02:00:00"]
    done = run(*words, "--", "train", "plan.packs_per_step=8")
    assert done.output.startswith("#!/bin/bash\n#PBS -N multipack\n#PBS -l select=2:mpiprocs=4\n")
    path = tmp_path / "job.sh"
    told = run(*words, "-o", str(path), "--", "train", "plan.packs_per_step=8")
    assert path.read_text() == done.output
    assert f"qsub {path}" in told.output


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_says_by_its_exit_code_whether_training_works(run, monkeypatch, status, code):
    found = [Finding("devices", "gpu", status, "seen", "" if status == "ok" else "mend it")]
    monkeypatch.setattr("multipack.launch.doctor.examine", lambda *_: found)
    done = run("doctor", "--json")
    assert done.exit_code == code
    told = json.loads(done.stdout)
    assert told["findings"][0] == {
        "area": "devices",
        "name": "gpu",
        "status": status,
        "detail": "seen",
        "remedy": found[0].remedy,
    }
    assert told["counts"] == {status: 1}
    shown = run("doctor").output
    assert ("→ mend it" in shown) == (status != "ok")


def test_quick_starts_no_processes(run, monkeypatch):
    monkeypatch.setattr("multipack.launch.doctor.smoke_test", lambda *_: pytest.fail("it started processes"))
    assert run("doctor", "--quick", "--json").exit_code == 0


def test_there_are_commands_to_test():
    assert len(DOCUMENTED) >= 15


@pytest.mark.parametrize("command", DOCUMENTED)
def test_documented_commands_are_not_refused(command, tmp_path, monkeypatch):
    """So many processes can run the settings; and files that pages tell to write are written."""
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"`(\w+\.yaml)`:\n\n```yaml\n(.*?)```", "\n".join(PAGES), re.DOTALL):
        Path(name).write_text(text)
    options, _, words = command.partition(" -- train")
    given = {name: int(number) for name, number in re.findall(r"(-n|-N|--ppn) (\d+)", options)}
    processes = given.get("-n", given.get("-N", 1) * given.get("--ppn", 1))
    compose_run(words.split()).check(processes)
