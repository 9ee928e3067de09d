"""The files of a run: its directory, its checkpoints, and its append-only log.

Resuming truncates the files of the log to the size and hash that the checkpoint stores. Bytes to be cut off are first
appended to files `….cut` beside them, so that no record is ever lost. history.jsonl, with the starts and ends of
processes, is never cut.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from multipack.atomic import read_file, write_atomically
from multipack.checksums import begins_with, checksum
from multipack.data.text.skipped import counted
from multipack.data.text.texts import CHAT_TEMPLATE
from multipack.data.views.corpus import Corpus
from multipack.parallel.state import State
from multipack.parallel.world import World
from multipack.planning.plan import Plan
from multipack.run import RunDirectory, check_regular, config_yaml
from multipack.training.checkpoint import LOG, Checkpoint, CheckpointWriter, damage, name_of, sweep
from multipack.training.run_config import Config

Mark = dict[str, Any]
"""{"bytes": size of a file when a checkpoint was written, "sha256": hash of these bytes}."""

NOTHING: Mark = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
"""The mark of an empty file, for a run that resumes without a checkpoint."""


class RunFiles:
    """Writes the files of a run; `source` holds the small files of the model that it starts with.

    Attributes:
        log: records and samples; on rank 0 only, after `open`.
    """

    def __init__(
        self,
        run: RunDirectory,
        world: World,
        config: Config,
        corpus: Corpus,
        chat_template: str,
        source: Mapping[str, str] = MappingProxyType({}),
        report: Callable[[str], None] = print,
    ) -> None:
        self.run, self._world, self._config, self._report = run, world, config, report
        self.log: RunLog | None = None
        # With this configuration the same run can be started again, in another directory.
        again = replace(config.train, resume="false")
        self._texts = {
            "config.yaml": config_yaml(replace(config, train=again, out="")),
            "tokenizer.json": corpus.tokenizer.to_json(),
            **source,
            **({CHAT_TEMPLATE: chat_template} if chat_template else {}),
        }
        documents = corpus.arriving or corpus.train
        hashes = {"documents": documents.fingerprint, "tokens": corpus.tokenizer.hash}
        if corpus.validation_files:  # others are determined by the training documents
            hashes["validation documents"] = corpus.validation.fingerprint
        self._origin: dict[str, Any] = {
            "corpus": hashes,
            "world_size": world.size,
            "threads": torch.get_num_threads(),
            "files": {},
        }
        train = config.train
        self._writer = CheckpointWriter(run, world, train.keep_checkpoints, train.checkpoint_async, report)

    def check_origin(self, progress: Mapping[str, Any]) -> list[str]:
        """Check that a checkpoint was written with the same documents and tokenizer.

        Returns:
            Notes for the header of the run.

        Raises:
            ValueError: documents or tokenizer differ, or a file of the run is missing or damaged.
        """
        self._origin["files"] = progress["files"]
        if problem := damage(self.run.path, progress["files"], checked=progress["files"]):
            raise ValueError(
                f"{self.run.path}: {problem}; restore it from a copy of the run, or start a new run with another out="
            )
        for what, digest in self._origin["corpus"].items():
            saved = str(progress["corpus"].get(what))
            if saved != digest:
                raise ValueError(
                    f"the run was trained with other {what} (hash {saved[:12]}, now {digest[:12]});"
                    " continue with the same ones, or start a new run with another out="
                )
        processes, threads = progress["world_size"], progress["threads"]
        if (processes, threads) == (self._origin["world_size"], self._origin["threads"]):
            return []
        return [
            f"the checkpoint was written by {counted(processes, 'processes')} with {counted(threads, 'threads')}:"
            " the same documents follow, but sums round differently"
        ]

    def open(self, files: Mapping[str, bytes], resumed: Checkpoint | None, best_step: int) -> None:
        """Create the run directory with `files`, or truncate its log to the checkpoint's; called on rank 0.

        Checkpoints keep the checksums of `files`; only a run without a checkpoint writes them.

        Raises:
            FileExistsError: a new run's directory is not empty.
            ValueError: another process writes to it, or the log does not begin with the checkpoint's log.
        """
        run, config, is_new = self.run, self._texts["config.yaml"], self._config.train.resume == "false"
        if is_new:
            run.create(config)
        self.log = RunLog(run)  # from here on no other process writes to the run
        if not is_new:
            cut = self.log.cut(resumed.progress["marks"] if resumed else None)
            write_atomically(run.config, config.encode())
            if cut and resumed is None:
                self._report(
                    f"note: there is no checkpoint, so the run begins again with step 1; {cut:,} records move to"
                    f" {run.metrics.name}.cut"
                )
        if problem := sweep(run):
            self._report(f"note: {problem}")
        if resumed is None:
            for name, content in files.items():
                write_atomically(run.path / name, content)
            self._origin["files"] = {name: checksum(run.path / name) for name in files}
            return
        run.point_to(resumed.path)
        best = run.checkpoints / name_of(best_step)
        if best.is_dir():
            run.point_to(best, run.best)
        elif best_step >= 0:  # `best` names a checkpoint after the resumed one
            run.best.unlink(missing_ok=True)

    def save(
        self, step: int, tensors: State, progress: Callable[[], dict[str, Any]], *, best: bool, last: bool
    ) -> None:
        """Write a checkpoint; collective. With `train.checkpoint_async` in the background, except the last one.

        `progress` returns the progress of the trainer as plain values; it is called on rank 0.

        Raises:
            ValueError: this checkpoint, or the previous one in the background, could not be written.
        """
        values = dict(self._origin)

        def add_progress() -> None:
            assert self.log is not None
            values.update(progress(), marks=self.log.marks())

        self._world.on_main(add_progress)
        self._writer.save(step, tensors, values, self._texts, best)
        if last:
            self._writer.wait()

    def close(self, failed: bool) -> str:
        """Wait for a checkpoint in the background and close the log.

        Returns:
            After a failure, when other ranks may be gone: why that checkpoint could not be written; otherwise empty.

        Raises:
            ValueError: on every rank, without a failure: that checkpoint could not be written.
        """
        try:
            if failed:
                return self._writer.finish_alone()
            self._writer.wait()
            return ""
        finally:
            if self.log is not None:
                self.log.close()


class RunLog:
    """The append-only files of a run, locked by the one process that writes them.

    Raises:
        ValueError: another process is writing them.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._paths = run, _paths(run)
        check_regular(*self._paths.values(), run.history)
        self._files = {name: path.open("ab", buffering=0) for name, path in self._paths.items()}
        try:
            fcntl.flock(self._files["metrics"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"another process is running {run.path}; wait for it, or choose another out="
            ) from None
        self._digests = {name: _digest(path) for name, path in self._paths.items()}

    def record(self, values: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl, in full precision."""
        self._write("metrics", json.dumps(dict(values)) + "\n")

    def documents(self, step: int, numbers: Sequence[int], index: int = 0, plan: Plan | None = None) -> None:
        """Append the numbers of a step's documents to documents.jsonl; with the first step of an epoch, its plan.

        `index` is the step's in its epoch, from 0; a stream has no plan.
        """
        line: dict[str, Any] = {"step": step, "epoch": plan.epoch if plan else 0, "index": index}
        if plan is not None and index == 0:
            lists = {name: getattr(plan, name).tolist() for name in ("carried_in", "carried", "dropped")}
            line["plan"] = {"documents": len(plan.lengths), "steps": plan.num_steps, **lists}
        self._write("documents", json.dumps({**line, "documents": list(numbers)}) + "\n")

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        """Append a start or an end of this process to history.jsonl, with the time in UTC."""
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        with self._run.history.open("ab") as file:
            file.write((json.dumps({"event": name, "time": stamp, **values}) + "\n").encode())

    def sample(self, step: int, text: str) -> None:
        """Append a generated text to samples.txt."""
        self._write("samples", f"=== step {step}\n{text}\n\n")

    def _write(self, name: str, text: str) -> None:
        content = text.encode()
        left = memoryview(content)
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[self._files[name].write(left) :]
        except OSError as error:
            raise OSError(
                f"{self._paths[name]} cannot be written: {error.strerror}; {self._run.advice()}"
            ) from error
        self._digests[name].update(content)

    def marks(self) -> dict[str, Mark]:
        """Flush the files to disk; returns the mark of each by name."""
        for name, file in self._files.items():
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._paths[name])) from error
        return {
            name: {"bytes": file.tell(), "sha256": self._digests[name].hexdigest()}
            for name, file in self._files.items()
        }

    def cut(self, marks: Mapping[str, Mark] | None) -> int:
        """Truncate the files to the marks of a checkpoint, None = to nothing; all are checked before one changes.

        Returns:
            Number of records that were cut off, and are in `metrics.jsonl.cut`.

        Raises:
            ValueError: a file does not begin with the content that the checkpoint recorded.
        """
        parts = divide_log(self._run, dict.fromkeys(self._files, NOTHING) if marks is None else marks)
        for name, file in self._files.items():
            kept, cut = parts[name]
            _keep(self._paths[name], cut)
            file.truncate(len(kept))
            file.seek(len(kept))
            self._digests[name] = hashlib.sha256(kept)
        return parts["metrics"][1].count(b"\n")

    def close(self) -> None:
        """Close the files and release the lock."""
        for file in self._files.values():
            file.close()


def _digest(path: Path) -> Any:
    """The SHA-256 object of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def _paths(run: RunDirectory) -> dict[str, Path]:
    return {name: getattr(run, name) for name in LOG}


def divide_log(run: RunDirectory, marks: Mapping[str, Mark]) -> dict[str, tuple[bytes, bytes]]:
    """The content of each file of a run's log, before and after the marks of a checkpoint.

    Raises:
        ValueError: a file does not begin with the content that the checkpoint recorded.
        OSError: a file is missing.
    """
    parts = {}
    for name, path in _paths(run).items():
        size = marks[name]["bytes"]
        if not begins_with(path, size, marks[name]["sha256"]):
            raise ValueError(
                f"{path} does not begin with what this checkpoint recorded: it was edited, or the run was resumed from"
                " an older checkpoint since. Resume another checkpoint, or a copy of the run"
            )
        content = read_file(path, sys.maxsize)
        parts[name] = content[:size], content[size:]
    return parts


def _keep(path: Path, cut: bytes) -> None:
    """Append the bytes that will be cut off the end of a file to the file `<name>.cut` beside it."""
    if not cut:
        return
    copy = path.with_name(f"{path.name}.cut")
    check_regular(copy)
    with copy.open("ab") as file:
        file.write(cut if cut.endswith(b"\n") else cut + b"\n")  # a killed writer leaves an incomplete line
        file.flush()
        os.fsync(file.fileno())
