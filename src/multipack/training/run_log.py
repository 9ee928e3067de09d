"""Append-only files of a run. Resuming truncates them to the size and hash that the checkpoint stores.

Bytes to be cut off are first appended to files `….cut` beside them, so that no record is ever lost. history.jsonl, with
the starts and ends of processes, is never cut.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from multipack.atomic import read_file
from multipack.checksums import begins_with
from multipack.planning.plan import Plan
from multipack.run import RunDirectory, check_regular

Mark = dict[str, Any]
"""{"bytes": size of a file when a checkpoint was written, "sha256": hash of these bytes}."""

NOTHING: Mark = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
"""The mark of an empty file, for a run that resumes without a checkpoint."""


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

        Args:
            step: global step, from 1.
            numbers: document numbers of all ranks.
            index: index of the step in its epoch, from 0.
            plan: plan of the epoch; None for a stream.
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
    return {"metrics": run.metrics, "samples": run.samples, "documents": run.documents}


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
