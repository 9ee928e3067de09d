"""Append-only files of a run. Resuming truncates them to the size and hash that the checkpoint stores."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multipack.run import RunDirectory

Mark = dict[str, Any]
"""{"bytes": size of a file at some time, "sha256": of these bytes}."""

NOTHING: Mark = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
"""The mark of an empty file: where a run without a checkpoint begins again."""


class AppendedFile:
    """A file that is only appended to, with the hash of its content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("ab")
        self._digest = hashlib.sha256(path.read_bytes())

    def write(self, text: str) -> None:
        """Append `text` and flush it, so that other processes see whole lines."""
        content = text.encode()
        self.file.write(content)
        self.file.flush()
        self._digest.update(content)

    def mark(self) -> Mark:
        """Size and hash of the content, which is on disk afterwards."""
        os.fsync(self.file.fileno())
        return {"bytes": self.file.tell(), "sha256": self._digest.hexdigest()}

    def check(self, mark: Mark) -> None:
        """Compare the beginning of the file with a mark.

        Raises:
            ValueError: the file has changed since, or belongs to another course of the run.
        """
        size, expected = mark["bytes"], mark["sha256"]
        if hashlib.sha256(self.path.read_bytes()[:size]).hexdigest() != expected:
            raise ValueError(
                f"{self.path} does not begin with what this checkpoint saw: it was edited, or the run was resumed"
                " from an older checkpoint since and took another course. Resume the latest one, or a copy of the run"
            )

    def cut(self, mark: Mark) -> None:
        """Truncate the file to a mark that was checked."""
        self.file.truncate(mark["bytes"])
        self.file.seek(mark["bytes"])
        self._digest = hashlib.sha256(self.path.read_bytes())


class RunLog:
    """metrics.jsonl and samples.txt of a run, locked by the one process that writes them.

    Raises:
        ValueError: another process is writing them.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.metrics, self.samples = AppendedFile(run.metrics), AppendedFile(run.samples)
        self._files = {"metrics": self.metrics, "samples": self.samples}
        try:
            fcntl.flock(self.metrics.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"another process is running {run.path}; wait for it, or choose another out="
            ) from None

    def record(self, values: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl, in full precision."""
        self.metrics.write(json.dumps(dict(values)) + "\n")

    def marks(self) -> dict[str, Mark]:
        """Marks of both files, for a checkpoint."""
        return {name: file.mark() for name, file in self._files.items()}

    def cut(self, marks: Mapping[str, Mark] | None) -> None:
        """Truncate both files to marks of a checkpoint, or to nothing; both are checked before either is changed."""
        marks = dict.fromkeys(self._files, NOTHING) if marks is None else marks
        for name, file in self._files.items():
            file.check(marks[name])
        for name, file in self._files.items():
            file.cut(marks[name])

    def close(self) -> None:
        """Close both files and release the lock."""
        for file in self._files.values():
            file.file.close()
