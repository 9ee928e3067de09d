"""Check whether this machine can train, and suggest a remedy for every problem.

An exception in a check is reported as a finding. Checks that may hang run in subprocesses with a timeout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from multipack.launch.allocation import find_allocation, find_launchers
from multipack.machine import Finding, MissingExtra, Status, explain_missing, install_words
from multipack.parallel.ranks import LAUNCHERS, find_ranks

LEAST_FREE_BYTES = 1 << 30
"""Free space of a folder below which there is a warning."""
PROCESS_SECONDS = 90.0
"""Timeout of the checks in two processes; importing torch takes most of the time."""
COLLECTIVES = (
    *("-m", "multipack.launch.torchrun", "--rdzv-backend", "loopback", "--nproc-per-node", "2"),
    *("-m", "multipack.launch.collectives_check"),
)
"""Arguments of the interpreter that check the collectives of training in two processes; a device follows."""


def _judge(name: str, detail: str, remedy: str = "", status: Status = "fail") -> Finding:
    """A finding that is `ok` unless there is a remedy."""
    return Finding(name, status if remedy else "ok", detail, remedy)


def examine(
    environment: Mapping[str, str], quick: bool = False, progress: Callable[[str], None] = lambda area: None
) -> list[Finding]:
    """Run all checks, with `quick` those that start no processes; `progress` is called with the area of each."""
    checks = [_packages, _devices, _attention, _launching, _folders, *([] if quick else [_processes])]
    found: list[Finding] = []
    for check in checks:
        area = check.__name__.strip("_")
        progress(area)
        try:
            for finding in check(environment):
                found.append(replace(finding, area=area))
        except Exception as error:
            if isinstance(error, ModuleNotFoundError):
                error = explain_missing(error, "it")
            if isinstance(error, MissingExtra):  # the user installed multipack without it
                found.append(Finding("not checked", "ok", str(error), area=area))
                continue
            remedy = "if this machine is not the cause, please report it as a bug of multipack"
            found.append(Finding("check", "fail", f"{type(error).__name__}: {error}", remedy, area))
    return found


def _can_train() -> bool:
    """Whether torch is installed, without importing it."""
    with suppress(ModuleNotFoundError):  # where an import hook blocks torch
        return importlib.util.find_spec("torch") is not None
    return False


def _packages(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the versions of Python and of the packages that multipack's metadata requires."""
    if not _can_train():
        detail = f"planning only; training needs the package torch: {install_words('train')}"
        yield Finding("multipack", "ok", detail)
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    pattern = r"([\w.-]+)(?:\[[\w,-]+\])?\s*>=\s*([\d.]+)(?:\s*;\s*extra == ['\"](\w+)['\"])?"
    required: list[str] = []
    try:
        required += importlib.metadata.requires("multipack") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("multipack", "warn", "not installed", "pip install multipack")
    extras: dict[str, list[str]] = {}  # name → its packages as they are, empty where one is missing
    for match in filter(None, (re.fullmatch(pattern, requirement) for requirement in required)):
        name, least, extra = match.groups("")
        if extra in ("dev", "bench"):
            continue
        install = install_words(extra) if extra else f"pip install '{name}>={least}'"
        version = ""
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
        if version and _numbers(version) < _numbers(least):
            status: Status = "warn" if extra else "fail"
            yield Finding(name, status, f"{version} is older than {least}", install)
        elif not extra:
            yield _judge(name, version or "not installed", "" if version else install)
        extras.setdefault(extra, []).append(f"{name} {version}" if version else "")
    present = {extra: found for extra, found in extras.items() if extra and all(found)}
    for extra, found in present.items():
        yield Finding(f"extra {extra}", "ok", ", ".join(found))
    if missing := [extra for extra in extras if extra and extra not in present]:
        yield Finding("other extras", "ok", f"{', '.join(missing)}: not installed ({install_words('NAME')})")


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, to compare versions."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _devices(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check cores, GPUs, and the communication backends for them."""
    import torch
    import torch.distributed as dist

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cpu", "ok", f"{usable} of {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        remedy = "end the process that uses its memory (see nvidia-smi), or choose another GPU"
        yield _judge(f"cuda:{index}", detail, remedy if free < total / 2 else "", "warn")
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not count and not hidden and (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()):
        remedy = "compare the driver (nvidia-smi) with torch.version.cuda, or install torch with GPU support"
        yield Finding("gpu", "warn", f"torch {torch.__version__} cannot use the GPU", remedy)
    elif not count:
        yield Finding("gpu", "ok", "none" + (" (hidden by CUDA_VISIBLE_DEVICES)" if hidden else ""))
    for name, available in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        needed = name == "gloo" or count > 0
        detail = "available" if available else "not in this torch; nccl is for GPUs"
        yield _judge(name, detail, f"install torch with {name}" if needed and not available else "")


def _attention(environment: Mapping[str, str]) -> Iterator[Finding]:
    """List the attention backends and whether they run here."""
    import torch

    from multipack.ops.attention.table import BACKENDS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for row in [row for row in BACKENDS if not row.missing]:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes) or "all"
        elsewhere = bool(row.devices) and device not in row.devices
        detail = f"not on {device}" if elsewhere else f"{dtypes}; {row.note}"
        yield Finding(row.name, "ok", detail)
    if missing := [f"{row.name} ({row.install})" for row in BACKENDS if row.missing]:
        yield Finding("not installed", "ok", ", ".join(missing))


