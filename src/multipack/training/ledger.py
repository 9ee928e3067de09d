"""The files of a run that only grow, and that a resumed run cuts back to what its checkpoint saw."""

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
"""{"bytes": how long a file was, "sha256": of those bytes}."""


class AppendedFile:
    """A file that is written at its end, and knows the hash of what it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab")
        self._digest = hashlib.sha256(path.read_bytes())

    def write(self, text: str) -> None:
        """Append `text` and hand it to the operating system, so that a reader sees whole lines."""
        content = text.encode()
        self._file.write(content)
        self._file.flush()
        self._digest.update(content)

    def mark(self) -> Mark:
        """What the file holds now, safe on disk."""
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell(), "sha256": self._digest.hexdigest()}

    def check(self, mark: Mark) -> None:
        """Refuse a mark that another file, or another course of the run, was at.

        Raises:
            ValueError: the file does not begin with what the mark saw.
        """
        beginning = self.path.read_bytes()[: mark["bytes"]]
        if hashlib.sha256(beginning).hexdigest() != mark["sha256"]:
            raise ValueError(
                f"{self.path} does not begin with what this checkpoint saw: it was edited, or the run was resumed"
                " from an older checkpoint since and took another course. Resume the latest one, or a copy of the run"
            )

    def cut(self, mark: Mark) -> None:
        """Forget everything after the mark, which must have been checked."""
        self._file.truncate(mark["bytes"])
        self._file.seek(mark["bytes"])
        self._digest = hashlib.sha256(self.path.read_bytes())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Ledger:
    """metrics.jsonl and samples.txt of a run, held by the one process that writes them.

    Raises:
        ValueError: another process is writing them.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.metrics = AppendedFile(run.metrics)
        self.samples = AppendedFile(run.samples)
        try:
            fcntl.flock(self.metrics._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        return {"metrics": self.metrics.mark(), "samples": self.samples.mark()}

    def check(self, marks: Mapping[str, Mark]) -> None:
        """Check the marks of both files before anything is changed."""
        self.metrics.check(marks["metrics"])
        self.samples.check(marks["samples"])

    def cut(self, marks: Mapping[str, Mark]) -> None:
        """Go back to the marks."""
        self.metrics.cut(marks["metrics"])
        self.samples.cut(marks["samples"])

    def close(self) -> None:
        """Close both files; another process may write them then."""
        self.metrics.close()
        self.samples.close()


NOTHING: Mark = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
"""The mark of an empty file: where a run without a checkpoint goes back to."""
