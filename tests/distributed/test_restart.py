"""Restarts of killed workers: the run continues from its last checkpoint, and no step is lost or repeated."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from multipack.training.run_config import compose_run
from multipack.training.train import train

STEPS = 12
WAIT_SECONDS = 240
"""Seconds on an idle machine become minutes on a busy one."""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="the processes of a run are found in /proc"
)


@pytest.fixture
def long(words):
    """A run of a dozen steps, in which every second is saved."""
    left = ("train.steps", "train.eval_every", "log.every")
    return [word for word in words if not word.startswith(left)] + [
        f"train.steps={STEPS}",
        "train.eval_every=0",
        "train.checkpoint_every=2",
        "parallel.timeout_seconds=30",
        "log.every=0",
    ]


@pytest.fixture
def launch():
    """(out, processes, words, restarts) → the launcher of a run; processes that are left after the test are killed."""
    started = []

    def start(out, processes, words, restarts=0):
        again = ["--max-restarts", str(restarts)] if restarts else []
        run = ["train", *words, "train.resume=auto", f"out={out}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "multipack", "launch", "-n", str(processes), *again, "--", *run],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append((process, out))
        return process

    yield start
    for process, out in started:
        for number in [*([process.pid] if process.poll() is None else []), *workers(out, process)]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.communicate()


def workers(out, launcher):
    """Processes of the run in `out` except its launcher; torchrun gives each of them its own session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            # The process has ended meanwhile.
            continue
        if f"out={out}" in words and int(folder.name) != launcher.pid:
            found.append(int(folder.name))
    return sorted(found)


def finish(process, out):
    """Wait until a run has ended without an error; no process may be left."""
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, output
    assert not workers(out, process)


def records(out):
    """All records in order, without times."""
    known = ("step", "loss", "grad_norm", "lr", "target_tokens", "padding")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line).get(key) for key in known} for line in lines]


def wait_for(condition, process):
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def kill_at(step, which, process, out, processes=2, how=signal.SIGKILL):
    """Send a signal to some ranks as soon as the run has recorded a step (0: as soon as they run)."""
    numbers = wait_for(lambda: len(found := workers(out, process)) == processes and found, process)
    if step:
        metrics = out / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step, process)
    for place in which:
        os.kill(numbers[place], how)
    return numbers


def wait_for_restart(before, process, out):
    """Wait until all of these processes are replaced by others."""
    wait_for(lambda: (now := workers(out, process)) and not set(before) & set(now), process)


def same(found, expected):
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_killed_worker_is_restarted_and_the_run_continues(long, launch, tmp_path):
    out = tmp_path / "run"
    process = launch(out, 2, long, restarts=3)
    wait_for_restart(kill_at(5, [1], process, out), process, out)
    finish(process, out)
    train(compose_run([*long, f"out={tmp_path / 'alone'}"]))
    same(records(out), records(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_restarts_of_ten_are_bit_for_bit(long, launch, tmp_path):
    """Either rank, at any time: before the first step, before the first checkpoint, during one, and later."""
    finish(launch(tmp_path / "whole", 2, long), tmp_path / "whole")
    for number, step in enumerate((0, 1, 2, 3, 4, 5, 6, 7, 8, 9)):
        out = tmp_path / f"run-{number}"
        process = launch(out, 2, long, restarts=3)
        wait_for_restart(kill_at(step, [number % 2], process, out), process, out)
        finish(process, out)
        assert records(out) == records(tmp_path / "whole"), number


@pytest.mark.slow
def test_a_run_survives_all_restarts_that_it_may_use(long, launch, tmp_path):
    out = tmp_path / "run"
    process = launch(out, 2, long, restarts=3)
    for step in (3, 6, 9):
        wait_for_restart(kill_at(step, [step % 2], process, out), process, out)
    finish(process, out)
    train(compose_run([*long, f"out={tmp_path / 'alone'}"]))
    same(records(out), records(tmp_path / "alone"))


@pytest.mark.slow
def test_a_killed_job_continues_with_fewer_ranks(long, launch, tmp_path):
    """Four ranks are killed with their launcher; the same command on two ranks continues: every step once."""
    out = tmp_path / "run"
    process = launch(out, 4, long)
    kill_at(5, range(4), process, out, processes=4)
    assert process.wait(WAIT_SECONDS) != 0
    assert not workers(out, process)
    done = len(records(out))
    assert 5 <= done < STEPS
    finish(launch(out, 2, long), out)
    train(compose_run([*long, f"out={tmp_path / 'alone'}"]))
    same(records(out), records(tmp_path / "alone"))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(long, launch, tmp_path):
    """One rank is stopped, not killed: the other waits parallel.timeout_seconds, and the launcher ends both."""
    out = tmp_path / "run"
    process = launch(out, 2, [*long, "parallel.timeout_seconds=5"])
    kill_at(5, [1], process, out, how=signal.SIGSTOP)
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode != 0
    assert "imed out" in output
    assert not workers(out, process)
    from multipack.run import RunDirectory
    from multipack.training.checkpoint import load_checkpoint

    assert load_checkpoint(RunDirectory(out).latest_checkpoint()).step >= 4
