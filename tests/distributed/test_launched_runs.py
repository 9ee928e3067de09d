"""Runs of `multipack launch`: killed workers are restarted, signals save and stop, and no step is lost or repeated."""

import signal
from pathlib import Path

import pytest
import sharding as tiny
from launched import Launched, records

from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint
from multipack.training.run_config import compose_run
from multipack.training.train import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not Path("/proc/self/cmdline").exists(), reason="the processes of a run are found in /proc"
    ),
]


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
        again = ["--flags", f"--max-restarts {restarts}"] if restarts else []
        launcher = ["-m", "multipack", "launch", "-n", str(processes), *again, "--"]
        started.append(
            Launched(out, processes, [*launcher, "train", *words, "train.resume=auto", f"out={out}"])
        )
        return started[-1]

    yield start
    for run in started:
        run.kill()
        run.launcher.communicate()


def finish(run):
    errors = run.end()
    assert run.launcher.returncode == 0, errors


def kill_and_wait_for_restart(run, step, rank):
    """Kill a rank after a step, and wait until all processes are replaced by others."""
    run.until_step(step)
    before = {*run.running.values()}
    run.send(signal.SIGKILL, rank)
    run.until(lambda: (now := {*run.ranks().values()}) and not before & now)


def equals_one_process(out, words, alone):
    """Check that every step was taken once, the first twelve, before rounding adds up, as on one process."""
    train(compose_run([*words, f"out={alone}"]))
    found, expected = records(out), records(alone)
    assert [record["step"] for record in found] == list(range(1, len(expected) + 1))
    for one, other in zip(found[:12], expected[:12], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_run_continues_after_a_kill_and_after_a_signal(pools, long, launch, tmp_path):
    """A killed worker is restarted; SIGTERM saves and stops; the end equals uninterrupted runs of 2 ranks and of 1."""
    words, out, whole = long(24), tmp_path / "run", tmp_path / "whole"
    run = launch(out, 2, words, restarts=3)
    kill_and_wait_for_restart(run, 5, 1)
    run.until_step(10)
    run.launcher.send_signal(signal.SIGTERM)
    errors = run.end()
    assert run.launcher.returncode, errors
    for part in ("SIGTERM: saved after step", "2 processes"):
        assert part in "\n".join([run.printed, *errors])
    assert 10 <= len(records(out)) < 24
    for more in ([*words, f"out={whole}"], ["train.resume=true", f"out={out}"]):
        pools(2).run(tiny.train_here, more, tmp_path / "cache")
    assert records(out) == records(whole)
    equals_one_process(out, words, tmp_path / "alone")


def test_restarts_at_any_time_are_bit_for_bit(long, launch, tmp_path):
    """Either rank: before the first step, before the first checkpoint, during one, and later; as often as allowed."""
    finish(launch(tmp_path / "whole", 2, long(12)))
    for number, steps in enumerate(((0, 2, 6), (1, 5, 9))):
        out = tmp_path / f"run-{number}"
        run = launch(out, 2, long(12), restarts=len(steps))
        for kill, step in enumerate(steps):
            kill_and_wait_for_restart(run, step, (number + kill) % 2)
        finish(run)
        assert records(out) == records(tmp_path / "whole"), steps


def test_a_killed_job_continues_with_fewer_ranks(long, launch, tmp_path):
    """Four ranks are killed with their launcher; the same command on two ranks continues: every step once."""
    out = tmp_path / "run"
    run = launch(out, 4, long(12))
    run.until_step(5)
    run.send(signal.SIGKILL, *range(4))
    errors = run.end()
    assert run.launcher.returncode, errors
    assert 5 <= len(records(out)) < 12
    finish(launch(out, 2, long(12)))
    equals_one_process(out, long(12), tmp_path / "alone")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_run_within_the_timeout(long, launch, tmp_path, how):
    """The other rank waits parallel.timeout_seconds at most, the launcher ends both, the last checkpoint is whole."""
    out = tmp_path / "run"
    run = launch(out, 2, [*long(5000), "parallel.timeout_seconds=5"])
    run.until_step(5)
    run.send(how, 1)
    errors = run.end()
    printed = "\n".join(errors)
    assert f"rank 1 {'ended' if how == signal.SIGKILL else 'did not answer'} at step" in printed
    assert run.launcher.returncode == (137 if how == signal.SIGKILL else 2), printed
    assert ("error: rank 1 was killed by SIGKILL" in printed) == (how == signal.SIGKILL)
    assert "Traceback" not in printed  # nor what torchrun logs
    assert "closing signal" not in printed
    assert load_checkpoint(RunDirectory(out).latest_checkpoint()).step >= 4
