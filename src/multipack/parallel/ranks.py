"""The rank of this process, read from its launcher's environment variables. Imports no torch.

Launchers use different names for the same numbers (`TABLE`):

    launcher                      rank                   world size              rank on this host
    torchrun, or exported         RANK                   WORLD_SIZE              LOCAL_RANK
    mpirun of Open MPI            OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK
    mpiexec of PALS               PALS_RANKID            PMI_SIZE                PALS_LOCAL_RANKID
    mpiexec of MPICH, Intel MPI   PMI_RANK               PMI_SIZE                MPI_LOCALRANKID, PMI_LOCAL_RANK
    srun                          SLURM_PROCID           SLURM_STEP_NUM_TASKS    SLURM_LOCALID

Processes inherit variables: a batch script passes its own on to everything that it starts. Rows that apply must
therefore agree; otherwise an error names them. Some rows do not apply: inside torchrun all but its own (srun or mpiexec
may have started one torchrun per node), and srun's if it started one helper of an MPI launcher per node, a shell, or
nothing at all (a batch script has SLURM_PROCID, but no step).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from multipack.parallel.hostnames import expand_hostlist


class Variables(NamedTuple):
    """The variables of one launcher; of several names, the first that is set counts."""

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


TABLE = (
    Variables("RANK and WORLD_SIZE", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    Variables(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Variables("PALS", ("PALS_RANKID",), ("PMI_SIZE",), ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",)),
    Variables(
        "MPICH",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    Variables("srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ()),
)
"""Launchers, innermost first."""

JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "PALS_APID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables that distinguish runs on one host."""


@dataclass(frozen=True)
class Ranks:
    """One process of a run.

    Attributes:
        rank: of this process, 0 … size − 1.
        size: number of processes of the run.
        local_rank: rank of this process among those of its host.
        local_size: number of processes on this host; 0 = unknown.
        launcher: of `TABLE`, `"torchrun"`, or `"none"`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 0
    launcher: str = "none"


class _Claim(NamedTuple):
    """Values of one launcher's variables as (variable, value); None if not set."""

    row: Variables
    rank: tuple[str, int] | None
    size: tuple[str, int] | None
    local_rank: tuple[str, int] | None
    local_size: tuple[str, int] | None


def find_ranks(environment: Mapping[str, str]) -> Ranks:
    """The rank of this process; without a launcher's variables it is the only one.

    Args:
        environment: variables of this process.

    Raises:
        ValueError: two launchers disagree, a value is missing or not a number, or a rank is not below the size.
    """
    claims = _claims(environment)
    rank, size = _agreed("rank", claims), _agreed("size", claims)
    local_rank, local_size = _first("local_rank", claims), _first("local_size", claims)
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
    number = rank[1] if rank is not None else 0
    if not 0 <= number < size[1]:
        named = rank[0] if rank is not None else "RANK"
        raise ValueError(
            f"{named}={number} is no rank of {size[0]}={size[1]} processes: ranks are 0 … {size[1] - 1}"
        )
    return Ranks(
        number,
        size[1],
        local_rank[1] if local_rank is not None else number,
        local_size[1] if local_size is not None else 0,
        _launcher(environment, claims),
    )


def rendezvous(environment: Mapping[str, str], ranks: Ranks) -> tuple[str, int]:
    """Address and port of the store that the processes of a run join through, the same for all of them.

    Taken from MASTER_ADDR and MASTER_PORT, which torchrun and `multipack launch` set. Processes started by srun alone
    use the first host of their step; those started by mpiexec alone must be on one host.

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
            f"there are {ranks.size} processes, but MASTER_ADDR and MASTER_PORT do not say where they meet; start"
            f" them with `multipack launch -n {ranks.size} -- …`, or with torchrun"
        )
    port = _number(environment, ("MASTER_PORT",))
    return address, port[1] if port is not None else port_of(job_of(environment))


def job_of(environment: Mapping[str, str]) -> str:
    """A name of the job that is the same in all its processes; empty without a scheduler."""
    job = next((environment[name] for name in JOBS if environment.get(name)), "")
    step = environment.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step else job


def port_of(job: str) -> int:
    """A port for a job, 16,384 … 32,767: below Linux's ephemeral ports, which begin at 32,768."""
    return 16_384 + zlib.crc32(job.encode()) % 16_384


def _claims(environment: Mapping[str, str]) -> list[_Claim]:
    """Rows that apply to this process."""
    found = []
    for row in TABLE[:1] if "TORCHELASTIC_RUN_ID" in environment else TABLE:
        if row.launcher == "srun" and not _is_step(environment):
            continue
        rank = _number(environment, row.rank)
        size = _number(environment, row.size)
        if rank is None and row is not TABLE[0]:
            continue  # PMI_SIZE is shared by rows: it belongs to the one with a rank
        if rank is not None or size is not None:
            local = _number(environment, row.local_rank), _number(environment, row.local_size)
            found.append(_Claim(row, rank, size, *local))
    if _started_helpers(environment, found):
        found = [claim for claim in found if claim.row.launcher != "srun"]
    return found


def _started_helpers(environment: Mapping[str, str], claims: list[_Claim]) -> bool:
    """Whether srun started one helper of mpiexec per node, and the helpers started these processes."""
    sizes = {claim.row.launcher: claim.size[1] for claim in claims if claim.size is not None}
    inner = [size for launcher, size in sizes.items() if launcher not in ("srun", TABLE[0].launcher)]
    one_a_node = re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return one_a_node is not None and bool(inner) and inner[0] != sizes.get("srun")


def _is_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several; a shell opened by srun is not a run."""
    if not (environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_STEP_ID")):
        return False
    size = _number(environment, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    return size is not None and size[1] > 1


def _agreed(which: str, claims: list[_Claim]) -> tuple[str, int] | None:
    """The first row's value, which all others must equal."""
    stated = [getattr(claim, which) for claim in claims if getattr(claim, which) is not None]
    for other in stated[1:]:
        if other[1] != stated[0][1]:
            raise ValueError(
                f"{stated[0][0]}={stated[0][1]} and {other[0]}={other[1]} disagree about the"
                f" {'rank' if which == 'rank' else 'number of processes'}: unset those that are left from elsewhere,"
                " or start the processes with `multipack launch`"
            )
    return stated[0] if stated else None


def _first(which: str, claims: list[_Claim]) -> tuple[str, int] | None:
    """The first row's value; local ranks may differ if each process sees one GPU only."""
    return next((getattr(claim, which) for claim in claims if getattr(claim, which) is not None), None)


def _launcher(environment: Mapping[str, str], claims: list[_Claim]) -> str:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    named = [claim.row.launcher for claim in claims if claim.rank is not None]
    # `multipack launch` exports WORLD_SIZE, and mpiexec or srun the rank: that one is the launcher.
    return named[0] if named else "none"


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int] | None:
    """(name, value) of the first variable that is set and not empty."""
    for name in names:
        text = environment.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdigit()):
                raise ValueError(f"{name}={text!r} is not a whole number")
            return name, int(text)
    return None
