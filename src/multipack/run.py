"""Layout of a run directory. Training writes it; reports, resume, generation and export read it.

    RUN/
      config.yaml       the resolved configuration; `multipack train config=RUN/config.yaml` starts an equal run
      metrics.jsonl     one record per step and evaluation, in full precision
      samples.txt       generated text of evaluations
      documents.jsonl   the numbers of the documents of each step (log.documents); `multipack audit` reads them
      metrics.jsonl.cut, samples.txt.cut, documents.jsonl.cut   what resuming from a checkpoint cut off, in order
      history.jsonl     starts and ends of processes: hosts, software, plan, notes, cost of padding; never cut
      report.html       the page of `multipack report`, written when a process ends
      trace.json        with train.profile
      reference.safetensors   with preference pairs; checkpoints have its checksum
      checkpoints/
        latest          the name of the newest complete checkpoint
        best            the name of the checkpoint with the lowest validation loss, if saved at an evaluation
        step-00000100/  see training/checkpoint.py

Files and folders whose names end with `.partial` are being written.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any

from multipack.atomic import is_free, read_file, write_atomically

FORMAT = 5
"""Version of the layout of checkpoints; 1 to 3 are of earlier versions of multipack."""
STATE = "state.json"
"""The file of a checkpoint with its format, step, progress and checksums."""
COMPLETE = ".complete"
"""The file of a checkpoint that is written last: a checkpoint without it is incomplete and is not loaded."""


def resume_command(path: Path) -> str:
    """The command that continues the run in a folder, for a shell."""
    return shlex.join(["multipack", "train", "train.resume=true", f"out={path}"])


class RunDirectory:
    """The directory of a run, which need not exist; attributes are the paths of the files and folders above."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.txt"
        self.documents = self.path / "documents.jsonl"
        self.history = self.path / "history.jsonl"
        self.page = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"
        self.latest = self.checkpoints / "latest"
        self.best = self.checkpoints / "best"

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint, complete or not; a new run in this directory would lose it."""
        return self.latest.is_file() or any(self.checkpoints.glob("step-*"))

    def check_unsaved(self) -> None:
        """Check that a run without checkpoints did not lose them: their folder is there, or there are no records.

        Raises:
            ValueError: the folder is missing.
        """
        lost = not self.checkpoints.is_dir() and self.metrics.is_file() and self.metrics.stat().st_size > 0
        if lost:
            raise ValueError(
                f"{self.checkpoints} is missing, but {self.metrics.name} has records: restore it from a copy of the"
                " run, or start a new run with another out="
            )

    def check_free(self) -> None:
        """Check that a new run may take this directory.

        Raises:
            FileExistsError: it is not empty; the message says how to continue the run in it.
        """
        if not is_free(self.path, leftovers=True):
            raise FileExistsError(
                f"{self.path} exists and is not empty. Continue that run with `{resume_command(self.path)}`, evaluate"
                f" it with `{shlex.join(['multipack', 'evaluate', str(self.path)])}`, or choose another out="
            )

    def create(self, config_yaml: str) -> None:
        """Make the directory of a new run; if several processes try, one succeeds. See `check_free`."""
        self.check_free()
        try:
            # The configuration comes first: a process that is killed before this leaves no run directory.
            write_atomically(self.config, config_yaml.encode(), exclusive=True)
        except FileExistsError:  # another process was first
            self.check_free()
            raise
        self.checkpoints.mkdir(exist_ok=True)

    def point_to(self, checkpoint: Path, pointer: Path | None = None) -> None:
        """Write the name of `checkpoint` into `latest`, or into another pointer file."""
        write_atomically(pointer or self.latest, f"{checkpoint.name}\n".encode())

    def complete_checkpoints(self) -> list[Path]:
        """The folders of all complete checkpoints, by step."""
        return sorted(marker.parent for marker in self.checkpoints.glob(f"step-*/{COMPLETE}"))

    def latest_checkpoint(self) -> Path:
        """The folder of the newest complete checkpoint: the one that `latest` names, if that file is there.

        Raises:
            FileNotFoundError: this is not a run directory, it has no checkpoint, or `latest` names a missing one.
        """
        if not self.config.is_file():
            raise FileNotFoundError(f"{self.path} is not a run directory: it has no config.yaml")
        # A process may have been killed before it wrote the pointer, or a copy may have lost it.
        if not os.path.lexists(self.latest) and (complete := self.complete_checkpoints()):
            return complete[-1]
        return self._named(self.latest, "none is complete; start the run anew with another out=")

    def advice(self) -> str:
        """Advice on continuing a failed run, for its error message."""
        if not (complete := self.complete_checkpoints()):
            return "no checkpoint is complete yet"
        return (
            f"{complete[-1].name} is complete: resume with `{resume_command(self.path)}` when this is mended"
        )

    def best_checkpoint(self) -> Path:
        """The folder of the checkpoint with the lowest validation loss.

        Raises:
            FileNotFoundError: no checkpoint was saved at an evaluation (train.keep_best), or it is missing.
        """
        return self._named(
            self.best, "none was saved at an evaluation (train.keep_best=true); take the latest"
        )

    def _named(self, pointer: Path, hint: str) -> Path:
        """The checkpoint that a pointer file names; `hint` ends the error message if there are no checkpoints."""
        name = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else ""
        if name and "\0" not in name and (self.checkpoints / name).is_dir():
            return self.checkpoints / name
        found = [path.name for path in self.complete_checkpoints()]
        advice = f"name one of {', '.join(found[-3:])} in {self.checkpoints}" if found else hint
        if not (found or pointer.is_file()):
            raise FileNotFoundError(f"{self.path} has no {pointer.name} checkpoint: {hint}")
        raise FileNotFoundError(f"{pointer} names no checkpoint that is there ({name[:40]!r}): {advice}")

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of metrics.jsonl in order, up to a line that is incomplete because its writer was killed."""
        if not self.metrics.exists():
            return
        for line in read_file(self.metrics, sys.maxsize).decode().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def unused_folder() -> Path:
    """Folder of a run without a name: `runs/` and the time, and a number if another run began in the same second."""
    named = Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S"))
    numbered = (named.with_name(f"{named.name}_{number}") for number in count(2))
    return next(path for path in chain([named], numbered) if not path.exists())


