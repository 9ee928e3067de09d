"""torchrun with the exit code of the failed process, without its own report, and with a store that stays on its host.

    python -m multipack.launch.torchrun --rdzv-backend loopback --nproc-per-node 4 -m multipack train …

A multipack command that fails has already printed its error. torchrun would add forty lines and always exit with 1.
Only a process killed by a signal is reported here.

torchrun gives the other processes 30 seconds, both after a failure and after a signal that asks to stop: too long for
a process that hangs, and too short to save a large model.

For one host torchrun would keep its state as a pickle in a store that listens on every address without a password:
a process that reaches the port runs code here. `LoopbackRendezvous` keeps no pickle, and its store listens on
127.0.0.1 only.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main as torchrun

from multipack.parallel.stores import loopback_socket

FAILURE_SECONDS = 10.0
"""Time for processes to end after one of them has failed."""
STOP_SECONDS = 600.0
"""Time for processes to save and stop after a signal; a second signal kills them."""

HOST = "127.0.0.1"

_torch_close = PContext.close


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of the processes of this host alone: one store of bytes and JSON, which no other host reaches.

    Args:
        port: port of the store; 0 = a free one.
        run_id: prefix of the keys.

    Raises:
        SystemExit: the port is taken.
    """

    def __init__(self, port: int, run_id: str) -> None:
        try:
            listener = loopback_socket(HOST, port)
        except OSError as error:
            sys.stderr.write(f"error: --port {port}: {error.strerror}: give another, or leave it out\n")
            sys.exit(2)
        self._server = TCPStore(HOST, port, 1, True, multi_tenant=True, master_listen_fd=listener)
        super().__init__(HOST, self._server.port, rank=0, world_size=1, run_id=run_id, timeout=600)

    @classmethod
    def create(cls, parameters: rendezvous.RendezvousParameters) -> LoopbackRendezvous:
        """The rendezvous with the port of --rdzv-endpoint."""
        return cls(parse_rendezvous_endpoint(parameters.endpoint, 0)[1], parameters.run_id)

    def get_backend(self) -> str:
        """The word of --rdzv-backend."""
        return "loopback"

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """The store, which restarts keep, and its address for the processes."""
        address = rendezvous.RendezvousStoreInfo(HOST, self._server.port)
        return rendezvous.RendezvousInfo(PrefixStore(self.run_id, self._server), 0, 1, address)


def _close(processes: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
    """Replace `PContext.close`: ask processes to end, and kill the rest after a time.

    `death_sig` is the signal that torchrun received; None after a failure. torch's `timeout` is not used.
    """
    asked = death_sig or signal.SIGTERM
    handlers = [each for each in processes.subprocess_handlers.values() if each.proc.poll() is None]
    if handlers and isinstance(sys.exception(), SignalException):  # not after the failure of a process
        sys.stderr.write(f"{asked.name}: the run saves and stops after this step; a second signal kills it\n")
    ends = time.monotonic() + STOP_SECONDS
    try:
        for handler in handlers:
            handler.close(death_sig=asked)
        while time.monotonic() < ends and (codes := [each.proc.poll() for each in handlers]).count(None):
            if death_sig is None or set(codes) - {None, 0, -asked, 128 + asked}:
                ends = min(ends, time.monotonic() + FAILURE_SECONDS)
            time.sleep(0.05)
    finally:
        _torch_close(processes, signal.SIGKILL, round(FAILURE_SECONDS))


def main() -> int:
    """Run torchrun on this process's arguments; return the exit code."""
    PContext.close = _close  # type: ignore
    rendezvous.rendezvous_handler_registry.register("loopback", LoopbackRendezvous.create)
    restarts = [word for word in sys.argv if word.startswith(("--max-restarts", "--max_restarts"))]
    if not restarts:  # with restarts, torchrun reports the failures before the last
        logging.disable(logging.ERROR)
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        hint = " (the system sends it when memory runs out)" if name == "SIGKILL" else ""
        sys.stderr.write(f"error: rank {rank} was killed by {name}{hint}\n")
        return 128 - int(failure.exitcode)
    except SignalException as error:  # torchrun itself received a signal, and stopped its processes
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
