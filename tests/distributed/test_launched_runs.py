"""Runs of `multipack launch`: killed workers are restarted, signals save and stop, and no step is lost or repeated."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import sharding as tiny

from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose_run
from multipack.training.train import train

WAIT_SECONDS = 240
"""Seconds on an idle machine become minutes on a busy one."""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="the processes of a run are found in /proc"
)


@pytest.fixture
def long(words):
    """Number of steps → a run that saves every second step."""
    left = ("train.steps", "train.eval_every", "log.every")
    fixed = [word for word in words if not word.startswith(left)]
    fixed += ["train.eval_every=0", "train.checkpoint_every=2", "parallel.timeout_seconds=30"]
    return lambda steps: [*fixed, f"train.steps={steps}", f"optimizer.decay_steps={steps}", "log.every=0"]


@pytest.fixture
def launch():
    """(out, processes, words, restarts) → the launcher of a run; processes that are left after the test are killed."""
    started = []

    def start(out, processes, words, restarts=0):
        again = ["--max-restarts", str(restarts)] if restarts else []
        run = ["train", *words, "train.resume=auto", f"out={out}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "multipack", "launch", "-n", str(processes), *again, "--", *run],
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


def end(process, out, succeeds=True):
    """What a run printed until its end; no process may be left."""
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode == 0) == succeeds, output
    assert not workers(out, process)
    return output


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


def wait_for_step(step, process, out):
    """Wait until the run has recorded a step."""
    metrics = out / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step, process)


def kill_at(step, which, process, out, processes=2, how=signal.SIGKILL):
    """Send a signal to some ranks as soon as the run has recorded a step (0: as soon as they run)."""
    numbers = wait_for(lambda: len(found := workers(out, process)) == processes and found, process)
    if step:
        wait_for_step(step, process, out)
    for place in which:
        os.kill(numbers[place], how)
    return numbers


def kill_and_wait_for_restart(step, which, process, out):
    """Kill a rank after a step, and wait until all processes are replaced by others."""
    before = kill_at(step, [which], process, out)
    wait_for(lambda: (now := workers(out, process)) and not set(before) & set(now), process)


def equals_one_process(out, words, alone):
    """Check that every step was taken once, the first twelve, before rounding adds up, as on one process."""
    train(compose_run([*words, f"out={alone}"]))
    found, expected = records(out), records(alone)
    assert [record["step"] for record in found] == list(range(1, len(expected) + 1))
    for one, other in zip(found[:12], expected[:12], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.slow
def test_a_run_continues_after_a_kill_and_after_a_signal(pools, long, launch, tmp_path):
    """A killed worker is restarted; SIGTERM saves and stops; the end equals uninterrupted runs of 2 ranks and of 1."""
    words, out, whole = long(24), tmp_path / "run", tmp_path / "whole"
    process = launch(out, 2, [*words, "log.all_ranks=true"], restarts=3)
    kill_and_wait_for_restart(5, 1, process, out)
    wait_for_step(10, process, out)
    process.send_signal(signal.SIGTERM)
    printed = end(process, out, succeeds=False)
    assert "SIGTERM: saved after step" in printed
    assert "[rank 1]" in printed
    assert "2 processes" in printed
    assert 10 <= len(records(out)) < 24
    for more in ([*words, f"out={whole}"], ["train.resume=true", f"out={out}"]):
        pools(2).run(tiny.train_here, more, tmp_path / "cache")
    assert records(out) == records(whole)
    equals_one_process(out, words, tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_restarts_at_any_time_are_bit_for_bit(long, launch, tmp_path):
    """Either rank: before the first step, before the first checkpoint, during one, and later."""
    end(launch(tmp_path / "whole", 2, long(12)), tmp_path / "whole")
    for step in (0, 1, 2, 5):
        out = tmp_path / f"run-{step}"
        process = launch(out, 2, long(12), restarts=3)
        kill_and_wait_for_restart(step, step % 2, process, out)
        end(process, out)
        assert records(out) == records(tmp_path / "whole"), step


@pytest.mark.slow
def test_a_run_survives_all_restarts_that_it_may_use(long, launch, tmp_path):
    out = tmp_path / "run"
    process = launch(out, 2, long(12), restarts=3)
    for step in (3, 6, 9):
        kill_and_wait_for_restart(step, step % 2, process, out)
    end(process, out)
    equals_one_process(out, long(12), tmp_path / "alone")


@pytest.mark.slow
def test_a_killed_job_continues_with_fewer_ranks(long, launch, tmp_path):
    """Four ranks are killed with their launcher; the same command on two ranks continues: every step once."""
    out = tmp_path / "run"
    process = launch(out, 4, long(12))
    kill_at(5, range(4), process, out, processes=4)
    end(process, out, succeeds=False)
    assert 5 <= len(records(out)) < 12
    end(launch(out, 2, long(12)), out)
    equals_one_process(out, long(12), tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_run_within_the_timeout(long, launch, tmp_path, how):
    """The other rank waits parallel.timeout_seconds at most, the launcher ends both, the last checkpoint is whole."""
    out = tmp_path / "run"
    process = launch(out, 2, [*long(5000), "parallel.timeout_seconds=5"])
    kill_at(5, [1], process, out, how=how)
    printed = end(process, out, succeeds=False)
    assert f"rank 1 {'ended' if how == signal.SIGKILL else 'did not answer'} at step" in printed
    assert load_checkpoint(RunDirectory(out).latest_checkpoint()).step >= 4
