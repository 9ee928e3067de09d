"""`World`: the processes of a run as one of them sees them, their device, and how they talk to each other.

A `World` is a value that is passed around; nothing is kept at module level. In a run of one process no process group
exists (joining.py).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from multipack.parallel.collectives import broadcast_bytes, gather_bytes
from multipack.parallel.failures import Alone, NotConnected


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    Attributes:
        rank, size: rank of this process, and number of processes.
        device: device of this process.
        backend: backend of the process group: gloo, nccl, or none, as in a run of one process.
        launcher, command: launcher and command that started this process.
        timeout_seconds: how long a collective waits for a missing rank.
        groups: process groups made so far: see `subgroup`.
        watch: the place of this rank in the run, and the report of failed ranks.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    launcher: str = "none"
    command: str = ""
    timeout_seconds: float = 600.0
    groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = field(
        default_factory=dict, compare=False, repr=False
    )
    watch: Alone = field(default_factory=Alone, compare=False, repr=False)

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

    def cpu_group(self, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Make a gloo group, for threads that exchange data on the CPU during training.

        Args:
            ranks: members of the group; None = all ranks. Only they call this, because under nccl torch would involve
                other ranks in collectives.

        Raises:
            NotConnected: a ValueError; the ranks cannot connect.
        """
        timeout = timedelta(seconds=self.timeout_seconds)
        members = None if ranks is None else list(ranks)
        try:
            group: dist.ProcessGroup = dist.new_group(
                members, timeout=timeout, backend="gloo", use_local_synchronization=members is not None
            )
        except RuntimeError as error:
            raise NotConnected("gloo", self.timeout_seconds, error) from error
        return group

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.backend != "none":
            dist.barrier()

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        if self.backend == "none":
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, text: str, group: dist.ProcessGroup | None = None) -> list[str]:
        """Every rank's `text`, by rank; `group` is another group of all ranks."""
        if self.backend == "none":
            return [text]
        return [each.decode() for each in gather_bytes(text.encode(), group)]

    def from_main(self, text: str) -> str:
        """Rank 0's `text`, on every rank."""
        if self.backend == "none":
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


def hosts(world: World) -> list[str]:
    """The distinct host names of the world's processes, in rank order."""
    return list(dict.fromkeys(world.gather(socket.gethostname())))
