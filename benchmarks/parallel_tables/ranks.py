"""Processes joined by gloo, one thread each, that serve many measurements."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = ["numpy", "multipack.parallel.build", "multipack.models.decoder"]
TIMEOUT_SECONDS = 600.0


class Ranks:
    """Processes that run module-level functions as function(world, kept, …).

    `kept` is a dictionary that each process keeps from call to call. Unlike in a run, a single process has a process
    group too, so that strategies can be applied to it.
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
        """Call the function on all ranks, or on some while the others wait; returns their results by rank.

        Raises:
            RuntimeError: a rank failed; its traceback is the message.
        """
        ranks = only or range(self.size)
        for rank in ranks:
            self._connections[rank].send((function, arguments))
        found = []
        for rank in ranks:
            answer, error = None, f"not done after {TIMEOUT_SECONDS:g} s"
            if self._connections[rank].poll(TIMEOUT_SECONDS):
                answer, error = self._connections[rank].recv()
            if error:
                raise RuntimeError(f"{function.__name__}, rank {rank} of {self.size}: {error}")
            found.append(answer)
        return found

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if kind is None:
                connection.send(None)
            else:  # a rank failed, and others may wait for it
                process.kill()
        for process in self._processes:
            process.join(TIMEOUT_SECONDS)
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """One process: join the others, run functions until None arrives, leave past a barrier."""
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
    while (request := connection.recv()) is not None:
        function, arguments = request
        try:
            connection.send((function(world, kept, *arguments), ""))
        except Exception:
            connection.send((None, traceback.format_exc()))
    kept.clear()
    dist.barrier()  # without it gloo sometimes aborts
    dist.destroy_process_group()
