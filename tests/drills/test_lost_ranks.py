"""Ranks that are killed, stopped, interrupted or fail alone: the run ends in seconds, says why in a line, and resumes.

Every run is started by the launcher of `multipack launch`, and disturbed when it has recorded some steps. It must end,
leave no process, print one line for each rank that is left, name the lost rank, and continue to the same losses as a
run that was not disturbed; with two ranks bit for bit.
"""

import re
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

from launched import Launched, records
from pool import Pool
from sharding import train_here

STEPS, DISTURBED = 60, 12
TIMEOUT_SECONDS = 8
SLACK_SECONDS = 20
"""What a busy machine may add to every limit."""

PROGRAM = """
import os, sys, time
import multipack.parallel.engine as engine
from multipack.cli import main

{setup}
forward_backward, calls = engine.ModelEngine.forward_backward, []

def disturbed(self, *arguments):
    calls.append(1)
    if len(calls) == {step} and os.environ["RANK"] == "{rank}":
        {action}
    time.sleep(0.05)  # signals arrive while the run trains
    return forward_backward(self, *arguments)

engine.ModelEngine.forward_backward = disturbed
main()
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="the processes of a run are found in /proc"
)


@pytest.fixture
def settings(words):
    """Settings of a run that saves every tenth step."""
    left = ("train.steps", "train.eval_every", "log.every")
    fixed = [word for word in words if not word.startswith(left)]
    fixed += [f"train.steps={STEPS}", "train.eval_every=0", "train.checkpoint_every=10", "log.every=0"]
    return [*fixed, f"parallel.timeout_seconds={TIMEOUT_SECONDS}"]


class Run(Launched):
    """A run that is disturbed: by a signal after `DISTURBED` steps, or by a rank's own action in that step."""

    def __init__(self, folder, size, settings, action="pass", rank=1, launch=(), setup=""):
        out, program = folder / "run", folder / "program.py"
        program.write_text(PROGRAM.format(step=DISTURBED, rank=rank, action=action, setup=setup))
        ranks = ["--rdzv-backend", "loopback", "--nproc-per-node", str(size), *launch]
        words = [str(program), "train", *settings, "train.resume=auto", f"out={out}"]
        super().__init__(out, size, ["-m", "multipack.launch.torchrun", *ranks, *words])

    def disturb(self, number, *ranks):
        self.until_step(DISTURBED)
        self.send(number, *ranks)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """(run, settings) → the records of a disturbed run after its end, and those of one that was not disturbed."""
    pools, whole = {}, {}

    def resume(run, settings):
        pool = pools.setdefault(run.size, Pool(run.size))
        cache = tmp_path_factory.getbasetemp() / "cache"
        if run.size not in whole:
            out = tmp_path_factory.mktemp("whole") / "run"
            pool.run(train_here, [*settings, f"out={out}"], cache)
            whole[run.size] = out
        pool.run(train_here, [*settings, "train.resume=auto", f"out={run.out}"], cache)
        return records(run.out), records(whole[run.size])

    yield resume
    for pool in pools.values():
        pool.close()


def check_resumed(resumed, run, settings, outcome):
    """Compare what follows; sums of more than two ranks may round differently in the first step of a process."""
    found, expected = resumed(run, settings)
    if run.size > 2:
        expected = [pytest.approx(record, rel=1e-3) for record in expected]
    outcome("different", sum(one != other for one, other in zip(found, expected, strict=True)))
    assert found == expected


LOST = {
    signal.SIGKILL: "rank {} ended at step \\d+ without an error message",
    signal.SIGSTOP: f"rank {{}} did not answer at step \\d+ within parallel.timeout_seconds={TIMEOUT_SECONDS}",
}


