"""A worker that is killed comes back: the run goes on from its last checkpoint, and nothing is lost or repeated."""

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
from multipack.training.trainer import train

STEPS = 12
WAIT_SECONDS = 240  # for what takes seconds on a machine that has nothing else to do

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
    """(out, processes, words, restarts) → the launcher of a run; what is left of it when the test ends is killed."""
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
    """Processes of the run in `out`, but its launcher. Torchrun gives each a session of its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended meanwhile
        if f"out={out}" in words and int(folder.name) != launcher.pid:
            found.append(int(folder.name))
    return sorted(found)


def finish(process, out):
    """Wait for a run to end well, and to leave no process behind."""
    told, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, told
    assert not workers(out, process)


def records(out):
    """Every record in order, but for what clocks say."""
    known = ("step", "loss", "grad_norm", "lr", "target_tokens", "padding")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line).get(key) for key in known} for line in lines]


def wait_for(condition, process):
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def kill_at(step, which, process, out, processes=2, how=signal.SIGKILL):
    """Send a signal to some ranks as soon as the run has recorded a step (0: as soon as they are there)."""
    numbers = wait_for(lambda: len(found := workers(out, process)) == processes and found, process)
    if step:
        metrics = out / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step, process)
    for place in which:
        os.kill(numbers[place], how)
    return numbers


def come_back(before, process, out):
    """Wait until all of these processes are gone, and others in their place."""
    wait_for(lambda: (now := workers(out, process)) and not set(before) & set(now), process)


def same(found, expected):
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_killed_worker_comes_back_and_the_run_goes_on(long, launch, tmp_path):
    out = tmp_path / "run"
    process = launch(out, 2, long, restarts=3)
    come_back(kill_at(5, [1], process, out), process, out)
    finish(process, out)
    train(compose_run([*long, f"out={tmp_path / 'alone'}"]))
    same(records(out), records(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_of_ten_come_back_bit_for_bit(long, launch, tmp_path):
    """Either rank, at any time: before the first step, before the first checkpoint, beside one, and later."""
    finish(launch(tmp_path / "whole", 2, long), tmp_path / "whole")
    for number, step in enumerate((0, 1, 2, 3, 4, 5, 6, 7, 8, 9)):
        out = tmp_path / f"run-{number}"
        process = launch(out, 2, long, restarts=3)
        come_back(kill_at(step, [number % 2], process, out), process, out)
        finish(process, out)
        assert records(out) == records(tmp_path / "whole"), number


@pytest.mark.slow
def test_a_run_survives_as_many_deaths_as_it_may(long, launch, tmp_path):
    out = tmp_path / "run"
    process = launch(out, 2, long, restarts=3)
    for step in (3, 6, 9):
        come_back(kill_at(step, [step % 2], process, out), process, out)
    finish(process, out)
    train(compose_run([*long, f"out={tmp_path / 'alone'}"]))
    same(records(out), records(tmp_path / "alone"))


@pytest.mark.slow
def test_a_job_that_died_goes_on_with_fewer_ranks(long, launch, tmp_path):
    """Four ranks are killed with their launcher; the same words on two go on: the same steps, each of them once."""
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
def test_a_rank_that_hangs_fails_the_others_and_nothing_is_left(long, launch, tmp_path):
    """One rank is stopped, not killed: the other waits parallel.timeout_seconds, and the launcher ends both."""
    out = tmp_path / "run"
    process = launch(out, 2, [*long, "parallel.timeout_seconds=5"])
    kill_at(5, [1], process, out, how=signal.SIGSTOP)
    told, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode != 0
    assert "imed out" in told
    assert not workers(out, process)
    from multipack.run import RunDirectory
    from multipack.training.checkpoint import load_checkpoint

    assert load_checkpoint(RunDirectory(out).latest_checkpoint()).step >= 4
