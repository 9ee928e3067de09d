import json
import os
import socket
from pathlib import Path

import pytest

from multipack.launch import doctor
from multipack.launch.doctor import examine
from multipack.launch.probe import smoke_test
from multipack.launch.smoke import CHECKS


def _by_name(found):
    return {(one.area, one.name): one for one in found}


def test_every_finding_that_is_not_ok_has_a_remedy():
    areas = []
    found = examine(os.environ, quick=True, tell=areas.append)
    assert [one for one in found if one.status == "fail"] == []
    assert all(bool(one.remedy) == (one.status != "ok") for one in found)
    assert list(dict.fromkeys(one.area for one in found)) == areas
    named = _by_name(found)
    assert named["packages", "torch"].status == "ok"
    assert named["backends", "gloo"].status == "ok"
    assert ("together", "all_reduce (gloo)") not in named


def test_what_a_check_raises_is_its_finding(monkeypatch):
    def broken(environment):
        yield doctor.Finding("devices", "cpu", "ok", "seen")
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor, "_devices", broken)
    named = _by_name(examine({}, quick=True))
    assert named["devices", "check"].status == "fail"
    assert named["devices", "check"].detail == "RuntimeError: no driver"
    assert named["backends", "gloo"].status == "ok"


def test_packages_that_are_missing_or_old_come_with_their_command(monkeypatch):
    wanted = [
        "torch>=999",
        "no-such-package>=1",
        "no-such-either>=1 ; extra == 'x'",
        "pytest>=1 ; extra == 'dev'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    named = _by_name(doctor._packages({}))
    assert named["packages", "torch"].status == "fail"
    assert named["packages", "no-such-package"].remedy == "pip install 'no-such-package>=1'"
    assert named["packages", "no-such-either (x)"].status == "ok"
    assert 'pip install "multipack[x]"' in named["packages", "no-such-either (x)"].detail
    assert len(named) == 4


def test_versions_compare_as_numbers():
    assert doctor._numbers("2.13.0+cpu") > doctor._numbers("2.9")
    assert doctor._numbers("2.11.0") >= doctor._numbers("2.11")


def test_launchers_that_disagree_and_lost_hostfiles_are_failures():
    gone = {
        "PBS_JOBID": "1",
        "PBS_NODEFILE": "/no/such/file",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "PMI_RANK": "1",
    }
    named = _by_name(doctor._launching({**gone, "PMI_SIZE": "2"}))
    assert named["launching", "ranks"].status == "fail"
    assert "RANK=0 and PMI_RANK=1" in named["launching", "ranks"].detail
    assert named["launching", "scheduler"].status == "fail"


def test_a_name_that_other_hosts_cannot_reach_is_reported(monkeypatch):
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: [(0, 0, 0, "", ("127.0.1.1", 0))])
    found = _by_name(doctor._launching(job))["launching", "address"]
    assert found.status == "warn"
    assert "GLOO_SOCKET_IFNAME" in found.remedy
    assert _by_name(doctor._launching({}))["launching", "address"].status == "ok"
    wrong = _by_name(doctor._launching({**job, "GLOO_SOCKET_IFNAME": "nowhere0"}))["launching", "address"]
    assert wrong.status == "fail"
    assert "lo" in wrong.remedy

    def unknown(name, port):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert _by_name(doctor._launching({}))["launching", "address"].status == "warn"


def test_folders_that_cannot_be_written_are_failures(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    named = _by_name(doctor._folders({}))
    assert named["folders", "cache"].status == "fail"
    assert "XDG_CACHE_HOME" in named["folders", "cache"].remedy
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(doctor, "LEAST_FREE_BYTES", 1 << 62)
    assert _by_name(doctor._folders({}))["folders", "cache"].status == "warn"
    assert not (tmp_path / "not").exists()


def _wrote(folder, rank, entries):
    lines = [json.dumps({"check": name, "error": error, "seconds": 0.1}) for name, error in entries]
    (Path(folder) / f"rank-{rank}.jsonl").write_text("\n".join(lines) + '\n{"check": "cut o')


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([(name, "") for name in CHECKS], [(name, "") for name in CHECKS], [""] * len(CHECKS)),
        ([(CHECKS[0], ""), (CHECKS[1], "")], [(CHECKS[0], "")], ["", "did not come back: ended", "not run"]),
        ([(CHECKS[0], "")], [(CHECKS[0], "rank 1 got [2]")], ["rank 1 got [2]", "not run", "not run"]),
        ([], [(CHECKS[0], "RuntimeError: closed")], ["RuntimeError: closed", "not run", "not run"]),
    ],
)
def test_what_both_processes_wrote_decides(monkeypatch, first, second, expected):
    def run(command, environment, timeout_seconds):
        _wrote(command[-2], 0, first)
        _wrote(command[-2], 1, second)
        return "ended after 1 s"

    monkeypatch.setattr("multipack.launch.probe._run", run)
    found = list(smoke_test({}, "cpu", 1.0))
    assert [name for name, _, _ in found] == list(CHECKS)
    for (_, error, _), start in zip(found, expected, strict=False):
        assert error.startswith(start)
        assert bool(error) == bool(start)


def test_processes_that_hang_are_ended_and_reported(tmp_path, monkeypatch):
    """No torchrun here: what matters is that the wait ends, and all that was started with it."""
    sleeper = tmp_path / "torch" / "distributed"
    sleeper.mkdir(parents=True)
    for folder in (sleeper.parent, sleeper):
        (folder / "__init__.py").write_text("")
    (sleeper / "run.py").write_text("import time; print('started', flush=True); time.sleep(60)")
    found = list(smoke_test({**os.environ, "PYTHONPATH": str(tmp_path)}, "cpu", 2.0))
    assert found[0][1] == "did not come back: ended after 2 s"
    assert all(error for _, error, _ in found)


@pytest.mark.slow
def test_two_processes_work_together_here():
    crowded = {**os.environ, "RANK": "7", "WORLD_SIZE": "9", "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert [(name, error) for name, error, _ in smoke_test(crowded, "cpu", 120.0)] == [
        (name, "") for name in CHECKS
    ]


@pytest.mark.slow
def test_a_process_that_dies_is_reported_with_its_error(tmp_path):
    program = tmp_path / "dies.py"
    program.write_text("raise ValueError('a broken machine')")
    found = list(smoke_test(dict(os.environ), "cpu", 120.0, (str(program),)))
    assert "a broken machine" in found[0][1]
