import os
import socket

import pytest

from multipack.launch import collectives_check, doctor
from multipack.launch.collectives_check import wrong_results
from multipack.launch.doctor import examine, run_collectives
from multipack.parallel.joining import connected

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def _by_name(found):
    return {(one.area, one.name): one for one in found}


def test_findings_have_remedies():
    areas = []
    found = examine(os.environ, quick=True, progress=areas.append)
    assert [one for one in found if one.status == "fail"] == []
    assert all(bool(one.remedy) == (one.status != "ok") for one in found)
    assert list(dict.fromkeys(one.area for one in found)) == areas
    named = _by_name(found)
    assert "torch 2." in named["packages", "extra train"].detail
    packages = [one.name for one in found if one.area == "packages"]
    assert len(set(packages)) == len(packages)  # an extra is one row, whatever it installs
    assert named["devices", "gloo"].status == "ok"
    assert ("processes", "all_reduce (gloo)") not in named


def test_an_exception_in_a_check_is_its_finding(monkeypatch):
    def _devices(environment):
        yield doctor.Finding("cpu", "ok", "seen")
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor, "_devices", _devices)
    named = _by_name(examine({}, quick=True))
    assert named["devices", "check"].status == "fail"
    assert named["devices", "check"].detail == "RuntimeError: no driver"
    assert named["packages", "python"].status == "ok"


def test_packages_that_are_missing_or_old_come_with_their_command(monkeypatch):
    wanted = ["torch>=999", "no-such-package>=1", "no-such-either>=1 ; extra == 'x'"]
    wanted += ["pytest>=1 ; extra == 'dev'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    named = _by_name(doctor._packages({}))
    assert named["", "torch"].status == "fail"
    assert named["", "no-such-package"].remedy == "pip install 'no-such-package>=1'"
    assert named["", "other extras"].status == "ok"
    assert named["", "other extras"].detail.startswith("x: not installed (pip install ")
    assert len(named) == 4
    assert doctor._numbers("2.13.0+cpu") > doctor._numbers("2.11") > doctor._numbers("2.9")


def test_launchers_that_disagree_and_lost_hostfiles_are_failures():
    gone = {"PBS_JOBID": "1", "PBS_NODEFILE": "/no/such/file"}
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}
    named = _by_name(doctor._launching({**gone, **ranks}))
    assert named["", "ranks"].status == "fail"
    assert "RANK=0 and PMI_RANK=1" in named["", "ranks"].detail
    assert named["", "scheduler"].status == "fail"


def test_a_name_that_other_hosts_cannot_reach_is_reported(monkeypatch):
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: [(0, 0, 0, "", ("127.0.1.1", 0))])
    found = _by_name(doctor._launching(job))["", "address"]
    assert found.status == "warn"
    assert "GLOO_SOCKET_IFNAME" in found.remedy
    assert _by_name(doctor._launching({}))["", "address"].status == "ok"
    wrong = _by_name(doctor._launching({**job, "GLOO_SOCKET_IFNAME": "nowhere0"}))["", "address"]
    assert wrong.status == "fail"
    assert "lo" in wrong.remedy

    def unknown(name, port):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert _by_name(doctor._launching({}))["", "address"].status == "warn"


def test_folders_that_cannot_be_written_are_failures(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    named = _by_name(doctor._folders({}))
    assert named["", "cache"].status == "fail"
    assert "XDG_CACHE_HOME" in named["", "cache"].remedy
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(doctor, "LEAST_FREE_BYTES", 1 << 62)
    assert _by_name(doctor._folders({}))["", "cache"].status == "warn"
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("program", "seconds", "error"),
    [
        ("print('{}')", 20.0, ""),
        ("import time; time.sleep(60)", 0.2, "killed after 0.2 s"),
        ("raise ValueError('a broken machine')", 20.0, "ValueError: a broken machine"),
        ("raise SystemExit(7)", 20.0, "exit code 7"),
    ],
    ids=["correct", "hangs", "raises", "ends"],
)
def test_processes_that_hang_or_fail_are_an_error(monkeypatch, program, seconds, error):
    monkeypatch.setattr(doctor, "COLLECTIVES", ("-c", program))
    assert run_collectives(os.environ, "cpu", seconds) == ({}, error)


def test_wrong_results_and_errors_are_failures(monkeypatch):
    monkeypatch.setattr(doctor, "run_collectives", lambda *_: ({"a": [], "b": [1]}, "no more"))
    found = list(doctor._processes({}))[:3]
    assert [one.status for one in found] == ["ok", "fail", "fail"]
    assert "rank 1" in found[1].detail
    assert "GLOO_SOCKET_IFNAME" in found[2].remedy


@pytest.mark.slow
def test_two_processes_work_together_here():
    crowded = {**os.environ, "RANK": "7", "WORLD_SIZE": "9", "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert run_collectives(crowded, "cpu", 120.0) == ({name: [] for name in COLLECTIVES}, "")


def test_a_wrong_result_is_named(monkeypatch):
    correct = collectives_check.all_reduce

    def all_reduce(own):
        return correct(own) + 1

    monkeypatch.setattr(collectives_check, "all_reduce", all_reduce)
    with connected("cpu", 20.0, group_of_one=True) as world:
        found = wrong_results(world)
    assert found == {name: [] for name in COLLECTIVES} | {"all_reduce": [0]}