@pytest.mark.parametrize(("size", "lost"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
@pytest.mark.parametrize("how", LOST)
def test_a_rank_that_is_killed_or_stopped_is_named(tmp_path, settings, resumed, outcome, how, size, lost):
    run = Run(tmp_path, size, settings)
    run.disturb(how, lost)
    errors = run.end((10 if how == signal.SIGKILL else TIMEOUT_SECONDS + 15) + SLACK_SECONDS)
    outcome(how.name, 1)
    outcome("seconds", round(run.seconds, 1))
    survivors = [line for line in errors if re.search(LOST[how].format(lost) + "$", line)]
    assert len(survivors) == size - 1, errors
    by_launcher = [f"error: rank {lost} was killed by SIGKILL"] if how == signal.SIGKILL else []
    others = [line for line in errors if line not in survivors]
    assert [line.partition(" (")[0] for line in others] == by_launcher
    assert run.launcher.returncode == (137 if how == signal.SIGKILL else 2)
    check_resumed(resumed, run, settings, outcome)


BLOCKS = f"""
import multipack.parallel.world as world
Watch = world.Watch
world.Watch = lambda *arguments: Watch(*arguments[:3], {TIMEOUT_SECONDS}, True)
"""
"""Ranks wait in collectives of gloo as in those of nccl: without an error."""
# In the action of `PROGRAM`: what hangs, and in which call.
HANGS = {
    "forward pass of micro-batch 2": "_call, 'forward', 2",
    "backward pass of micro-batch 1": "clock, 'mark', 3",
    "optimizer step": "optimizer, 'step', 1",
}


@pytest.mark.parametrize(
    ("stage", "size", "lost"), [*zip(HANGS, (2, 4, 4), (1, 2, 3), strict=True), ("optimizer step", 2, 0)]
)
def test_a_rank_that_hangs_inside_a_step_is_named(tmp_path, settings, resumed, outcome, stage, size, lost):
    """Its heartbeat goes on, and the others are in the same step."""
    hang = f"""
def hang(of, name, call):
    before, calls = getattr(of, name), []
    def hanging(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            time.sleep(600)
        return before(*arguments, **options)
    setattr(of, name, hanging)
{BLOCKS}"""
    waits = [*settings, "parallel.timeout_seconds=300"]
    run = Run(tmp_path, size, waits, f"hang(self.{HANGS[stage]})", lost, setup=hang)
    errors = run.end()  # with the start of the run
    outcome("ranks that hang", 1)
    place = f"step {DISTURBED} ({stage}) within parallel.timeout_seconds={TIMEOUT_SECONDS}"
    assert all(line.endswith(f"error: rank {lost} did not answer at {place}") for line in errors), errors
    assert len(errors) in (size - 1, size)  # the launcher may end the lost rank before it prints the line too
    assert run.launcher.returncode == 2
    check_resumed(resumed, run, settings, outcome)


STOPS = (
    "import signal, multipack.training.checkpoint as c; c.write_pieces = lambda *_: os.kill(os.getpid(), {})"
)


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_rank_that_is_lost_while_it_writes_a_checkpoint_is_named(
    tmp_path, settings, resumed, outcome, how, background
):
    """The others wait for a slow disk without a limit, but not for a rank without heartbeats."""
    settings = [*settings, f"train.checkpoint_async={background}"]
    run = Run(tmp_path, 2, settings, STOPS.format(int(how)))
    errors = run.end()  # with the start of the run
    outcome(how.name, 1)
    survivors = [line for line in errors if re.search(LOST[how].format(1) + "$", line)]
    assert len(survivors) == 1, errors
    check_resumed(resumed, run, settings, outcome)


@pytest.mark.parametrize(
    ("how", "rank", "code"),
    [(signal.SIGINT, None, 130), (signal.SIGTERM, None, 143), (signal.SIGTERM, 1, 143)],
)
def test_a_signal_saves_and_stops_all_ranks(tmp_path, settings, resumed, outcome, how, rank, code):
    """Ctrl-C reaches the launcher's group; a scheduler's signal may reach one rank only."""
    run = Run(tmp_path, 2, settings)
    run.disturb(how, *([] if rank is None else [rank]))
    errors = run.end(5 + SLACK_SECONDS)
    outcome("signals", 1)
    outcome("seconds", round(run.seconds, 1))
    assert run.launcher.returncode == code
    stops = f"{how.name}: the run saves and stops after this step; a second signal kills it"
    assert errors == ([stops] if rank is None else [])  # printed by the launcher
    assert f"saved after step {len(records(run.out))}" in run.printed
    check_resumed(resumed, run, settings, outcome)


def test_ranks_of_a_launcher_that_is_killed_save_and_stop(tmp_path, settings, resumed, outcome):
    run = Run(tmp_path, 2, settings)
    run.disturb(signal.SIGKILL)
    began = time.monotonic()
    while run.ranks() and time.monotonic() < began + 5 + SLACK_SECONDS:
        time.sleep(0.1)
    outcome("launchers killed", 1)
    outcome("seconds", round(time.monotonic() - began, 1))
    assert not run.ranks()
    assert f"saved after step {len(records(run.out))}" in run.launcher.communicate()[0]
    check_resumed(resumed, run, settings, outcome)


@pytest.mark.parametrize(
    ("action", "code", "message"),
    [
        ("raise ValueError('document 17 is damaged')", 2, "document 17 is damaged"),
        ("raise MemoryError('no more')", 1, "MemoryError: no more"),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_an_error_on_one_rank_is_printed_and_repeated(
    tmp_path, settings, resumed, outcome, action, code, message, size
):
    run = Run(tmp_path, size, settings, action)
    errors = run.end()  # with the start of the run
    outcome("errors", 1)
    repeated = f"error: rank 1 failed at step {DISTURBED}: {message}"
    assert run.launcher.returncode in (code, 2), errors  # 2 if a rank that repeats the error ends first
    assert sum(line.endswith(repeated) for line in errors) == size - 1, errors
    own = [line for line in errors if not line.endswith(repeated)]
    assert own[0].startswith("[rank 1] ")
    assert own[-1].endswith(message)
    assert len(own) == 1 or own[0] == "[rank 1] Traceback (most recent call last):"
    check_resumed(resumed, run, settings, outcome)


def test_restarted_ranks_continue(tmp_path, settings, resumed, outcome):
    run = Run(tmp_path, 2, settings, launch=["--flags", "--max-restarts 2"])
    run.disturb(signal.SIGKILL, 1)
    run.end()  # with two starts
    outcome("restarts", 1)
    assert run.launcher.returncode == 0
    check_resumed(resumed, run, settings, outcome)
