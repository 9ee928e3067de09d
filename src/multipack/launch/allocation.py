"""Hosts that a scheduler or a hostfile provides, and the launchers on the PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from multipack.parallel.ranks import expand_hostlist, job_of

Flavor = Literal["slurm", "pals", "mpich", "openmpi"]
"""Family of launchers that share their options."""
_MARKS: dict[Flavor, tuple[str, ...]] = {
    "pals": ("/pals/", "PALS"),
    "openmpi": ("Open MPI", "OpenRTE", "PRRTE"),
    "mpich": ("HYDRA", "Intel(R) MPI", "MVAPICH"),
}
"""Texts in the path or version of a launcher that identify its flavor."""


@dataclass(frozen=True)
class Allocation:
    """The hosts on which processes may run.

    Attributes:
        scheduler: the scheduler that provides the hosts.
        hosts: host → number of processes; 0 = unknown. Empty = this host only.
        job: the scheduler's job identifier with its step; empty without a scheduler.
        processes: number of processes that the job requested; 0 = unknown.
        cores: CPU cores per process; 0 = unknown.
        in_step: whether this process runs inside srun, so that another srun must share its resources.
        launchers: program → flavor.
        here: name of this host; empty = unknown.
    """

    scheduler: Literal["slurm", "pbs", "none"] = "none"
    hosts: Mapping[str, int] = field(default_factory=dict)
    job: str = ""
    processes: int = 0
    cores: int = 0
    in_step: bool = False
    launchers: Mapping[str, Flavor] = field(default_factory=dict)
    here: str = ""


def find_allocation(environment: Mapping[str, str], hostfile: str = "") -> Allocation:
    """Read the scheduler's variables, and the hostfile that they or the user name.

    Args:
        environment: environment variables, such as a job script's.
        hostfile: hosts to use; inside a job, a subset of its hosts.

    Returns:
        The allocation with hosts in the order of the job, without launchers and the name of this host.

    Raises:
        ValueError: an invalid host list, or a hostfile with hosts outside the job.
        FileNotFoundError: the hostfile does not exist.
    """
    chosen = parse_hostfile(Path(hostfile).read_text(), hostfile) if hostfile else {}
    job = job_of(environment)
    if environment.get("SLURM_JOB_ID"):
        tasks, cores = (int(environment.get(f"SLURM_{name}") or 0) for name in ("NTASKS", "CPUS_PER_TASK"))
        in_step = bool(environment.get("SLURM_STEP_ID"))
        found = Allocation("slurm", _slurm_hosts(environment), job, tasks, cores, in_step)
    elif environment.get("PBS_JOBID"):
        # A PBS nodefile has one line per process (mpiprocs).
        nodefile = environment.get("PBS_NODEFILE", "")
        given = parse_hostfile(Path(nodefile).read_text(), nodefile) if nodefile else {}
        found = Allocation("pbs", given, job, sum(given.values()))
    else:
        return Allocation(hosts=chosen, processes=sum(chosen.values()))
    if not chosen:
        return found
    hosts = list(found.hosts or chosen)
    foreign = [name for name in chosen if name not in hosts]
    if foreign:
        raise ValueError(
            f"--hostfile {hostfile} has {foreign[0]}, which is not a host of this job"
            f" ({', '.join(hosts[:4])}{', …' if len(hosts) > 4 else ''}): remove it"
        )
    return replace(found, hosts={name: chosen[name] for name in hosts if name in chosen}, processes=0)


def parse_hostfile(text: str, source: str) -> dict[str, int]:
    """Parse a hostfile: one `HOST`, `HOST slots=N` or `HOST:N` per line, # starts a comment.

    Returns:
        Host → processes, in the order of the file. Lines of the same host add up; a line without a number counts 1.
    """
    slots: dict[str, int] = {}
    # max_slots, Open MPI's upper limit, is ignored: it is at least `slots`.
    entry = re.compile(r"([^\s,:\[\]#=]+)(?::([1-9]\d*))?((?:\s+(?:slots|max[_-]slots)=[1-9]\d*)*)\s*")
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        match = entry.fullmatch(content)
        if not content:
            continue
        if match is None:
            raise ValueError(
                f"{source}, line {number}: {content!r} is invalid; write HOST, HOST slots=N or HOST:N"
            )
        count = re.search(r"\sslots=(\d+)", match[3])
        slots[match[1]] = slots.get(match[1], 0) + int(count[1] if count else match[2] or 1)
    if not slots:
        raise ValueError(f"{source} names no host; write one per line: HOST, or HOST slots=N")
    return slots


def _slurm_hosts(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the job's hosts with their tasks; 0 where the job requested no tasks."""
    names = expand_hostlist(environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", ""))
    tasks: list[int] = []
    if environment.get("SLURM_NTASKS"):
        listed = environment.get("SLURM_TASKS_PER_NODE", "")
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
            tasks += [int(count)] * int(times or 1)
    return dict(zip(names, tasks, strict=True)) if len(tasks) == len(names) else dict.fromkeys(names, 0)


def find_launchers(environment: Mapping[str, str]) -> dict[str, Flavor]:
    """Return the launchers on the PATH with their flavors; unknown ones are left out."""
    found: dict[str, Flavor] = {}
    for name in ("srun", "mpiexec", "mpirun"):
        path = shutil.which(name, path=environment.get("PATH"))
        if path is None:
            continue
        version = ""
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=10, check=False
            )
            version = done.stdout + done.stderr
        flavor = flavor_of(name, f"{os.path.realpath(path)} {version}")
        if flavor is not None:
            found[name] = flavor
    return found


def flavor_of(name: str, text: str) -> Flavor | None:
    """Return the flavor of a launcher from its path and version text, or None if it is unknown."""
    if name == "srun":
        return "slurm"
    return next((flavor for flavor, marks in _MARKS.items() if any(mark in text for mark in marks)), None)
