"""`RunData`: the contents of a run directory, as far as it can be read: files may be torn or of other versions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multipack.atomic import open_file, read_file
from multipack.reports.recorded import finite, is_number, pairs, whole
from multipack.run import COMPLETE, find_run
from multipack.words import flatten, read_yaml

MOST_LINE = 1 << 26
"""Bytes of the longest line that is read."""
MOST_COLUMNS = 200
"""Most metrics of a run."""
MOST_SAMPLES = 1 << 24
"""Bytes of the largest samples.txt that is read."""


class Lines:
    """The lines of a growing JSON Lines file; each call of `new` returns the records since the last one.

    Attributes:
        problems: one sentence for each kind of invalid lines.
        torn: whether the last line is incomplete: its writer was killed, or is writing it.
        restarted: whether the last call began again, because the file had been cut.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.torn, self.restarted = path, False, False
        self._offset, self._number = 0, 0
        self._broken: list[int] = []

    @property
    def problems(self) -> list[str]:
        """Problems of the lines so far, a sentence each."""
        found = []
        if self._broken:
            more = f" and {len(self._broken) - 1:,} more" if len(self._broken) > 1 else ""
            found.append(f"{self.path.name}: line {self._broken[0]:,}{more} cannot be read and is left out")
        if self.torn:
            found.append(f"{self.path.name}: the last line is incomplete and is left out")
        return found

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number of the line, record) of each complete line that was not returned before.

        Raises:
            ValueError: the file is not a regular file, or a line is too long.
        """
        self.restarted = False
        if not self.path.exists():
            return
        with open_file(self.path) as file:
            if file.seek(0, 2) < self._offset:  # a resumed run has cut it
                self._offset, self._number, self._broken, self.restarted = 0, 0, [], True
            file.seek(self._offset)
            while line := file.readline(MOST_LINE):
                self.torn = not line.endswith(b"\n")
                if self.torn:
                    if len(line) == MOST_LINE:
                        raise ValueError(f"{self.path}: line {self._number + 1:,} is too long to be a record")
                    return
                self._offset += len(line)
                self._number += 1
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict):
                    yield self._number, record
                else:
                    self._broken.append(self._number)


class Columns:
    """Numbers of records by name: `values[name][i]` of record i, NaN where it has none."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {"step": []}

    def __len__(self) -> int:
        return len(self.values["step"])

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def add(self, record: dict[str, Any]) -> bool:
        """Append a record, unless it has no step. Returns whether it was appended."""
        if whole(record.get("step")) is None:
            return False
        count = len(self)
        for name, value in record.items():
            if not is_number(value) or (name not in self.values and len(self.values) >= MOST_COLUMNS):
                continue
            self.values.setdefault(name, [math.nan] * count).append(finite(value))
        for column in self.values.values():
            if len(column) == count:
                column.append(math.nan)
        return True

    def column(self, name: str) -> list[float]:
        """The values of a metric, NaN where it is missing."""
        return self.values.get(name, [math.nan] * len(self))

    def known(self, name: str) -> list[float]:
        """The values of a metric without NaN."""
        return [value for value in self.column(name) if not math.isnan(value)]

    def last(self, name: str) -> float:
        """The last value of a metric, NaN if there is none."""
        return next(iter(reversed(self.known(name))), math.nan)


class RunData:
    """The contents of a run directory as they are now, and after each `update`; nothing of it is changed.

    Attributes:
        run: the directory.
        config: values of config.yaml by full name.
        steps: metrics of steps.
        evaluations: metrics of evaluations.
        history: starts and ends of processes, in order; empty in runs of earlier versions.
        samples: (step, text) of each evaluation.

    Raises:
        FileNotFoundError: `path` is not a run directory.
        ValueError: config.yaml cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.run, _ = find_run(path)
        values = flatten(read_yaml(self.run.config))
        self.config = {key: value for key, value in values.items() if key != "out"}
        self._metrics, self._history = Lines(self.run.metrics), Lines(self.run.history)
        self.steps, self.evaluations, self._stepless = Columns(), Columns(), 0
        self.history: list[dict[str, Any]] = []
        self.update()

    def update(self) -> None:
        """Read new records; a run that was resumed begins again at its checkpoint."""
        records = [record for _, record in self._metrics.new()]
        if self._metrics.restarted:
            self.steps, self.evaluations, self._stepless = Columns(), Columns(), 0
        for record in records:
            own, synchronizing = record.get("dtb"), record.get("dtc")
            if isinstance(own, float) and isinstance(synchronizing, float):  # `dtb` includes `dtc`
                record["dtb"] = own - synchronizing
            is_evaluation = any(name.startswith("val_loss") for name in record)
            self._stepless += not (self.evaluations if is_evaluation else self.steps).add(record)
        self.history += [event for _, event in self._history.new()]
        self.samples, self._unread = _samples(self.run.samples)

    def checkpoints(self) -> dict[str, tuple[str, str]]:
        """Name of each checkpoint → its size, and whether it is `latest`, `best` or incomplete."""
        run = self.run
        pointers = [pointer for pointer in (run.latest, run.best) if pointer.is_file()]
        named = [(each.name, read_file(each).decode("utf-8", errors="replace").strip()) for each in pointers]
        found = {}
        for folder in sorted(run.checkpoints.glob("step-*/")):
            size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
            remarks = [pointer for pointer, name in named if name == folder.name]
            remarks += [] if (folder / COMPLETE).is_file() else ["incomplete"]
            found[folder.name] = (f"{size / 2**20:,.1f} MiB", ", ".join(remarks))
        return found

    @property
    def problems(self) -> list[str]:
        """One sentence for each kind of contents that could not be read."""
        found = [*self._metrics.problems, *self._history.problems]
        if self._stepless:
            found.append(f"{self.run.metrics.name}: {self._stepless:,} records have no step and are left out")
        return found + self._unread

    @property
    def start(self) -> dict[str, Any]:
        """The last start of a process; empty if none is recorded."""
        return next((event for event in reversed(self.history) if event.get("event") == "start"), {})

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: of the last start, or of the configuration; 0 = unknown."""
        return whole(self.start.get("steps")) or whole(self.config.get("train.steps")) or 0

    @property
    def end(self) -> dict[str, Any] | None:
        """The recorded end of the last process; None while it runs, or if it was killed."""
        last = self.history[-1] if self.history else {}
        return last if last.get("event") == "end" else None


def communication(found: RunData) -> str:
    """Which part of a step's time holds the communication of ranks, as text; empty for one process."""
    if "dtc" in found.steps:
        return (
            "Communication is the synchronization of gradients that computing did not hide: the last backward pass"
            " beyond the pace of the others."
        )
    parallel = dict(pairs(found.start.get("run"))).get("parallel", "none")[:200]
    if parallel.startswith("none"):
        return ""
    return (
        f"Communication of {parallel} is in forward, backward and optimizer, not a part of its own:"
        " train.profile=true writes a trace of three steps."
    )


def _samples(path: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """(step, text) of each generated text, and why the file cannot be read."""
    try:
        text = read_file(path, MOST_SAMPLES).decode("utf-8", errors="replace") if path.exists() else ""
    except (OSError, ValueError) as error:
        return [], [f"samples are left out: {error}"]
    parts = re.split(r"^=== step (\d{1,15})\n", text, flags=re.MULTILINE)[1:]
    return [
        (int(step), sample.rstrip("\n")) for step, sample in zip(parts[::2], parts[1::2], strict=True)
    ], []
