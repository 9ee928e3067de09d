import functools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from multipack.launch import torchrun

PROGRAM = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {end}
time.sleep(60)
"""


@pytest.mark.parametrize(("ends", "code"), [(3, 3), (-signal.SIGKILL, 137)])
def test_the_exit_code_is_that_of_the_first_failure(monkeypatch, capsys, ends, code):
    def fails():
        raise ChildFailedError("program", {1: ProcessFailure(1, 99, ends, "no file")})

    monkeypatch.setattr(torchrun, "torchrun", fails)
    monkeypatch.setattr(torchrun.PContext, "close", torchrun.PContext.close)  # restored after `main`
    monkeypatch.setattr(sys, "argv", ["torchrun", "--max-restarts", "1"])
    assert torchrun.main() == code
    printed = capsys.readouterr().err
    assert printed.startswith("error: rank 1 was killed by SIGKILL" if ends < 0 else "")
    assert bool(printed) == (ends < 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit('error: one line')", 1, "error: one line"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
    ],
    ids=["exit", "killed"],
)
def test_a_failure_is_one_line_and_its_exit_code(tmp_path, end, code, message):
    (tmp_path / "program.py").write_text(PROGRAM.format(end=end))
    start = [sys.executable, "-m", "multipack.launch.torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*start, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in done.stderr
    assert "closing signal" not in done.stderr


DEAF = "trap '' TERM INT; echo ready; sleep 30 & wait $!; sleep 30"
FAILS = "trap 'exit 2' TERM; echo ready; sleep 30 & wait $!"
STOPS = "trap 'exit 143' TERM; echo ready; sleep 30 & wait $!"


@pytest.fixture
def processes():
    """Shell programs → what torchrun has of its processes; they are killed as a group."""
    started = []

    def start(*programs):
        for program in programs:
            process = subprocess.Popen(
                ["sh", "-c", program], stdout=subprocess.PIPE, start_new_session=True, text=True
            )
            process.stdout.readline()
            close = functools.partial(lambda each, death_sig: os.killpg(each.pid, death_sig), process)
            started.append(SimpleNamespace(proc=process, close=close))
        return SimpleNamespace(subprocess_handlers=dict(enumerate(started)))

    yield start
    for handler in started:
        with suppress(ProcessLookupError):
            handler.close(death_sig=signal.SIGKILL)
        handler.proc.communicate()


@pytest.mark.parametrize(
    ("programs", "asked", "seconds"),
    [
        ((DEAF,), None, 0.3),  # a process failed: the others have this long
        ((DEAF, STOPS), signal.SIGTERM, 1.0),  # a signal: all may save
        ((DEAF, FAILS), signal.SIGTERM, 0.3),  # one of them failed while it saved
        ((STOPS, STOPS), signal.SIGTERM, 0.0),
    ],
)
def test_processes_have_time_to_save_but_not_to_hang(monkeypatch, processes, programs, asked, seconds):
    monkeypatch.setattr(torchrun, "FAILURE_SECONDS", 0.3)
    monkeypatch.setattr(torchrun, "STOP_SECONDS", 1.0)
    ended = []

    def kill(group, number, _):
        alive = [each for each in group.subprocess_handlers.values() if each.proc.poll() is None]
        ended.append((number, len(alive)))

    monkeypatch.setattr(torchrun, "_torch_close", kill)
    group = processes(*programs)
    began = time.monotonic()
    torchrun._close(group, asked)
    assert ended == [(signal.SIGKILL, programs.count(DEAF))]
    assert seconds <= time.monotonic() - began < seconds + 5


def test_a_second_signal_kills(monkeypatch, processes):
    def again(_):
        raise torchrun.SignalException("again", signal.SIGINT)

    killed = []
    monkeypatch.setattr(torchrun, "_torch_close", lambda group, number, _: killed.append(number))
    monkeypatch.setattr(torchrun.time, "sleep", again)
    with pytest.raises(torchrun.SignalException):
        torchrun._close(processes(DEAF), signal.SIGINT)
    assert killed == [signal.SIGKILL]


@pytest.mark.parametrize("is_signal", [True, False])
def test_only_a_signal_announces_that_the_run_saves(monkeypatch, processes, capsys, is_signal):
    """After the failure of a process the others cannot save."""
    monkeypatch.setattr(torchrun, "_torch_close", lambda *_: None)
    try:
        raise torchrun.SignalException("asked", signal.SIGTERM) if is_signal else ValueError
    except (torchrun.SignalException, ValueError):
        torchrun._close(processes(STOPS), signal.SIGTERM)
    expected = "SIGTERM: the run saves and stops after this step; a second signal kills it\n"
    assert capsys.readouterr().err == (expected if is_signal else "")
