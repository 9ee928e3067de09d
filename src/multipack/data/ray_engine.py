"""`prepare --engine ray`: the parts of a source as tasks of a Ray cluster (`pip install "multipack[ray]"`).

    part 0 ─▶ task ─▶ shard-0000-00000 shard-0000-00001 …
    part 1 ─▶ task ─▶ shard-0001-00000 …                       the last one to finish writes the header

Parts are contiguous ranges of files. All machines of the cluster must see the files and the store's folder under the
same paths. A task that dies is run again, and continues after the shards that are there.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from multipack.data.prepare import Job
from multipack.data.sources import open_source
from multipack.data.tokenizer import Tokenizer
from multipack.data.writer import finish_store, remove_store

PART_BYTES, MOST_PARTS = 256 << 20, 9999
"""Bytes of files of one part, about; they are more if there would be more parts than these."""


def run_parts(job: Job, path: Path, replace_store: bool) -> None:
    """Tokenize all parts of a source as tasks, and complete the store.

    Runs on the cluster to which this process is connected; or else on one that it can join (`RAY_ADDRESS`, or one that
    `ray start` began on this machine); or else on this machine.

    Args:
        job: source and tokenizer.
        path: folder of the store.
        replace_store: whether another token store there is replaced.

    Raises:
        ValueError: Ray is not installed; the source is malformed.
        ChildProcessError: a task was killed more often than Ray tries again.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f'--engine ray needs the package ray: pip install "multipack[ray]" ({error})'
        ) from error
    source = job.source
    parts = 1
    if source.unit == "bytes":
        parts = max(1, min(len(source.files), -(-source.total // PART_BYTES), MOST_PARTS))
    job = replace(job, parts=parts)
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        if replace_store and not (path / "recipe.json").exists():
            remove_store(path)
        tokenizer = (job.tokenizer.to_json(), job.tokenizer.name)
        about = ray.put((job.data, job.tokenizer_config, tokenizer, job.key, parts, os.getcwd(), str(path)))
        task = ray.remote(num_cpus=1, max_retries=3)(write_part)
        waiting, done = [task.remote(about, part, replace_store) for part in range(parts)], 0
        while waiting:
            finished, waiting = ray.wait(waiting)
            problems = [problem for problem in ray.get(finished) if problem]
            if problems:
                raise ValueError(problems[0])
            done += len(finished)
            job.progress(done, parts, "parts tokenized")
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ChildProcessError(
            f"a task of Ray was killed ({reason}); a machine may be out of memory: start again; finished shards remain"
        ) from error
    finally:
        if is_ours:
            ray.shutdown()
    if not finish_store(path, source.describe):
        raise ValueError(
            f"{path}: not all parts are there; every machine of the cluster must see this folder"
        )


def write_part(about: tuple[Any, ...], part: int, replace_store: bool) -> str:
    """A task: write one part of the store; returns what is wrong with the source, or nothing."""
    data, config, tokenizer, key, parts, folder, path = about
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
    try:
        os.chdir(folder)  # relative paths are those of the caller
        source = open_source(data, config)
        job = Job(data, config, Tokenizer(*tokenizer), source, parts, 0, _silent, _silent)
        if job.key != key:
            return f"{data.path}: this machine sees other files, or other times of change, than the caller"
        job.write_part(Path(path), part, replace_store and parts == 1)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _silent(*_: object) -> None:
    pass
