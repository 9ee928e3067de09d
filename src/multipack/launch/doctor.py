"""Is this machine fit to train on? Each answer is a finding, and what is wrong comes with what to do about it.

A check never takes the others with it: what it raises is its finding. What could hang runs in processes of its own,
which are ended after a while.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from multipack.launch.probe import SMOKE_SECONDS, smoke_test

Status = Literal["ok", "warn", "fail"]
LEAST_FREE_BYTES = 1 << 30
"""Below this a folder is reported as nearly full."""


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        area: what it is about.
        name: what was looked at.
        status: `fail` = training will not work; `warn` = it will, worse or not everywhere.
        detail: what was found.
        remedy: what to do about it; empty where nothing is wrong.
    """

    area: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


Check = Callable[[Mapping[str, str]], Iterator[Finding]]


def examine(
    environment: Mapping[str, str], quick: bool = False, tell: Callable[[str], None] = lambda area: None
) -> list[Finding]:
    """Run all checks.

    Args:
        environment: variables of this process.
        quick: leave out what starts processes.
        tell: called with the area before each check.
    """
    checks: dict[str, Check] = {
        "python": _python,
        "packages": _packages,
        "devices": _devices,
        "backends": _backends,
        "attention": _attention,
        "launching": _launching,
        "folders": _folders,
        "planner": _planner,
        **({} if quick else {"together": _together}),
    }
    found: list[Finding] = []
    for area, check in checks.items():
        tell(area)
        try:
            found += check(environment)
        except Exception as error:  # a finding like any other, not the end of the examination
            remedy = (
                "see the message; if it is no fault of this machine, it is a bug of multipack worth reporting"
            )
            found.append(Finding(area, "check", "fail", f"{type(error).__name__}: {error}", remedy))
    return found


def _python(environment: Mapping[str, str]) -> Iterator[Finding]:
    new_enough = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    remedy = "" if new_enough else "install Python 3.11 or newer, and multipack in an environment of it"
    yield Finding("python", "python", "ok" if new_enough else "fail", detail, remedy)


