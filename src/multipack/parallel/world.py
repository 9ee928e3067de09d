"""`World`: the processes of a run, their device, backend and launcher, and how they join and leave.

A `World` is a value that is passed around; nothing is kept at module level. This process's rank comes from the
launcher's variables (ranks.py). Without a launcher the world is a single process and no process group exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from multipack.parallel.collectives import broadcast_bytes, gather_bytes
from multipack.parallel.parallel_config import Device
from multipack.parallel.ranks import Ranks, find_ranks, rendezvous


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    Attributes:
        rank, size: of this process, and the number of processes.
        local_rank: rank of this process among those of its host.
        device: where this process computes.
        backend: of the process group: gloo, nccl, or none.
        launcher, command: what started this process.
        timeout_seconds: how long a collective waits for a missing rank.
        groups: process groups made so far: see `subgroup`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    launcher: str = "none"
    command: str = ""
    timeout_seconds: float = 600.0
    groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def synchronize(self) -> None:
        """Wait until the device has finished its work, before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def subgroup(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The process group of this rank's part of the ranks; collective at the first call with these parts.

        Groups are kept and reused, because each has threads and connections of its own. They have the world's timeout.

        Args:
            parts: ranks of each part; every rank is in exactly one. The same on all ranks.
        """
        key = tuple(tuple(part) for part in parts)
        world = dist.group.WORLD
        assert world is not None, "a run of one process has no groups"
        if len(key) == 1:
            return world
        if key not in self.groups:
            timeout = timedelta(seconds=self.timeout_seconds)
            if self.backend == "nccl":  # splits its communicator in one call
                own = dist.split_group(split_ranks=[list(part) for part in key], timeout=timeout)
            else:
                made = [dist.new_group(list(part), timeout=timeout) for part in key]
                own = made[next(number for number, part in enumerate(key) if self.rank in part)]
            assert own is not None, "this rank is in one of the parts"
            self.groups[key] = own
        return self.groups[key]

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

    def gather(self, text: str, group: dist.ProcessGroup | None = None) -> list[str]:
        """Every rank's `text`, by rank; `group` is another group of all ranks."""
        if self.size == 1:
            return [text]
        return [each.decode() for each in gather_bytes(text.encode(), group)]

    def from_main(self, text: str) -> str:
        """Rank 0's `text`, on every rank."""
        if self.size == 1:
            return text
        return broadcast_bytes(text.encode()).decode()

    def on_main(self, function: Callable[[], str | None]) -> str:
        """Run `function` on rank 0 alone; every rank returns its result or raises its error.

        Raises:
            ValueError: rank 0 failed (rank 0 itself raises the original error).
        """
        failure: Exception | None = None
        value = problem = ""
        if self.is_main:
            try:
                value = function() or ""
            except (ValueError, OSError) as error:
                problem, failure = str(error), error
        value, problem = map(str, json.loads(self.from_main(json.dumps([value, problem]))))
        if failure is not None:
            raise failure
        if problem:
            raise ValueError(f"rank 0: {problem}")
        return value


def choose_device(requested: Device, local_rank: int) -> torch.device:
    """The device of this process; raises a ValueError if it has none of the requested kind."""
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device=cuda, but torch sees no GPU here; use train.device=cpu")
    count = torch.cuda.device_count()
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0:
        local_rank = 0  # schedulers and wrapper scripts may show each process its own GPU only
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: there are {count};"
            " start fewer processes or use train.device=cpu"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def connected(device: Device = "auto", timeout_seconds: float = 600.0) -> Iterator[World]:
    """Join the processes that a launcher started; leave them on exit.

    A clean exit ends with a barrier: without it gloo sometimes aborts, because a rank that leaves early closes
    connections that others still use. After an error there is no barrier, because the others may be in another
    collective; the launcher ends them.

    Args:
        device: `auto` uses a GPU if there is one.
        timeout_seconds: how long a collective waits for a missing rank before it raises.

    Yields:
        The world, with its process group initialized if there is more than one process.

    Raises:
        ValueError: the launcher's variables are incomplete or contradictory, or the device is not available.
    """
    ranks = find_ranks(os.environ)
    program = Path(sys.argv[0]).name
    command = " ".join(["python -m multipack" if program == "__main__.py" else program, *sys.argv[1:]])
    if ranks.size == 1:
        yield World(device=choose_device(device, 0), launcher=ranks.launcher, command=command)
        return
    address = rendezvous(os.environ, ranks)
    target = choose_device(device, ranks.local_rank)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    backend = "nccl" if target.type == "cuda" else "gloo"
    _join(os.environ, backend, ranks, address, timedelta(seconds=timeout_seconds), target)
    try:
        yield World(
            ranks.rank,
            ranks.size,
            ranks.local_rank,
            target,
            backend,
            ranks.launcher,
            command,
            timeout_seconds,
        )
        dist.barrier()
    except BaseException:
        # nccl would wait here for ranks that are in a collective, and the error would not be printed.
        if backend != "nccl":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _join(
    environment: Mapping[str, str],
    backend: str,
    ranks: Ranks,
    address: tuple[str, int],
    timeout: timedelta,
    device: torch.device,
) -> None:
    """Initialize the process group; under torchrun each restart has its own prefix of store keys.

    A restarted worker would otherwise read the addresses that its predecessor left in the store, which torchrun's agent
    keeps. Without such an agent rank 0 opens the store.
    """
    restart = environment.get("TORCHELASTIC_RESTART_COUNT")
    kept = restart is not None and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(*address, ranks.size, is_master=not kept and ranks.rank == 0, timeout=timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"attempt-{restart}" if kept else "run", store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def hosts(world: World) -> list[str]:
    """The distinct host names of the world's processes, in rank order."""
    return list(dict.fromkeys(world.gather(socket.gethostname())))
