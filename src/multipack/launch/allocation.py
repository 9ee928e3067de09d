"""What there is to start processes on: the hosts that a scheduler or a hostfile gives, and the launchers at hand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from multipack.parallel.hostnames import expand_hostlist, parse_hostfile
from multipack.parallel.ranks import job_of

Flavor = Literal["slurm", "pals", "mpich", "openmpi"]
"""Whose options a launcher takes."""

_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Allocation:
    """Where processes may run.

    Attributes:
        scheduler: who gave the hosts.
        hosts: host → processes that it is meant for (0 = nobody said); empty = this host alone.
        job: the scheduler's name of the job, with the step; empty without one.
        processes: that the job was asked to start; 0 = nobody said.
        cores: CPU cores for each process; 0 = nobody said.
        in_step: whether srun started the process that asks, so that another srun must share its resources.
        launchers: program → whose options it takes.
        here: name of the host that asks; empty = not known.
    """

    scheduler: Literal["slurm", "pbs", "none"] = "none"
    hosts: Mapping[str, int] = field(default_factory=dict)
    job: str = ""
    processes: int = 0
    cores: int = 0
    in_step: bool = False
    launchers: Mapping[str, Flavor] = field(default_factory=dict)
    here: str = ""


def find_allocation(
    environment: Mapping[str, str],
    hostfile: str = "",
    launchers: Mapping[str, Flavor] | None = None,
    here: str = "",
) -> Allocation:
    """Read the scheduler's variables, and the hostfile that they or the user name.

    Args:
        environment: variables of the process that asks: in a job's script, its scheduler's.
        hostfile: hosts to use; of an allocation, these only.
        launchers: program → flavor; None = none.
        here: name of this host; empty = not known.

    Raises:
        ValueError: a list of hosts that cannot be read, or a hostfile with hosts that the job does not have.
        FileNotFoundError: the hostfile is not there.
    """
    chosen = parse_hostfile(Path(hostfile).read_text(), hostfile) if hostfile else {}
    known = dict(launchers or {})
    if environment.get("SLURM_JOB_ID"):
        given = _slurm_hosts(environment)
        return Allocation(
            "slurm",
            _within(chosen, given, hostfile, "SLURM_JOB_NODELIST"),
            job_of(environment),
            0 if chosen else int(environment.get("SLURM_NTASKS") or 0),
            int(environment.get("SLURM_CPUS_PER_TASK") or 0),
            bool(environment.get("SLURM_STEP_ID")),
            known,
            here,
        )
    if environment.get("PBS_JOBID"):
        nodefile = environment.get("PBS_NODEFILE", "")
        given = parse_hostfile(Path(nodefile).read_text(), nodefile) if nodefile else {}
        hosts = _within(chosen, given, hostfile, f"PBS_NODEFILE ({nodefile})")
        # PBS writes a line for each process that `mpiprocs` asked for.
        processes = 0 if chosen else sum(given.values())
        return Allocation("pbs", hosts, job_of(environment), processes, 0, False, known, here)
    return Allocation("none", chosen, "", sum(chosen.values()), launchers=known, here=here)


def _within(chosen: dict[str, int], given: dict[str, int], hostfile: str, source: str) -> dict[str, int]:
    """The user's hosts where there are some, which must be the job's, in the job's order; else the job's."""
    foreign = [name for name in chosen if given and name not in given]
    if foreign:
        raise ValueError(
            f"--hostfile {hostfile} has {foreign[0]}, which is not among the job's hosts ({source}:"
            f" {', '.join(list(given)[:4])}{', …' if len(given) > 4 else ''}): leave it out"
        )
    if not chosen:
        return given
    return {name: chosen[name] for name in given if name in chosen} if given else chosen


def _slurm_hosts(environment: Mapping[str, str]) -> dict[str, int]:
    """The job's hosts with their tasks, which are known only where the job asked for some."""
    listed = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "")
    names = expand_hostlist(listed)
    if not environment.get("SLURM_NTASKS"):
        return dict.fromkeys(names, 0)
    tasks: list[int] = []
    for part in environment.get("SLURM_TASKS_PER_NODE", "").split(","):
        match = _COUNTS.fullmatch(part.strip())
        tasks += [int(match[1])] * int(match[2] or 1) if match else []
    return dict(zip(names, tasks, strict=True)) if len(tasks) == len(names) else dict.fromkeys(names, 0)


def find_launchers(environment: Mapping[str, str]) -> dict[str, Flavor]:
    """Launchers on the PATH, and whose options each takes, as it says itself; one that does not say is left out."""
    found: dict[str, Flavor] = {}
    for name in ("srun", "mpiexec", "mpirun"):
        path = shutil.which(name, path=environment.get("PATH"))
        flavor = flavor_of(name, os.path.realpath(path), _version(path)) if path else None
        if flavor is not None:
            found[name] = flavor
    return found


def flavor_of(name: str, path: str, version: str) -> Flavor | None:
    """Whose options a launcher takes.

    Args:
        name: `srun`, `mpiexec` or `mpirun`.
        path: of the program, links followed.
        version: what `--version` printed.

    Returns:
        None where it cannot be told.
    """
    if name == "srun":
        return "slurm"
    if "/pals/" in path or "PALS" in version:
        return "pals"
    if any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE")):
        return "openmpi"
    if any(word in version for word in ("HYDRA", "Intel(R) MPI", "MVAPICH")):
        return "mpich"
    return None


def _version(path: str) -> str:
    if os.path.basename(path) == "srun":
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