def config_yaml(config: Any, default: Any = None) -> str:
    """A configuration (any dataclass of dataclasses) as YAML for `config=FILE`; without the values of `default`."""
    from omegaconf import OmegaConf  # most users of this module only need paths

    values = asdict(config)
    if default is not None:
        values = _differing(values, asdict(default))
    return OmegaConf.to_yaml(OmegaConf.create(values))  # structured() takes twice as long


def _differing(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The values that differ from `others`, in the same nesting."""
    found = {}
    for key, value in values.items():
        if isinstance(value, dict) and (inner := _differing(value, others[key])):
            found[key] = inner
        elif not isinstance(value, dict) and value != others[key]:
            found[key] = value
    return found


def find_run(path: str | Path) -> tuple[RunDirectory, Path | None]:
    """The run directory that a path names, and the checkpoint if it names one of its checkpoints.

    Raises:
        FileNotFoundError: the path is neither.
    """
    given = Path(path)
    if given.parent.name == "checkpoints" and given.name.startswith("step-") and given.is_dir():
        return RunDirectory(given.parent.parent), given
    if os.path.lexists(given / "config.yaml"):
        return RunDirectory(given), None
    if not os.path.lexists(given):
        raise FileNotFoundError(f"there is no folder {given}")
    raise FileNotFoundError(
        f"{given} is neither a run directory (config.yaml) nor one of its checkpoints (checkpoints/step-…)"
    )


def check_regular(*files: Path) -> None:
    """Check that files to write are regular where they exist: opening a pipe would wait forever.

    Raises:
        ValueError: one is a folder, a pipe, a socket, a device, or a link to nothing.
    """
    for file in files:
        if not file.is_file() and os.path.lexists(file):
            raise ValueError(f"{file} is not a regular file: restore it from a copy, or remove it")


def check_format(checkpoint: Path) -> None:
    """Check that a checkpoint has the layout of this version; opening it reports a damaged `state.json`.

    Raises:
        ValueError: it was written by an earlier version.
    """
    try:
        version = json.loads(read_file(checkpoint / STATE))["format"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    if version != FORMAT:
        raise ValueError(
            f"{checkpoint} has format {version!r:.20}, and this version of multipack reads format {FORMAT}: continue"
            " with the version that wrote it, or export its weights with it and start from them (train.init_from)"
        )


def is_export(path: Path) -> bool:
    """Whether `path` is a folder in Hugging Face's or peft's format rather than a run or a checkpoint."""
    found = (path / "config.json").is_file() or is_peft(path)
    return found and not (path / "config.yaml").is_file()


def is_peft(path: Path) -> bool:
    """Whether `path` is a folder of an adapter in peft's format."""
    return (path / "adapter_config.json").is_file()


def holds_weights(folder: Path) -> bool:
    """Whether a folder has files of weights; pickled ones are refused only when they are read."""
    return any(path.suffix in (".safetensors", ".bin", ".pt", ".pth") for path in folder.glob("*"))


def weights_folder(path: Path) -> Path:
    """The folder that weights are read from: an export, a checkpoint, or the latest checkpoint of a run.

    Raises:
        FileNotFoundError: `path` is none of these, or the run has no complete checkpoint.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: give a run, a checkpoint, or a Hugging Face folder")
    if is_export(path):
        return path
    run, named = find_run(path)
    return named or run.latest_checkpoint()
