"""A batch script for Slurm or PBS that starts a run by `multipack launch`.

The script holds what the scheduler must know and one command; which hosts the job gets, `multipack launch` reads in it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from multipack.atomic import write_atomically

_TIME = re.compile(r"\d{1,4}:[0-5]\d:[0-5]\d")


@dataclass(frozen=True)
class SubmitRequest:
    """A job. Numbers that are 0, and names that are empty, are left to the scheduler."""

    scheduler: Literal["slurm", "pbs"]
    """Whose script it is: `slurm` (sbatch) or `pbs` (qsub)."""
    words: Sequence[str]
    """A command of multipack and its words: train model=gpt2 …."""
    nodes: int = 1
    """Hosts."""
    processes_per_node: int = 1
    """Processes on each host."""
    time: str = "01:00:00"
    """Longest the job may take, HOURS:MINUTES:SECONDS."""
    queue: str = ""
    """Queue of PBS, partition of Slurm."""
    account: str = ""
    """Who pays."""
    name: str = "multipack"
    """Name of the job, and of its log."""
    gpus: int = 0
    """GPUs of each host."""
    cores: int = 0
    """CPU cores of each process."""
    max_restarts: int = 0
    """How often torchrun may start the processes again after one has died."""
    directives: Sequence[str] = ()
    """More options of the scheduler, one a line."""
    python: str = sys.executable
    """The interpreter, at the same path on every host."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.scheduler not in ("slurm", "pbs"):
            raise ValueError(f"--scheduler {self.scheduler} is not known: give slurm or pbs")
        if not self.words:
            raise ValueError(
                "nothing to run: write the command behind --, as in `multipack submit … -- train`"
            )
        if not _TIME.fullmatch(self.time):
            raise ValueError(f"--time {self.time!r} is no time: give HOURS:MINUTES:SECONDS, such as 01:30:00")
        for option, least in (
            ("nodes", 1),
            ("processes_per_node", 1),
            ("gpus", 0),
            ("cores", 0),
            ("max_restarts", 0),
        ):
            if getattr(self, option) < least:
                shown = {"processes_per_node": "ppn"}.get(option, option).replace("_", "-")
                raise ValueError(f"--{shown} {getattr(self, option)}: give at least {least}")
        for option, text in (("queue", self.queue), ("account", self.account), ("name", self.name)):
            if text and not re.fullmatch(r"[\w@.:+-]+", text):
                raise ValueError(
                    f"--{option} {text!r} has characters that no scheduler takes: use letters, digits and _"
                )
        if any("\n" in line for line in self.directives):
            raise ValueError("--directive is one line of the scheduler: give one --directive for each")


def batch_script(request: SubmitRequest) -> str:
    """The script's text."""
    lines = (_slurm if request.scheduler == "slurm" else _pbs)(request)
    prefix = {"slurm": "#SBATCH", "pbs": "#PBS"}[request.scheduler]
    folder = {"slurm": "SLURM_SUBMIT_DIR", "pbs": "PBS_O_WORKDIR"}[request.scheduler]
    command = [
        request.python,
        "-m",
        "multipack",
        "launch",
        "-n",
        str(request.nodes * request.processes_per_node),
    ]
    command += ["--nodes", str(request.nodes), "--ppn", str(request.processes_per_node)]
    command += ["--cores", str(request.cores)] if request.cores else []
    command += ["--max-restarts", str(request.max_restarts)] if request.max_restarts else []
    body = [f'cd "${folder}"', f"exec {shlex.join([*command, '--', *request.words])}"]
    return "\n".join(
        ["#!/bin/bash", *(f"{prefix} {line}" for line in [*lines, *request.directives]), "", *body, ""]
    )


def _slurm(request: SubmitRequest) -> list[str]:
    lines = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.processes_per_node}",
        f"--time={request.time}",
        f"--output={request.name}-%j.log",
        # Two minutes before the time is up the processes are told, so that they save.
        "--signal=TERM@120",
    ]
    for option, value in (
        ("partition", request.queue),
        ("account", request.account),
        ("gpus-per-node", request.gpus),
        ("cpus-per-task", request.cores),
    ):
        if value:
            lines.append(f"--{option}={value}")
    return lines


def _pbs(request: SubmitRequest) -> list[str]:
    chunk = [f"select={request.nodes}", f"mpiprocs={request.processes_per_node}"]
    chunk += [f"ncpus={request.cores * request.processes_per_node}"] if request.cores else []
    chunk += [f"ngpus={request.gpus}"] if request.gpus else []
    lines = [
        f"-N {request.name}",
        f"-l {':'.join(chunk)}",
        "-l place=scatter",
        f"-l walltime={request.time}",
        "-j oe",
    ]
    lines += [f"-q {request.queue}"] if request.queue else []
    return lines + ([f"-A {request.account}"] if request.account else [])


def write_script(request: SubmitRequest, path: Path) -> None:
    """Write the script, whole or not at all.

    Raises:
        ValueError: the file exists.
    """
    if path.exists():
        raise ValueError(f"-o {path} exists already: choose another name, or move it away")
    write_atomically(path, batch_script(request).encode())
    path.chmod(0o755)
