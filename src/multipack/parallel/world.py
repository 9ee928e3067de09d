"""Who takes part in a run: ranks, device, backend, and how the processes were launched.

`World` is a value that is asked for and handed around; nothing here is kept at module level. Processes are
expected from a launcher that sets RANK, WORLD_SIZE and LOCAL_RANK (torchrun does); without one the world is a
single process and no process group exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    launcher: str = "none"
    command: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that a clock read now is honest."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, text: str) -> list[str]:
        """Every rank's `text`, by rank."""
        if self.size == 1:
            return [text]
        gathered: list[str] = [""] * self.size
        dist.all_gather_object(gathered, text)
        return gathered

    def from_main(self, text: str) -> str:
        """Rank 0's `text`, on every rank."""
        if self.size == 1:
            return text
        box = [text]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def on_main(self, function: Callable[[], str | None]) -> str:
        """Run `function` on rank 0 alone; every rank gets its result or fails with its error.

        Raises:
            ValueError: what rank 0 could not do (rank 0 itself raises the original error).
        """
        if self.size == 1:
            return function() or ""
        failure: Exception | None = None
        outcome = {"value": "", "error": ""}
        if self.is_main:
            try:
                outcome["value"] = function() or ""
            except (ValueError, OSError) as error:
                outcome["error"], failure = str(error), error
        outcome = json.loads(self.from_main(json.dumps(outcome)))
        if failure is not None:
            raise failure
        if outcome["error"]:
            raise ValueError(f"rank 0: {outcome['error']}")
        return str(outcome["value"])


def choose_device(asked: Device, local_rank: int) -> torch.device:
    """The device of this process.

    Raises:
        ValueError: CUDA was asked for where there is none, or there are fewer GPUs than local ranks.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device=cuda, but torch sees no GPU here; use train.device=cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: there are {torch.cuda.device_count()};"
            " start fewer processes or use train.device=cpu"
        )
    return torch.device("cuda", local_rank)


def launched_by(environment: Mapping[str, str]) -> tuple[str, str]:
    """The launcher's name and command line, as far as they can be told.

    Args:
        environment: variables of this process.

    Returns:
        (name, command): `("none", …)` for a process started by hand; the command is this process's own then.
    """
    program = Path(sys.argv[0]).name
    own = " ".join(["python -m multipack" if program == "__main__.py" else program, *sys.argv[1:]])
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun", _parent_command() or own
    if "RANK" in environment:
        return "environment (RANK is set)", own
    return "none", own


def _parent_command() -> str:
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return ""
    words = [word for word in raw.decode(errors="replace").split("\0") if word]
    return " ".join([Path(word).name if i < 2 else word for i, word in enumerate(words)])


@contextmanager
def connected(device: Device = "auto", timeout_seconds: float = 600.0) -> Iterator[World]:
    """Join the processes that a launcher started and leave them in order.

    A clean exit ends with a barrier: without it gloo aborts now and then, because a rank that leaves early
    closes connections that others still use. After an error there is no barrier (the others may wait in
    another collective); the launcher ends them.

    Args:
        device: `auto` takes a GPU where there is one.
        timeout_seconds: how long a collective may wait for a missing rank before it raises.

    Yields:
        The world, with its process group initialized if there is more than one process.

    Raises:
        ValueError: the launcher's variables are incomplete, or the device is not there.
    """
    environment = os.environ
    size = int(environment.get("WORLD_SIZE", "1"))
    _refuse_unknown_launchers(environment)
    launcher, command = launched_by(environment)
    if size == 1:
        yield World(device=choose_device(device, 0), launcher=launcher, command=command)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={size} is set, but {', '.join(missing)} is not; start the processes with a launcher:"
            f" torchrun --nproc-per-node {size} -m multipack …"
        )
    rank, local_rank = int(environment["RANK"]), int(environment.get("LOCAL_RANK", environment["RANK"]))
    target = choose_device(device, local_rank)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    backend = "nccl" if target.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    _join(environment, backend, rank, size, timeout, target if target.type == "cuda" else None)
    try:
        yield World(rank, size, local_rank, target, backend, launcher, command)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _refuse_unknown_launchers(environment: Mapping[str, str]) -> None:
    """N independent copies of a run are never what `srun -n N` or `mpiexec -n N` meant."""
    if "WORLD_SIZE" in environment:
        return
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(name, "1") not in ("", "1"):
            raise ValueError(
                f"{name}={environment[name]}, but RANK and WORLD_SIZE are not set: start one torchrun per node instead"
                " (torchrun --nproc-per-node …), or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )


def _join(
    environment: Mapping[str, str],
    backend: str,
    rank: int,
    size: int,
    timeout: timedelta,
    device_id: torch.device | None,
) -> None:
    """Initialize the process group; under torchrun in a key space of its own for each restart.

    A restarted worker would otherwise read the addresses that its predecessor left in the store.
    """
    restart = environment.get("TORCHELASTIC_RESTART_COUNT")
    if restart is None or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
        return
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(address, port, size, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"attempt-{restart}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device_id,
    )


def hosts(world: World) -> list[str]:
    """The distinct host names of the world's processes, in rank order."""
    return list(dict.fromkeys(world.gather(socket.gethostname())))
