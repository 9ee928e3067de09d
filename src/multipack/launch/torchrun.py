"""torchrun with the exit code of the failed process and without its own report.

    python -m multipack.launch.torchrun --nproc-per-node 4 -m multipack train …

A multipack command that fails has already printed its error. torchrun would add forty lines and always exit with 1.
Only a process killed by a signal is reported here.
"""

from __future__ import annotations

import logging
import signal
import sys


def main() -> int:
    """Run torchrun on this process's arguments; return the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if "--max-restarts" not in sys.argv:  # with restarts, torchrun reports the failures before the last
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        hint = " (the system sends it when memory runs out)" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was killed by {name}{hint}", file=sys.stderr, flush=True)
        return 128 - int(failure.exitcode)
    except SignalException as error:  # torchrun itself received a signal, and stopped its processes
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