def _launching(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the launcher's variables, launchers, the scheduler, and this host's address."""
    try:
        ranks = find_ranks(environment)
        detail = f"rank {ranks.rank} of {ranks.size}, started by {ranks.launcher}"
        yield Finding("ranks", "ok", detail if ranks.size > 1 else "a single process")
    except ValueError as error:
        yield Finding("ranks", "fail", str(error), "unset variables left over from another launcher")
    launchers = [f"{name} ({flavor})" for name, flavor in find_launchers(environment).items()]
    torchrun = ["torchrun"] if _can_train() else []  # the package's own, with or without a PATH
    yield Finding("launchers", "ok", ", ".join(torchrun + launchers) or "none")
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
    if chosen:
        detail = f"no network interface {missing[0]}" if missing else f"{name}, over {chosen}"
        return _judge("address", detail, remedy if missing else "")
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        detail = f"the host name {name} cannot be resolved ({error})"
        return Finding("address", "warn", detail, f"add {name} to /etc/hosts, or {remedy}")
    local = all(address.startswith("127.") or address == "::1" for address in addresses)
    return _judge("address", f"{name}: {', '.join(addresses)}", remedy if several and local else "", "warn")


def _folders(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that folders can be written and locked, and have room."""
    from multipack.atomic import cache_folder, locked

    folders = [
        ("current", Path.cwd(), "change to a writable folder, or use out=FOLDER"),
        ("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a writable folder"),
    ]
    try:
        remedy = "set XDG_CACHE_HOME (or data.cache=FOLDER) to a writable folder"
        folders.append(("cache", cache_folder(), remedy))
    except ValueError as error:
        yield Finding("cache", "fail", str(error), "set XDG_CACHE_HOME to a writable folder")
    if (shared := Path("/dev/shm")).exists():  # only Linux has it
        remedy = "enlarge it (docker run --shm-size=8g): nccl and data.stage use it"
        folders.append(("shared memory", shared, remedy))
    for name, folder, remedy in folders:
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
        room = "" if free >= LEAST_FREE_BYTES else f"free space, or {remedy}"
        yield _judge(name, f"{folder}, {free / 2**30:.1f} GiB free", room, "warn")


def _processes(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Run the collectives of training in two processes."""
    import torch

    backends = {"cpu": "gloo"} | ({"cuda": "nccl"} if torch.cuda.device_count() > 1 else {})
    for device, backend in backends.items():
        remedy = (
            f"run with TORCH_DISTRIBUTED_DEBUG=DETAIL; if it hangs, set {backend.upper()}_SOCKET_IFNAME to the network"
            " interface that the hosts share (`lo` on one host), and check firewalls"
        )
        found, error = run_collectives(environment, device, PROCESS_SECONDS)
        for name, wrong in found.items():
            detail = f"wrong result on rank {', '.join(map(str, wrong))}" if wrong else "correct"
            yield _judge(f"{name} ({backend})", detail, remedy if wrong else "")
        if error:
            yield Finding(f"collectives ({backend})", "fail", error, remedy)


def run_collectives(
    environment: Mapping[str, str], device: str, timeout_seconds: float
) -> tuple[dict[str, list[int]], str]:
    """Run collectives_check.py in two processes, without the variables of a launcher.

    Returns:
        Collective → ranks with a wrong result, and an error if the processes failed.
    """
    names = {name for row in LAUNCHERS for names in row[1:] for name in names.split()}
    names |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}
    process = subprocess.Popen(
        [sys.executable, *COLLECTIVES, device],
        env={name: value for name, value in environment.items() if name not in names},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        process.communicate()
        return {}, f"killed after {timeout_seconds:g} s"
    try:
        return json.loads(printed), ""
    except json.JSONDecodeError:
        reason = re.search(r"\w*[Ee]rror: .*", errors)
        return {}, reason[0][:300] if reason else f"exit code {process.returncode}"
