"""Pools of processes for distributed tests: started once a world size, they serve case after case.

A case is a module-level function `case(world, …)` of a test file. `Pool.run(case, …)` calls it on every rank and gives
back what the ranks returned; a rank's error becomes the test's, with that rank's traceback. Arguments and results are
plain data or numpy arrays.

Processes are forked by a server that has imported torch once (preloaded.py), so that a pool of 8 starts as quickly as
one process. The process group's timeout is seconds: a collective that lacks a rank fails instead of hanging, and `run`
has a deadline besides, after which the processes are killed. After a failure, whose collectives may be half done, the
pool starts anew.

torch's meshes of the same sizes and names are one mesh for all cases of a pool: each has groups, and every group has
threads and sockets that live as long as torch remembers it (its caches of sharded operations do, to the end). Each such
thread wakes a hundred times a second, so that a pool whose processes have `MOST_THREADS` is replaced.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOADED = ["pytest", "preloaded"]
MOST_THREADS = 40
"""A world of one mesh has about 12; 140 after all cases of some files, where half of two cores went into wake-ups."""


@dataclass(frozen=True)
class Outcome:
    """What one rank returned, or how it failed (a traceback, its exit code, or that it did not end)."""

    value: Any = None
    error: str = ""


class CaseFailed(AssertionError):
    """Ranks failed; the message has their tracebacks."""


class Pool:
    """Processes joined by gloo, waiting for cases.

    Args:
        size: how many processes.
        timeout_seconds: how long a collective waits for a missing rank.
    """

    def __init__(self, size: int, timeout_seconds: float = 20.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def run(self, case, *arguments, seconds: float = 120.0) -> list[Any]:
        """Call `case(world, *arguments)` on every rank; what they returned, by rank.

        Raises:
            CaseFailed: a rank raised, died, or did not end in so many seconds.
        """
        outcomes = self.outcomes(case, *arguments, seconds=seconds)
        failed = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
        if failed:
            told = "\n".join(f"rank {rank} of {self.size}: {error}" for rank, error in failed.items())
            raise CaseFailed(f"{case.__qualname__}\n{told}")
        return [outcome.value for outcome in outcomes]

    def outcomes(self, case, *arguments, seconds: float = 120.0) -> list[Outcome]:
        """The same without raising: each rank's outcome."""
        if (
            self._processes
            and self._processes[0].is_alive()
            and _threads(self._processes[0].pid) > MOST_THREADS
        ):
            self.close()
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((case.__code__.co_filename, case.__qualname__, arguments))
        found: list[Outcome] = [Outcome(error=f"not done after {seconds:g} s")] * self.size
        pending = dict(zip(self._connections, range(self.size), strict=True))
        deadline = time.monotonic() + seconds
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                rank = pending.pop(connection)
                try:
                    found[rank] = Outcome(*connection.recv())
                except (EOFError, ConnectionError):
                    self._processes[rank].join(5)
                    found[rank] = Outcome(error=f"ended with exit code {self._processes[rank].exitcode}")
        if any(outcome.error for outcome in found):
            self.kill()
        return found

    def close(self) -> None:
        """Let the processes leave in order: past a last barrier, without which gloo aborts now and then."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(self.timeout_seconds + 5)
        codes = [process.exitcode for process in self._processes]
        self.kill()
        assert not any(codes), f"processes of a pool of {self.size} ended with exit codes {codes}"

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            place = (rank, self.size, port, self.timeout_seconds, theirs)
            process = context.Process(target=_serve, args=place, daemon=True)
            with _importable(Path(__file__).parent):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def kill(self) -> None:
        """End the processes at once; the next case starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _threads(process: int) -> int:
    """Number of threads of a process; 0 where there is no /proc."""
    tasks = Path(f"/proc/{process}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Context in which processes that start can import the modules of a folder.

    The server of pools does not get sys.path (CPython 3.11), and skips modules that it cannot import in silence.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _serve(rank: int, size: int, port: int, timeout_seconds: float, connection: Any) -> None:
    """One process: join the others, run cases until there are no more, leave past a barrier.

    Each case finds the environment of the first: Lightning, for one, deletes WORLD_SIZE at its end.
    """
    import torch
    from torch.distributed import device_mesh, distributed_c10d

    from multipack.parallel.joining import connected

    device_mesh.init_device_mesh = functools.cache(device_mesh.init_device_mesh)
    distributed_c10d._tensor_to_object = _refuse_to_unpickle
    torch.set_num_threads(1)  # processes share the cores: more threads would wait for each other, spinning
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    environment = dict(os.environ)
    with connected("cpu", timeout_seconds) as world:
        while (message := connection.recv()) is not None:
            path, name, arguments = message
            os.environ.clear()
            os.environ.update(environment)
            try:
                answer = (getattr(_module(path), name)(world, *arguments), "")
            except BaseException:
                answer = (None, traceback.format_exc())
            connection.send(answer)


def _refuse_to_unpickle(*_: Any) -> None:
    raise AssertionError("what ranks send each other is bytes, and nothing of it is unpickled")


def _module(path: str) -> Any:
    """A test file as a module, loaded once a process; nothing else imports it by this name."""
    name = f"case_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
