"""Processes joined by gloo, one thread each, that stay for many measurements."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = ["numpy", "multipack.parallel.build", "multipack.models.decoder"]
TIMEOUT_SECONDS = 600.0


class Ranks:
    """So many processes, each of which runs the functions that it is told to.

    A function is a module's own, and is called as function(world, kept, …): `kept` is a dictionary that its process
    keeps from call to call. Unlike in a run, a single process has a process group too, so that strategies have ranks
    to be applied to.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = (rank, size, str(Path(self._folder.name) / "store"), theirs)
            process = context.Process(target=_serve, args=place, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, function: Callable[..., Any], *arguments: Any, only: Sequence[int] = ()) -> list[Any]:
        """Call the function on all ranks, or on some alone while the others wait; what they returned, by rank.

        Raises:
            RuntimeError: a rank failed; its traceback is the message.
        """
        chosen = [self._connections[rank] for rank in only or range(self.size)]
        for connection in chosen:
            connection.send((function, arguments))
        found: dict[Connection, Any] = {}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(found) < len(chosen):
            ready = wait([each for each in chosen if each not in found], deadline - time.monotonic())
            if not ready:
                raise RuntimeError(f"{function.__name__}: not done after {TIMEOUT_SECONDS:g} s")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    found[connection], error = connection.recv()
                except EOFError:
                    error = "the process ended"
                if error:
                    raise RuntimeError(f"{function.__name__}, rank {rank} of {self.size}: {error}")
        return [found[each] for each in chosen]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if kind is None:
                connection.send(None)
            else:  # a rank failed, and others may wait for it
                process.kill()
        for connection, process in zip(self._connections, self._processes, strict=True):
            process.join(TIMEOUT_SECONDS)
            connection.close()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """One process: join the others, do what it is told until there is no more, leave past a barrier."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from multipack.parallel.world import World

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout
    )
    world, kept = World(rank, size, rank, torch.device("cpu"), "gloo"), {}
    while (told := connection.recv()) is not None:
        function, arguments = told
        try:
            answer = (function(world, kept, *arguments), "")
        except Exception:
            answer = (None, traceback.format_exc())
        connection.send(answer)
    kept.clear()
    dist.barrier()  # without it gloo aborts now and then
    dist.destroy_process_group()
