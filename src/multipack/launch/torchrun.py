"""torchrun with the exit code of the failed process and without its own report.

    python -m multipack.launch.torchrun --nproc-per-node 4 -m multipack train …

A multipack command that fails has already printed its error. torchrun would add forty lines and always exit with 1.
Only a process killed by a signal is reported here.

torchrun gives the other processes 30 seconds, both after a failure and after a signal that asks to stop: too long for
a process that hangs, and too short to save a large model.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from typing import Any

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

FAILURE_SECONDS = 10.0
"""How long processes may take to end after one of them has failed."""
STOP_SECONDS = 600.0
"""How long processes may take to save and stop after a signal; a second signal kills them."""

_torch_close = PContext.close


def _close(processes: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
    """Replace `PContext.close`: ask processes to end, and kill those that are left after a time.

    Args:
        processes: torch's `SubprocessContext`.
        death_sig: the signal that torchrun received; None after a failure.
        timeout: not used.
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
