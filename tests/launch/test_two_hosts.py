"""Two hosts on one machine: network namespaces with separate addresses."""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ADDRESSES = ("10.77.213.1", "10.77.213.2")
INTERFACE = "mpeth0"


def _ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def hosts():
    """The names of two namespaces, joined by one cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"mp{os.getpid()}h{number}" for number in (1, 2)]
    ends = [f"mp{os.getpid()}v{number}"[-15:] for number in (1, 2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name, "name", INTERFACE)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _train(words, out):
    return ["train", *words, "train.steps=3", "parallel.timeout_seconds=30", f"out={out}"]


def _losses(out):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def _launch(host, *options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "multipack", "launch", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"

    def losses(words):
        if not out.exists():
            command = [sys.executable, "-m", "multipack", *_train(words, out)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        return _losses(out)

    return losses


def test_two_hosts_train_as_one_process_does(hosts, words, tmp_path, alone):
    """The same command on each host, with the host's number."""
    options = ["-n", "4", "--nodes", "2", "--address", ADDRESSES[0], "--port", "29517"]
    run = ["--", *_train(words, tmp_path / "run")]
    started = [_launch(host, *options, "--node-rank", str(rank), *run) for rank, host in enumerate(hosts)]
    printed = [process.communicate(timeout=150)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert "4 processes" in printed[0]
    assert _losses(tmp_path / "run") == pytest.approx(alone(words), abs=1e-5)


def test_mpiexec_reaches_both_hosts(hosts, words, tmp_path, alone):
    """MPICH's mpiexec, with namespaces instead of ssh, starts the processes."""
    mpiexec = shutil.which("mpiexec") or "false"
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False)
    if "HYDRA" not in version.stdout:
        pytest.skip("there is no mpiexec of MPICH on the PATH (pip install mpich has one)")
    names = " ".join(f"{address}) host={host};;" for address, host in zip(ADDRESSES, hosts, strict=True))
    remote = tmp_path / "remote"
    remote.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'case "$1" in {names} esac\nshift\nexec ip netns exec "$host" sh -c "$*"\n'
    )
    remote.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{address} slots=2\n" for address in ADDRESSES))
    flags = f"-launcher ssh -launcher-exec {remote} -iface {INTERFACE}"
    run = ["--", *_train(words, tmp_path / "run")]
    process = _launch(hosts[0], "--hostfile", str(hostfile), "-n", "4", "--flags", flags, *run)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    assert "4 processes" in printed
    assert _losses(tmp_path / "run") == pytest.approx(alone(words), abs=1e-5)