def _packages(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The packages that multipack's own metadata names, with their extras."""
    try:
        needed = importlib.metadata.requires("multipack") or []
    except importlib.metadata.PackageNotFoundError:
        remedy = "install it: pip install multipack, or pip install -e . in its source"
        yield Finding("packages", "multipack", "warn", "runs from a folder that is not installed", remedy)
        return
    yield Finding("packages", "multipack", "ok", importlib.metadata.version("multipack"))
    for requirement in needed:
        match = re.fullmatch(
            r"([\w.-]+)(?:\[[\w,-]+\])?\s*>=\s*([\d.]+)(?:\s*;\s*extra == ['\"](\w+)['\"])?", requirement
        )
        if match and match[3] not in ("dev", "bench"):
            yield _package(match[1], match[2], match[3] or "")


def _package(name: str, least: str, extra: str) -> Finding:
    shown, install = (
        (f"{name} ({extra})", f'pip install "multipack[{extra}]"')
        if extra
        else (name, f"pip install '{name}>={least}'")
    )
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if extra:
            return Finding("packages", shown, "ok", f"not installed; {install} if it is wanted")
        return Finding("packages", shown, "fail", "not installed", install)
    if _numbers(version) < _numbers(least):
        return Finding(
            "packages", shown, "warn" if extra else "fail", f"{version} is older than {least}", install
        )
    return Finding("packages", shown, "ok", version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _devices(environment: Mapping[str, str]) -> Iterator[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(
        "devices", "cpu", "ok", f"{usable} of {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        crowded = free < total / 2
        remedy = (
            "another process holds its memory (nvidia-smi shows which): end it, or choose another GPU"
            if crowded
            else ""
        )
        yield Finding("devices", f"cuda:{index}", "warn" if crowded else "ok", detail, remedy)
    if not count:
        hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        there = Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
        if there and not hidden:
            build = torch.version.cuda or torch.version.hip
            remedy = (
                "its driver is too old for this torch, or broken: compare nvidia-smi with torch.version.cuda"
                if build
                else "this torch was built without GPUs: install the build for yours (pytorch.org/get-started)"
            )
            yield Finding(
                "devices", "gpu", "warn", f"there is a GPU that torch {torch.__version__} cannot use", remedy
            )
        else:
            yield Finding(
                "devices", "gpu", "ok", "none" + (" (CUDA_VISIBLE_DEVICES hides them)" if hidden else "")
            )


def _backends(environment: Mapping[str, str]) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        remedy = "install a build of torch with torch.distributed and gloo (the usual ones have both)"
        yield Finding("backends", "gloo", "fail", "this torch lacks it", remedy)
    else:
        yield Finding("backends", "gloo", "ok", "for CPUs")
    if dist.is_available() and dist.is_nccl_available():
        yield Finding(
            "backends", "nccl", "ok", "for GPUs" if torch.cuda.is_available() else "no GPU to use it on"
        )
    elif torch.cuda.is_available():
        yield Finding("backends", "nccl", "fail", "GPUs, but no NCCL", "install a build of torch with NCCL")
    else:
        yield Finding("backends", "nccl", "ok", "not in this torch; needed for GPUs only")


def _attention(environment: Mapping[str, str]) -> Iterator[Finding]:
    import torch

    from multipack.ops.attention import table_rows

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for row in table_rows():
        usable = row["here"] == "yes" and (row["devices"] == "all" or device in row["devices"])
        why = (
            ""
            if usable
            else f"not installed ({row['needs']})"
            if row["here"] != "yes"
            else f"not on {device}"
        )
        yield Finding(
            "attention", row["backend"], "ok", why or f"{row['dtypes']}; {row['note']}".rstrip("; ")
        )


def _launching(environment: Mapping[str, str]) -> Iterator[Finding]:
    from multipack.launch.allocation import find_allocation, find_launchers
    from multipack.parallel.ranks import find_ranks

    try:
        ranks = find_ranks(environment)
    except ValueError as error:
        yield Finding(
            "launching", "ranks", "fail", str(error), "unset the variables that are left from elsewhere"
        )
    else:
        said = (
            f"process {ranks.rank} of {ranks.size}, by {ranks.launcher}"
            if ranks.size > 1
            else "a process on its own"
        )
        yield Finding("launching", "ranks", "ok", said)
    launchers = find_launchers(environment)
    named = [f"{name} ({flavor})" for name, flavor in launchers.items()]
    yield Finding("launching", "launchers", "ok", ", ".join(["torchrun", *named]))
    try:
        allocation = find_allocation(environment)
    except (ValueError, OSError) as error:
        remedy = "the scheduler's list of hosts cannot be read: run this in the job, on its first host"
        yield Finding("launching", "scheduler", "fail", str(error), remedy)
        return
    hosts = list(allocation.hosts)
    of = f", {len(hosts)} hosts: {', '.join(hosts[:8])}{', …' if len(hosts) > 8 else ''}" if hosts else ""
    yield Finding("launching", "scheduler", "ok", f"{allocation.scheduler}{of}")
    yield _address(environment, len(allocation.hosts) > 1)


def _address(environment: Mapping[str, str], several: bool) -> Finding:
    """Whether other hosts can reach this one by its name: gloo gives them the address that it resolves to."""
    name = socket.gethostname()
    chosen = environment.get("GLOO_SOCKET_IFNAME", "")
    present = [interface for _, interface in socket.if_nameindex()]
    missing = [part for part in chosen.split(",") if part and part not in present]
    if missing:
        remedy = f"set GLOO_SOCKET_IFNAME to one of {', '.join(present)}"
        return Finding("launching", "address", "fail", f"there is no network interface {missing[0]}", remedy)
    if chosen:
        return Finding("launching", "address", "ok", f"{name}, over {chosen} (GLOO_SOCKET_IFNAME)")
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError as error:
        remedy = "add this host's name to /etc/hosts, or set GLOO_SOCKET_IFNAME to its network interface"
        return Finding(
            "launching", "address", "warn", f"the name {name} cannot be resolved ({error})", remedy
        )
    loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    if loopback and several:
        remedy = (
            f"set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to one of {', '.join(present)} on every host"
        )
        detail = f"{name} resolves to {', '.join(sorted(addresses))}, where no other host can reach it"
        return Finding("launching", "address", "warn", detail, remedy)
    return Finding("launching", "address", "ok", f"{name}: {', '.join(sorted(addresses))}")


def _folders(environment: Mapping[str, str]) -> Iterator[Finding]:
    from multipack.data.cache import cache_folder, locked

    for name, folder, remedy in (
        (
            "cache",
            cache_folder(),
            "set XDG_CACHE_HOME (or data.cache=FOLDER) to a folder that can be written",
        ),
        ("current", Path.cwd(), "change to a folder that can be written, or give out=FOLDER elsewhere"),
        ("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a folder that can be written"),
    ):
        try:
            # A folder that is not there yet is made when it is needed, in the nearest one that is.
            there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
            with (
                tempfile.TemporaryDirectory(dir=there, prefix=".multipack-doctor-") as trial,
                locked(Path(trial) / "lock"),
            ):
                (Path(trial) / "file").write_bytes(b"x" * 4096)
        except (OSError, ValueError) as error:
            yield Finding("folders", name, "fail", f"{folder}: {error}", remedy)
            continue
        free = shutil.disk_usage(there).free
        low = free < LEAST_FREE_BYTES
        room = "make room, or " + remedy if low else ""
        yield Finding(
            "folders", name, "warn" if low else "ok", f"{folder}, {free / 2**30:.1f} GiB free", room
        )


def _planner(environment: Mapping[str, str]) -> Iterator[Finding]:
    from multipack.planning.jit import cached
    from multipack.planning.kernels import balancing, bounds, packing, placing

    rooms = (packing, placing, balancing, bounds)
    folders = {
        value.stats.cache_path
        for room in rooms
        for value in vars(room).values()
        if getattr(value, "stats", None) is not None
    }
    folder = next((str(path) for path in folders if path), "")
    if not folder:
        remedy = "set NUMBA_CACHE_DIR to a folder that can be written"
        detail = "the planner's loops cannot be kept: every process compiles them, which takes seconds"
        yield Finding("planner", "compiled loops", "warn", detail, remedy)
        return
    kept = "compiled and kept" if cached(*rooms) else "compiled when first used (seconds), then kept"
    yield Finding("planner", "compiled loops", "ok", f"{kept} in {folder}")


def _together(environment: Mapping[str, str]) -> Iterator[Finding]:
    import torch

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() and torch.cuda.device_count() > 1 else [])]
    for device in devices:
        backend = {"cpu": "gloo", "cuda": "nccl"}[device]
        for name, error, seconds in smoke_test(environment, device, SMOKE_SECONDS):
            remedy = (
                f"run with TORCH_DISTRIBUTED_DEBUG=DETAIL; if it hangs, set {backend.upper()}_SOCKET_IFNAME to the"
                " network interface that the hosts share (`lo` on one host), and look for firewalls"
            )
            status: Status = "fail" if error else "ok"
            found = error or f"2 processes agree, {1000 * seconds:.0f} ms"
            yield Finding("together", f"{name} ({backend})", status, found, remedy if error else "")
