"""torchrun as it is, but for how it ends: with the exit code of the process that failed, and no report of its own.

    python -m multipack.launch.torchrun --nproc-per-node 4 -m multipack train …

A command of multipack that fails has said why, in one line or with a traceback. torchrun adds forty lines in which that
one is lost, and exits with 1 whatever happened. What nobody has said yet is said here: which rank was killed.
"""

from __future__ import annotations

import logging
import signal
import sys


def main() -> int:
    """Run torchrun on this process's arguments; what to exit with."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if "--max-restarts" not in sys.argv:  # whose failures, but for the last, only torchrun tells
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was ended by {name}{hint}", file=sys.stderr, flush=True)
        return 128 - int(failure.exitcode)
    except SignalException as error:  # this process was told to stop, and so were all others
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
