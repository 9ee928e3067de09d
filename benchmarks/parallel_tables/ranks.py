"""Processes joined by gloo, one thread each, that serve many measurements."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOADED = ["numpy", "multipack.parallel.build", "multipack.models.decoder"]
TIMEOUT_SECONDS = 600.0
_PLACE: dict[str, Any] = {}
"""The world of a process of `Ranks`."""


class Ranks:
    """Processes that run module-level functions as function(world, …).

    Unlike in a run, a single process has a process group too, so that strategies can be applied to it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            ProcessPoolExecutor(1, context, _join, (rank, size, store)) for rank in range(size)
        ]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call the function on all ranks; returns their results by rank."""
        calls = [process.submit(_call, function, arguments) for process in self._processes]
        return [call.result(TIMEOUT_SECONDS) for call in calls]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.run(_leave)
        for processes in self._processes:
            for process in processes._processes.values() if kind else ():
                process.kill()  # a rank failed, and others may wait for it
            processes.shutdown()
        self._folder.cleanup()


def _join(rank: int, size: int, store: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from multipack.parallel.world import World

    torch.set_num_threads(1)
    joined, timeout = dist.FileStore(store, size), timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=joined, rank=rank, world_size=size, timeout=timeout)
    _PLACE["world"] = World(rank, size, torch.device("cpu"), "gloo")


def _call(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    return function(_PLACE["world"], *arguments)


def _leave(world: Any) -> None:
    import torch.distributed as dist

    dist.barrier()  # without it gloo sometimes aborts
    dist.destroy_process_group()
