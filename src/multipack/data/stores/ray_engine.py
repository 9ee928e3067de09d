"""`prepare --engine ray`: the parts of a source as tasks of a Ray cluster (`pip install "multipack[ray]"`).

    part 0 ─▶ task ─▶ shard-0000-00000 shard-0000-00001 …
    part 1 ─▶ task ─▶ shard-0001-00000 …                       the last one to finish completes the store

Parts are contiguous ranges of files. All machines of the cluster must see the files and the store's folder under the
same paths. A task that dies is run again, and continues after the shards that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multipack.data.text.tokenizer import Progress
from multipack.machine import import_extra

PART_BYTES, MOST_PARTS = 256 << 20, 9999
"""Bytes of files of one part, about, and the maximum number of parts; with more files, parts are larger."""


def count_parts(size: int, files: int) -> int:
    """Number of parts of a source of `size` bytes; independent of the cluster, so that any cluster can continue."""
    return max(1, min(files, -(-size // PART_BYTES), MOST_PARTS))


def run_parts(write: Callable[[int], str], parts: int, progress: Progress) -> None:
    """Run `write(part)` for each part as a task.

    Runs on the cluster to which this process is connected; or else on one that it can join (`RAY_ADDRESS`, or one that
    `ray start` began on this machine); or else on this machine. `write` returns the error of its source; empty = none.
    `progress` is called with (parts done, parts, unit).

    Raises:
        ImportError: Ray is not installed.
        ValueError: the error of a part.
        ChildProcessError: a task was killed more often than Ray tries again.
    """
    ray = import_extra("ray", "--engine ray", "ray")
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    waiting, done = list[Any](), 0
    try:
        task, shared = ray.remote(num_cpus=1, max_retries=3)(lambda write, part: write(part)), ray.put(write)
        waiting = [task.remote(shared, part) for part in range(parts)]
        while waiting:
            finished, waiting = ray.wait(waiting)
            for problem in ray.get(finished):
                if problem:
                    raise ValueError(problem)
            done += len(finished)
            progress(done, parts, "parts tokenized")
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ChildProcessError(
            f"a task of Ray was killed ({reason}); a machine may be out of memory: start again; finished shards remain"
        ) from error
    finally:
        for unfinished in waiting:  # after an error; their shards remain
            ray.cancel(unfinished, force=True)
        if is_ours:
            ray.shutdown()
