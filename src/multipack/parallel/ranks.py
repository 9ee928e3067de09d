"""The rank of this process, read from its launcher's environment variables, and its errors. Imports no torch.

Each launcher uses different variable names, a row of `LAUNCHERS`. Processes inherit variables, so several launchers'
may be set. Rows that apply must agree; otherwise an error names the variables. Rows are ignored in these cases:

- Inside torchrun all other rows: srun or mpiexec may have started one torchrun per node.
- srun's row, if srun started one helper process of an MPI launcher per node, or a shell, or if the process belongs to
  a batch script, which has SLURM_PROCID but no step.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from multipack import untrusted


class Variables(NamedTuple):
    """The variables of one launcher. A field with several names, separated by spaces, means the first that is set."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_MPICH_LOCAL = ("MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE")
_OPEN_MPI = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
LAUNCHERS = (
    Variables("RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Variables("Open MPI", *_OPEN_MPI),
    Variables("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Variables("MPICH", "PMI_RANK", "PMI_SIZE", *_MPICH_LOCAL),
    Variables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID", ""),
)
"""Launchers; if one starts another, the inner one is first."""

JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "PALS_APID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables that identify the job of a process; the first that is set counts."""


@dataclass(frozen=True)
class Ranks:
    """One process of a run.

    Attributes:
        rank: rank of this process, 0 … size − 1.
        size: number of processes of the run.
        local_rank: rank of this process on its host.
        local_size: number of processes on this host; 0 = unknown.
        launcher: a name in `LAUNCHERS`, `"torchrun"`, or `"none"`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 0
    launcher: str = "none"


Claim = tuple[str, dict[str, tuple[str, int]]]
"""A launcher and the values of its variables: `rank`, `size`, `local_rank` or `local_size` → (variable, value)."""


def find_ranks(environment: Mapping[str, str]) -> Ranks:
    """The rank of a process with these environment variables; without a launcher's it is the only one.

    Raises:
        ValueError: two launchers disagree, a value is missing or not a number, or a rank is not below the size.
    """
    claims = _claims(environment)
    rank, size = _agreed("rank", claims), _agreed("size", claims)
    if size is None:
        if rank is not None and rank[1] > 0:
            raise ValueError(
                f"{rank[0]}={rank[1]} is set, but no world size: set WORLD_SIZE too, or use a launcher"
            )
        return Ranks()
    if size[1] < 1:
        raise ValueError(f"{size[0]}={size[1]} is no number of processes: it must be at least 1")
    if rank is None and size[1] > 1:
        raise ValueError(
            f"{size[0]}={size[1]} is set, but RANK is not; start the processes with a launcher:"
            f" multipack launch -n {size[1]} -- …, or torchrun --nproc-per-node {size[1]} -m multipack …"
        )
    variable, number = rank or ("RANK", 0)
    if number >= size[1]:
        raise ValueError(
            f"{variable}={number} is no rank of {size[0]}={size[1]} processes: ranks are 0 … {size[1] - 1}"
        )
    # The first row decides on local ranks, which may differ if each process sees one GPU only.
    first = {kind: value for _, stated in reversed(claims) for kind, (_, value) in stated.items()}
    # Started by `multipack launch` through mpiexec or srun: WORLD_SIZE is set by the first, the rank by the second.
    launchers = [launcher for launcher, stated in claims if "rank" in stated]
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else (launchers or ["none"])[0]
    return Ranks(number, size[1], first.get("local_rank", number), first.get("local_size", 0), launcher)


def rendezvous(environment: Mapping[str, str], ranks: Ranks) -> tuple[str, int]:
    """Address and port of the store that the processes of a run join through, the same for all of them.

    Taken from MASTER_ADDR and MASTER_PORT, which torchrun and `multipack launch` set. Processes started by srun alone
    use the first host of their step; processes started by mpiexec alone must be on one host.

    Raises:
        ValueError: the host of rank 0 is unknown.
    """
    address = environment.get("MASTER_ADDR", "")
    if not address:
        address = next(iter(expand_hostlist(environment.get("SLURM_STEP_NODELIST", ""))), "")
    if not address and ranks.local_size == ranks.size and "MASTER_PORT" not in environment:
        address = "127.0.0.1"
    if not address:
        raise ValueError(
            f"there are {ranks.size} processes, but MASTER_ADDR, the host of rank 0, is not set; start"
            f" them with `multipack launch -n {ranks.size} -- …`, or with torchrun"
        )
    port = _number(environment, "MASTER_PORT")
    return address, port[1] if port is not None else port_of(job_of(environment))


def print_error(error: BaseException, one_line: bool) -> None:
    """Print an error's message or traceback on standard error, with this process's rank unless it is 0.

    Text and newline are one write: ranks share standard error.
    """
    try:
        rank = find_ranks(os.environ).rank
    except ValueError:  # contradictory variables of launchers, which may be the error itself
        rank = 0
    if one_line:
        text = f"error: {untrusted.one_line(error) or type(error).__name__}"
    else:
        text = untrusted.printable("".join(traceback.format_exception(error)).rstrip())
    sys.stdout.flush()
    sys.stderr.write(f"[rank {rank}] {text}\n" if rank else f"{text}\n")
    sys.stderr.flush()


def mark_reported(error: BaseException) -> None:
    """Note that the other ranks know of an error, and that it was printed if it is an `Exception`."""
    error.reported_by_rank = True  # type: ignore[attr-defined]


def is_reported(error: BaseException) -> bool:
    """Whether `mark_reported` was called for an error."""
    return hasattr(error, "reported_by_rank")


def job_of(environment: Mapping[str, str]) -> str:
    """A name of the job that is the same in all its processes; empty without a scheduler."""
    job = next((environment[name] for name in JOB_VARIABLES if environment.get(name)), "")
    step = environment.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step else job


def port_of(job: str) -> int:
    """A port for a job, 16,384 … 32,767: below Linux's ephemeral ports, which begin at 32,768."""
    return 16_384 + zlib.crc32(job.encode()) % 16_384


def _claims(environment: Mapping[str, str]) -> list[Claim]:
    """The claims of the rows that apply to this process."""
    found: list[Claim] = []
    for row in LAUNCHERS[:1] if "TORCHELASTIC_RUN_ID" in environment else LAUNCHERS:
        if row.launcher == "srun" and not _is_step(environment):
            continue
        stated = {kind: _number(environment, getattr(row, kind)) for kind in Variables._fields[1:]}
        values = {kind: value for kind, value in stated.items() if value is not None}
        # Several rows have PMI_SIZE: it belongs to the row whose rank is set.
        if "rank" in values or (row is LAUNCHERS[0] and "size" in values):
            found.append((row.launcher, values))
    # srun may have started one helper of mpiexec per node, and the helpers these processes.
    sizes = {launcher: values["size"][1] for launcher, values in found if "size" in values}
    inner = [size for launcher, size in sizes.items() if launcher not in ("srun", LAUNCHERS[0].launcher)]
    one_a_node = re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if one_a_node and inner and inner[0] != sizes.get("srun"):
        found = [claim for claim in found if claim[0] != "srun"]
    return found


def _is_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several; a shell opened by srun is not a run."""
    if not (environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_STEP_ID")):
        return False
    size = _number(environment, "SLURM_STEP_NUM_TASKS SLURM_NTASKS")
    return size is not None and size[1] > 1


def _agreed(which: str, claims: list[Claim]) -> tuple[str, int] | None:
    """(variable, value) of the first row that has one; raises a ValueError if another row differs."""
    stated = [values[which] for _, values in claims if which in values]
    for other in stated[1:]:
        if other[1] != stated[0][1]:
            raise ValueError(
                f"{stated[0][0]}={stated[0][1]} and {other[0]}={other[1]} disagree about the"
                f" {'rank' if which == 'rank' else 'number of processes'}: unset those of other launchers,"
                " or start the processes with `multipack launch`"
            )
    return stated[0] if stated else None


def _number(environment: Mapping[str, str], names: str) -> tuple[str, int] | None:
    """(name, value) of the first variable that is set and not empty."""
    for name in names.split():
        text = environment.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdigit()):
                raise ValueError(f"{name}={text!r} is not a whole number")
            return name, int(text)
    return None


def expand_hostlist(expression: str) -> list[str]:
    """Return the names in a list in Slurm's form, in order and with repetitions; containers often lack `scontrol`.

    `node[001-003,007],gpu2` is node001, node002, node003, node007 and gpu2.

    Raises:
        ValueError: unmatched brackets, an invalid range, or more than 100,000 names in a range.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", expression):
        texts = enumerate(re.split(r"\[([\d,\s-]+)\]", part.strip()))
        pieces = [_range(text, expression) if index % 2 else [text] for index, text in texts]
        names += filter(None, map("".join, itertools.product(*pieces)))
    for name in names:
        if not re.fullmatch(r"[^\s,\[\]#=]+", name):
            raise ValueError(f"the host list {expression!r} contains {name!r}, which is not a host name")
    return names


def _range(text: str, expression: str) -> list[str]:
    """Numbers in one bracket, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < 100_000:
            raise ValueError(
                f"the host list {expression!r} contains [{text}]; expected ranges such as 001-003"
            )
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
