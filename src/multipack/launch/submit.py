"""Batch scripts for Slurm and PBS that run `multipack launch`, which finds the hosts of the job."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from multipack.atomic import write_atomically


@dataclass(frozen=True)
class SubmitRequest:
    """A job: the options of `multipack submit`.

    GPUs are per host and cores per process; numbers that are 0 and names that are empty are left to the scheduler.
    """

    scheduler: Literal["slurm", "pbs"]
    words: Sequence[str]
    """A multipack command and its words: train model=gpt2 …."""
    nodes: int = 1
    processes_per_node: int = 1
    time: str = "01:00:00"
    queue: str = ""
    account: str = ""
    name: str = "multipack"
    gpus: int = 0
    cores: int = 0
    directives: Sequence[str] = ()
    """Additional scheduler options, one per line."""
    python: str = sys.executable
    """The interpreter, at the same path on every host."""

    def __post_init__(self) -> None:
        """Check the fields that could break the script."""
        if self.scheduler not in ("slurm", "pbs"):
            raise ValueError(f"--scheduler {self.scheduler or 'is not given'}: must be slurm or pbs")
        if not self.words:
            raise ValueError(
                "nothing to run: write the command after --, as in `multipack submit … -- train`"
            )
        if not re.fullmatch(r"\d{1,4}:[0-5]\d:[0-5]\d", self.time):
            raise ValueError(f"--time {self.time!r} is not HOURS:MINUTES:SECONDS, such as 01:30:00")
        numbers = {"--nodes": self.nodes, "--ppn": self.processes_per_node, "--gpus": self.gpus}
        for option, value in (numbers | {"--cores": self.cores}).items():
            least = int(option in ("--nodes", "--ppn"))
            if value < least:
                raise ValueError(f"{option} {value}: must be at least {least}")
        for option, text in (("--queue", self.queue), ("--account", self.account), ("--name", self.name)):
            if text and not re.fullmatch(r"[\w@.:+-]+", text):
                raise ValueError(f"{option} {text!r}: use letters, digits and any of _ @ . : + -")
        if any("\n" in line for line in self.directives):
            raise ValueError("--directive must be one line: repeat --directive for more")


def batch_script(request: SubmitRequest) -> str:
    """Return the script's text."""
    if request.scheduler == "slurm":
        prefix, folder, lines = "#SBATCH", "SLURM_SUBMIT_DIR", _slurm(request)
    else:
        prefix, folder, lines = "#PBS", "PBS_O_WORKDIR", _pbs(request)
    processes = request.nodes * request.processes_per_node
    command = [request.python, "-m", "multipack", "launch", "-n", str(processes)]
    command += ["--nodes", str(request.nodes), "--ppn", str(request.processes_per_node)]
    command += ["--cores", str(request.cores)] if request.cores else []
    header = [f"{prefix} {line}" for line in [*lines, *request.directives]]
    body = [f'cd "${folder}"', f"exec {shlex.join([*command, '--', *request.words])}"]
    return "\n".join(["#!/bin/bash", *header, "", *body, ""])


def _slurm(request: SubmitRequest) -> list[str]:
    optional = {
        "partition": request.queue,
        "account": request.account,
        "gpus-per-node": request.gpus,
        "cpus-per-task": request.cores,
    }
    return [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.processes_per_node}",
        f"--time={request.time}",
        f"--output={request.name}-%j.log",
        # Two minutes before the time limit, processes receive SIGTERM and save a checkpoint.
        "--signal=TERM@120",
        *(f"--{option}={value}" for option, value in optional.items() if value),
    ]


def _pbs(request: SubmitRequest) -> list[str]:
    chunk = [f"select={request.nodes}", f"mpiprocs={request.processes_per_node}"]
    chunk += [f"ncpus={request.cores * request.processes_per_node}"] if request.cores else []
    chunk += [f"ngpus={request.gpus}"] if request.gpus else []
    lines = [f"-N {request.name}", f"-l {':'.join(chunk)}", "-l place=scatter"]
    lines += [f"-l walltime={request.time}", "-j oe"]
    lines += [f"-q {request.queue}"] if request.queue else []
    return lines + ([f"-A {request.account}"] if request.account else [])


def write_script(request: SubmitRequest, path: Path) -> None:
    """Write the script atomically, executable, to a file that does not exist yet."""
    if path.exists():
        raise ValueError(f"-o {path} exists: choose another name, or move it away")
    write_atomically(path, batch_script(request).encode())
    path.chmod(0o755)
