"""Check whether this machine can train, and suggest a remedy for every problem.

An exception in a check is reported as a finding. Checks that may hang run in subprocesses with a timeout.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from multipack.launch.smoke import CHECKS
from multipack.parallel.ranks import TABLE

Status = Literal["ok", "warn", "fail"]
LEAST_FREE_BYTES = 1 << 30
"""Free space of a folder below which there is a warning."""
SMOKE_SECONDS = 90.0
"""Timeout of all checks in two processes; importing torch takes most of the time."""


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        name: what was checked.
        status: `fail` = training does not work; `warn` = it is slower, or fails in some setups.
        detail: what was found.
        remedy: what to do; empty if the status is `ok`.
        area: subject of the check, set by `examine`.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    area: str = ""


Check = Callable[[Mapping[str, str]], Iterator[Finding]]


def examine(
    environment: Mapping[str, str], quick: bool = False, progress: Callable[[str], None] = lambda area: None
) -> list[Finding]:
    """Run all checks.

    Args:
        environment: environment variables of this process.
        quick: skip the checks that start processes.
        progress: called with the area before each check.
    """
    checks: dict[str, Check] = {
        "packages": _packages,
        "devices": _devices,
        "attention": _attention,
        "launching": _launching,
        "folders": _folders,
        **({} if quick else {"processes": _processes}),
    }
    found: list[Finding] = []
    for area, check in checks.items():
        progress(area)
        try:
            for finding in check(environment):
                found.append(replace(finding, area=area))
        except Exception as error:
            remedy = (
                "see the message; if this machine is not the cause, please report it as a bug of multipack"
            )
            found.append(Finding("check", "fail", f"{type(error).__name__}: {error}", remedy, area))
    return found


def _packages(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the versions of Python and of the packages that multipack's metadata requires."""
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    pattern = r"([\w.-]+)(?:\[[\w,-]+\])?\s*>=\s*([\d.]+)(?:\s*;\s*extra == ['\"](\w+)['\"])?"
    try:
        required = importlib.metadata.requires("multipack") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
        yield Finding("multipack", "warn", "not installed", "pip install multipack")
    for match in filter(None, (re.fullmatch(pattern, requirement) for requirement in required)):
        name, least, extra = match[1], match[2], match[3] or ""
        if extra in ("dev", "bench"):
            continue
        shown = f"{name} ({extra})" if extra else name
        install = f'pip install "multipack[{extra}]"' if extra else f"pip install '{name}>={least}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if extra:
                yield Finding(shown, "ok", f"optional, not installed: {install}")
            else:
                yield Finding(shown, "fail", "not installed", install)
            continue
        if _numbers(version) >= _numbers(least):
            yield Finding(shown, "ok", version)
        else:
            status: Status = "warn" if extra else "fail"
            yield Finding(shown, status, f"{version} is older than {least}", install)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _devices(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check cores, GPUs, and the communication backends for them."""
    import torch
    import torch.distributed as dist

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = f"{usable} of {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    yield Finding("cpu", "ok", cores)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        remedy = "end the process that uses its memory (see nvidia-smi), or choose another GPU"
        used = free < total / 2
        yield Finding(f"cuda:{index}", "warn" if used else "ok", detail, remedy if used else "")
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not count and not hidden and (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()):
        remedy = (
            "compare the driver (nvidia-smi) with torch.version.cuda, or install torch with GPU support"
            " (pytorch.org/get-started)"
        )
        yield Finding("gpu", "warn", f"torch {torch.__version__} cannot use the GPU", remedy)
    elif not count:
        yield Finding("gpu", "ok", "none" + (" (hidden by CUDA_VISIBLE_DEVICES)" if hidden else ""))
    for name, is_available, is_needed in (
        ("gloo", dist.is_available() and dist.is_gloo_available(), True),
        ("nccl", dist.is_available() and dist.is_nccl_available(), count > 0),
    ):
        if is_available or not is_needed:
            detail = "available" if is_available else "not in this torch; only needed for GPUs"
            yield Finding(name, "ok", detail)
        else:
            yield Finding(name, "fail", "not in this torch", f"install torch with {name}")


def _attention(environment: Mapping[str, str]) -> Iterator[Finding]:
    import torch

    from multipack.ops.attention import BACKENDS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for row in BACKENDS:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes) or "all"
        detail = f"{dtypes}; {row.note}"
        if row.missing:
            detail = f"not installed ({row.needs}: {row.install})"
        elif row.devices and device not in row.devices:
            detail = f"not on {device}"
        yield Finding(row.name, "ok", detail)


def _launching(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the launcher's variables, launchers, the scheduler, and this host's address."""
    from multipack.launch.allocation import find_allocation, find_launchers
    from multipack.parallel.ranks import find_ranks

    try:
        ranks = find_ranks(environment)
        detail = f"rank {ranks.rank} of {ranks.size}, started by {ranks.launcher}"
        yield Finding("ranks", "ok", detail if ranks.size > 1 else "a single process")
    except ValueError as error:
        yield Finding("ranks", "fail", str(error), "unset variables left over from another launcher")
    launchers = [f"{name} ({flavor})" for name, flavor in find_launchers(environment).items()]
    yield Finding("launchers", "ok", ", ".join(["torchrun", *launchers]))
    try:
        allocation = find_allocation(environment)
    except (ValueError, OSError) as error:
        yield Finding("scheduler", "fail", str(error), "run this on the first host of the job")
        return
    hosts = list(allocation.hosts)
    shown = f", {len(hosts)} hosts: {', '.join(hosts[:8])}{', …' if len(hosts) > 8 else ''}" if hosts else ""
    yield Finding("scheduler", "ok", f"{allocation.scheduler}{shown}")
    yield _address(environment, len(hosts) > 1)


def _address(environment: Mapping[str, str], several: bool) -> Finding:
    """Check that other hosts can reach this one at the address of its host name, which gloo uses."""
    name, chosen = socket.gethostname(), environment.get("GLOO_SOCKET_IFNAME", "")
    present = [interface for _, interface in socket.if_nameindex()]
    remedy = f"set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to one of {', '.join(present)} on every host"
    missing = [part for part in chosen.split(",") if part and part not in present]
    if missing:
        return Finding("address", "fail", f"no network interface {missing[0]}", remedy)
    if chosen:
        return Finding("address", "ok", f"{name}, over {chosen} (GLOO_SOCKET_IFNAME)")
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        detail = f"the host name {name} cannot be resolved ({error})"
        return Finding("address", "warn", detail, f"add {name} to /etc/hosts, or {remedy}")
    if several and all(address.startswith("127.") or address == "::1" for address in addresses):
        detail = f"{name} resolves to {', '.join(addresses)}, which other hosts cannot reach"
        return Finding("address", "warn", detail, remedy)
    return Finding("address", "ok", f"{name}: {', '.join(addresses)}")


def _folders(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that folders can be written and locked, and that the planner's compiled code can be cached."""
    import numba

    from multipack.atomic import cache_folder, locked

    for name, folder, remedy in (
        ("cache", cache_folder(), "set XDG_CACHE_HOME (or data.cache=FOLDER) to a writable folder"),
        ("current", Path.cwd(), "change to a writable folder, or use out=FOLDER"),
        ("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a writable folder"),
    ):
        try:
            # A missing folder is created when it is needed: its nearest existing parent must be writable.
            parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
            made = tempfile.TemporaryDirectory(dir=parent, prefix=".multipack-doctor-")
            with made as trial, locked(Path(trial) / "lock"):
                (Path(trial) / "file").write_bytes(b"x" * 4096)
            free = shutil.disk_usage(parent).free
        except (OSError, ValueError) as error:
            yield Finding(name, "fail", f"{folder}: {error}", remedy)
            continue
        low = free < LEAST_FREE_BYTES
        detail, remedy = f"{folder}, {free / 2**30:.1f} GiB free", f"free space, or {remedy}" if low else ""
        yield Finding(name, "warn" if low else "ok", detail, remedy)
    try:
        numba.njit(cache=True)(_numbers)  # only looks for a cache folder; compiles nothing
        yield Finding("compiled code", "ok", "kept between runs")
    except RuntimeError:
        detail, remedy = "every process compiles the planner", "set NUMBA_CACHE_DIR to a writable folder"
        yield Finding("compiled code", "warn", detail, remedy)


def _processes(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Run every collective and a training step in two processes."""
    import torch

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() and torch.cuda.device_count() > 1 else [])]
    for device in devices:
        backend = {"cpu": "gloo", "cuda": "nccl"}[device]
        remedy = (
            f"run with TORCH_DISTRIBUTED_DEBUG=DETAIL; if it hangs, set {backend.upper()}_SOCKET_IFNAME to the network"
            " interface that the hosts share (`lo` on one host), and check firewalls"
        )
        for name, error, seconds in smoke_test(environment, device, SMOKE_SECONDS):
            if error:
                yield Finding(f"{name} ({backend})", "fail", error, remedy)
            else:
                yield Finding(f"{name} ({backend})", "ok", f"correct, {1000 * seconds:.0f} ms")


def smoke_test(
    environment: Mapping[str, str],
    device: str,
    timeout_seconds: float,
    program: Sequence[str] = ("-m", "multipack.launch.smoke"),
) -> Iterator[tuple[str, str, float]]:
    """Run smoke.py in two processes.

    Args:
        environment: environment variables of the processes, without those of a launcher, which are removed.
        device: `cpu` or `cuda`.
        timeout_seconds: time after which the processes are killed.
        program: arguments of torchrun that name the program.

    Yields:
        (check, error, seconds) for each check, up to the first that failed; the error is empty on success.
    """
    names = {name for row in TABLE for names in row[1:] for name in names}
    names |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, *program, device],
        env={name: value for name, value in environment.items() if name not in names},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ending = ""
    timer = threading.Timer(timeout_seconds, process.terminate)  # torchrun then ends its workers
    timer.start()
    printed, errors = process.communicate()
    if not timer.is_alive():
        ending = f"killed after {timeout_seconds:.0f} s"
    timer.cancel()
    results = [json.loads(line) for line in printed.splitlines() if line.startswith('{"check"')]
    for name, result in zip(CHECKS, results, strict=False):
        yield name, result["error"], result["seconds"]
        if result["error"]:
            return
    if len(results) < len(CHECKS):
        reason = re.search(r"\w*Error: .*", errors)
        ending = ending or (reason[0][:300] if reason else f"exit code {process.returncode}")
        yield CHECKS[len(results)], ending, 0.0
