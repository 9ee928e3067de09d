import base64
import binascii
import functools
import ipaddress
import os
import pickletools
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters

from multipack.launch import torchrun
from multipack.launch.allocation import Allocation
from multipack.launch.launcher import LaunchRequest, launch_command


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


def listening(*processes):
    """(address, port) of the sockets on which these processes and their descendants listen, as Linux lists them."""
    inodes, left = set(), list(processes)
    while left:
        process = Path("/proc", str(left.pop()))
        for task in process.glob("task/*/children"):
            left += task.read_text().split()
        for file in process.glob("fd/*"):
            with suppress(OSError):
                inodes.add(os.readlink(file))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                address, port = local.split(":")
                words = struct.unpack(f"<{len(address) // 8}I", bytes.fromhex(address))
                found.add((str(ipaddress.ip_address(struct.pack(f">{len(words)}I", *words))), int(port, 16)))
    return found


def values(port):
    """Key → value of a store on this host."""
    wait = timedelta(seconds=20)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=wait)
    keys = [key for key in store.list_keys() if store.check([key])]
    return dict(zip(keys, store.multi_get(keys), strict=True))


def is_pickle(value):
    """Whether a value, or what it encodes in base64, is a pickle."""
    readings = [value]
    with suppress(binascii.Error):
        readings.append(base64.b64decode(value, validate=True))
    for each in readings:
        with suppress(ValueError, IndexError):
            return bool(list(pickletools.genops(each)))
    return False


def test_the_store_of_one_host_listens_on_loopback_and_holds_no_pickle(capsys):
    before, made = listening(os.getpid()), []
    for run in ("a", "b"):  # two launches at once take different ports
        asked = RendezvousParameters("loopback", "127.0.0.1:0", run, 1, 1)
        made.append(torchrun.LoopbackRendezvous.create(asked))
    opened = listening(os.getpid()) - before
    assert len(opened) == 2
    assert {address for address, _ in opened} == {"127.0.0.1"}
    info = made[0].next_rendezvous()
    assert (info.rank, info.world_size, made[0].use_agent_store) == (0, 1, True)
    info.store.set("torchelastic/role_info/0", '{"rank": 0}')
    port = info.bootstrap_store_info.master_port
    assert list(values(port).values()) == [b'{"rank": 0}']
    with pytest.raises(SystemExit):  # the second of two runs with one --port
        torchrun.LoopbackRendezvous(port, "c")
    assert f"--port {port}" in capsys.readouterr().err


LAUNCHED = """
import os, sys, time
from multipack.parallel.joining import connected
with connected("cpu", 60) as world:
    if world.rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
    world.barrier()
    open(f"joined-{world.rank}", "w").close()
    while not os.path.exists("end"):
        time.sleep(0.05)
    world.barrier()
"""


@pytest.mark.slow
def test_a_live_launch_is_reached_from_this_host_only(tmp_path):
    """Its sockets, after a restart too: all are on loopback, and its stores hold no pickle."""
    (tmp_path / "program.py").write_text(LAUNCHED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--max-restarts", "1")
    request = LaunchRequest(["train"], processes=2, flags=flags, port=port, python=sys.executable)
    command = launch_command(request, Allocation())
    command = [*command[: command.index("-m", 3)], "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            ends = time.monotonic() + 150
            while not all((tmp_path / f"joined-{rank}").exists() for rank in range(2)):
                assert time.monotonic() < ends
                assert process.poll() is None
                time.sleep(0.1)
            found = listening(process.pid)
            assert all(ipaddress.ip_address(address).is_loopback for address, _ in found), found
            assert ("127.0.0.1", port) in found
            held = values(port)
            assert any("attempt-1" in key and "heartbeat" in key for key in held), held.keys()
            assert not [key for key, value in held.items() if is_pickle(value)]
            (tmp_path / "end").touch()
            assert process.wait(120) == 0
        finally:
            (tmp_path / "end").touch()
            process.send_signal(signal.SIGTERM)
