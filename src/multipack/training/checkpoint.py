"""Checkpoints: written to a temporary folder and then renamed, so that every `step-…` folder is complete.

    .step-00000100.1f3a.partial/ … fsync …  →  rename  →  step-00000100/  →  replace `latest`  →  remove old ones

    step-00000100/
      tensors/weights-00001.safetensors … model, a file per rank; see checkpoint_tensors.py
      tensors/state-00001.safetensors …   optimizer, random numbers
      state.json                          step, progress of the run, checksums of all other files
      config.yaml tokenizer.json …        the run's configuration and tokenizer
      .complete                           checksum of state.json; written last

If a process is killed at any point, `latest` still names a complete checkpoint. A checkpoint can be read by another
number of ranks than wrote it. Tensors are safetensors and all other files are text: loading runs no code from them.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.distributed_c10d import _set_pg_timeout

from multipack.atomic import PARTIAL, move_into_place, partial_path, read_file, sync_folder, write_atomically
from multipack.checksums import checksum
from multipack.parallel.state import State
from multipack.parallel.world import World
from multipack.run import COMPLETE, FORMAT, STATE, RunDirectory, check_format
from multipack.training.checkpoint_tensors import Pieces, TensorFiles, divide, write_pieces

_PATIENCE = timedelta(days=1)
"""Time that ranks wait for each other while a checkpoint is written."""
MALFORMED = (SafetensorError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors that values of another form than was written may raise."""
TENSORS = "tensors"
"""Folder of the tensor files."""

PROGRESS: dict[str, type] = {
    "data": dict,
    "corpus": dict,
    "files": dict,
    "callbacks": dict,
    "marks": dict,
    "running": list,
    "world_size": int,
    "threads": int,
    "evaluated": int,
    "best_step": int,
}
"""Entry of `Checkpoint.progress` → its type."""
LOG = ("metrics", "samples", "documents")
"""Files of the run log, whose sizes and hashes are `progress["marks"]`."""

Files = dict[str, str]
"""Name of a file in a checkpoint → its `checksum`."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint opened for reading.

    Attributes:
        path: folder of the checkpoint.
        step: number of steps taken when it was written.
        source: its tensors in groups: "model" and "optimizer" as in `Engine.state`, "rng", and others.
        progress: JSON values of the trainer and of `RunFiles`, see `PROGRESS`: state of the feed, running loss,
            hashes of documents, positions in the run log.
    """

    path: Path
    step: int
    source: TensorFiles
    progress: dict[str, Any]


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


class CheckpointWriter:
    """Writes a run's checkpoints in a thread. All methods but `finish_alone` are collective.

    In the background, training continues while a checkpoint is written: each rank first copies its pieces to CPU
    memory. The next `save` waits for the checkpoint; errors are raised there or by `wait`, on every rank.

    It keeps the `keep` newest checkpoints (0 = all) besides the best; `report` gets a line, once, on rank 0, if an old
    one cannot be removed.
    """

    def __init__(
        self,
        run: RunDirectory,
        world: World,
        keep: int,
        background: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        self._report: Callable[[str], None] | None = report
        self._run, self._world, self._keep, self._background = run, world, keep, background
        self._group: dist.ProcessGroup | None = None
        # Training continues to use the default group, and the thread exchanges text on the CPU. Ranks wait for the
        # slowest one to write, however long that takes: `Watch` ends ranks that wait for one without heartbeats.
        if world.backend != "none":
            self._group = world.cpu_group()
            _set_pg_timeout(_PATIENCE, self._group)
        self._kept: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._writing = ""

    def save(
        self,
        step: int,
        tensors: State,
        progress: dict[str, Any],
        files: Mapping[str, str],
        best: bool = False,
    ) -> Path:
        """Write a checkpoint and update `latest` (and `best`).

        Args:
            step: number of steps taken.
            tensors: this rank's tensors by group and name. States of random number generators are added.
            progress: see `PROGRESS`. Only rank 0 uses this and the following arguments.
            files: name → content of additional text files.
            best: whether its validation loss is the lowest so far.

        Returns:
            Its folder, which may not exist yet if it is written in the background.

        Raises:
            ValueError: this checkpoint, or the previous one in the background, could not be written.
        """
        self.wait()
        world, final = self._world, self._run.checkpoints / name_of(step)
        if not (folder := world.on_main(lambda: self._partial_folder(final, best))):
            return final
        partial = Path(folder)
        pieces = divide({**tensors, "rng": rng_state(world)}, world)
        if self._background:
            pieces = self._copied(pieces)
        state = {"format": FORMAT, "step": step, "progress": deepcopy(progress)}

        def complete(written: Files) -> None:
            _complete(partial, final, written, state, files)
            self._run.point_to(final)
            if best:
                self._run.point_to(final, self._run.best)
            problem = _prune(self._run, final, self._keep)
            if problem and self._report is not None:
                self._report(f"note: {problem}; training continues, and every checkpoint tries again")
                self._report = None

        self._writing = final.name
        self._pending = self._thread.submit(self._write, partial, pieces, complete)
        if not self._background:
            self.wait()
        return final

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            ValueError: on every rank, if it could not be written.
        """
        if self._pending is None:
            return
        for problem in self._world.gather(self.finish_alone(), self._group):
            if problem:
                raise ValueError(problem)

    def finish_alone(self) -> str:
        """Wait for this rank's thread, but not for other ranks; returns its error, empty if there is none."""
        pending, self._pending = self._pending, None
        error = pending.exception() if pending is not None else None
        if error is None:
            return ""
        return f"{self._run.checkpoints / self._writing} was not written: {error}; {self._run.advice()}"

    def _copied(self, pieces: Pieces) -> Pieces:
        """Copies of pieces in host memory; for GPU tensors in pinned buffers, which the next save uses again."""
        before, self._kept, copies = self._kept, {}, Pieces()
        for name, (values, offsets) in pieces.items():
            if not values.is_cuda:
                copies[name] = values.to("cpu", copy=True), offsets
                continue
            kept = before.get(name)
            if kept is None or (kept.shape, kept.dtype) != (values.shape, values.dtype):
                kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._kept[name] = kept.copy_(values, non_blocking=True)
            copies[name] = kept, offsets
        self._world.synchronize()
        return copies

    def _partial_folder(self, final: Path, best: bool) -> str:
        """The temporary folder of a new checkpoint; empty if `latest` is already this one, which may become `best`."""
        latest = self._run.latest
        if not (final.is_dir() and latest.is_file() and latest.read_text("utf-8").strip() == final.name):
            return str(partial_path(final))
        # The run was stopped again before the first step after a resume.
        if best:
            self._run.point_to(final, self._run.best)
        return ""

    def _write(self, partial: Path, pieces: Pieces, complete: Callable[[Files], None]) -> None:
        """Write this rank's tensors; rank 0 completes the checkpoint after all ranks have written."""
        world, problem, written = self._world, "", Files()
        kinds: dict[str, Pieces] = {"weights": {}, "state": {}}
        for key, piece in pieces.items():
            kinds["weights" if key.startswith("model.") else "state"][key] = piece
        try:
            for kind, each in kinds.items():
                if each:
                    name = f"{TENSORS}/{kind}-{world.rank + 1:05d}.safetensors"
                    written[name] = write_pieces(partial / name, each)
        except Exception as error:  # no rank leaves the others waiting
            problem = f"rank {world.rank}: {error}"
        answers = [json.loads(text) for text in world.gather(json.dumps([problem, written]), self._group)]
        if not world.is_main:
            return
        try:
            if problems := [problem for problem, _ in answers if problem]:
                raise ValueError("; ".join(problems))
            complete({name: digest for _, files in answers for name, digest in files.items()})
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _complete(
    partial: Path, final: Path, written: Files, state: dict[str, Any], texts: Mapping[str, str]
) -> None:
    """Add text files, checksums and `.complete` to the tensor files, and rename the folder."""
    if problem := damage(partial, written, checked=()):
        raise ValueError(
            f"{problem} for rank 0, although another rank wrote it: the run directory must be on a file system that"
            " all hosts share"
        )
    for name, text in texts.items():
        write_atomically(partial / name, text.encode())
    files = {**written, **{name: checksum(partial / name) for name in texts}}
    write_atomically(partial / STATE, json.dumps({**state, "files": files}, indent=1).encode())
    write_atomically(partial / COMPLETE, checksum(partial / STATE).encode())
    sync_folder(partial / TENSORS)
    # A folder of this name that `latest` does not name was abandoned by resuming from an older one.
    move_into_place(partial, final, replace=True)


def _prune(run: RunDirectory, newest: Path, keep: int) -> str:
    """Remove leftovers of killed processes, and all checkpoints but the newest and the best; returns as `sweep`."""
    best = run.best.read_text(encoding="utf-8", errors="replace").strip() if run.best.is_file() else ""
    found = (path for path in run.checkpoints.glob("step-*") if path.name < newest.name)
    older = sorted(path for path in found if path.name != best)
    problems = []
    for path in older[: max(len(older) - keep + 1, 0)] if keep else []:
        try:
            path.rename(partial_path(path))  # no half of a checkpoint keeps its name
        except OSError as error:
            problems.append(f"{path} could not be removed ({error.strerror})")
    return next(filter(None, [*problems, sweep(run)]), "")


def sweep(run: RunDirectory) -> str:
    """Remove leftovers of killed processes in the directory of a run that no process is writing.

    Returns:
        The first path that could not be removed, such as a file that is open over NFS, and why; empty if there is none.
    """
    problem = ""
    for path in [*run.path.glob(".*"), *run.checkpoints.glob(".*")]:
        try:
            if path.suffix in (PARTIAL, ".old"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            problem = problem or f"{path} could not be removed ({error.strerror})"
    return problem


def load_checkpoint(path: Path, world: World | None = None, weights_only: bool = False) -> Checkpoint:
    """Open a checkpoint: files are compared with their checksums; values of tensors are not yet read.

    Args:
        path: its folder.
        world: ranks that all open it and divide the work; collective.
        weights_only: do not compare the files of the optimizer, whose tensors are not used.

    Raises:
        ValueError: it is incomplete or of another format; a file is missing or is not what was written.
    """
    check_format(path)
    with readable(path, (OSError, ValueError, *MALFORMED)):
        return _open(path, world or World(), weights_only)


@contextmanager
def readable(path: Path, errors: tuple[type[Exception], ...] = MALFORMED) -> Iterator[None]:
    """Context that reads a checkpoint; its `errors` become a ValueError that names the checkpoint, in one line."""
    try:
        yield
    except errors as error:
        reason = " ".join(str(error).split())  # of safetensors it may have several lines
        raise ValueError(
            f"checkpoint {path} cannot be read: {reason}; resume from another one in {path.parent}"
        ) from error


def _open(path: Path, world: World, weights_only: bool) -> Checkpoint:
    for name in (STATE, COMPLETE):
        if not (path / name).is_file():
            raise ValueError(f"it is not complete, {name} is missing")
    state = json.loads(read_file(path / STATE, sys.maxsize))
    if checksum(path / STATE) != (path / COMPLETE).read_text(encoding="utf-8"):
        raise ValueError(f"{STATE} is not what was written")
    files = state["files"]
    used = [name for name in files if not (weights_only and name.startswith(f"{TENSORS}/state-"))]
    for problem in world.gather(damage(path, files, used[world.rank :: world.size])):
        if problem:
            raise ValueError(problem)
    step, progress = state["step"], state["progress"]
    if type(step) is not int or step < 0 or not isinstance(progress, dict):
        raise ValueError(f"{STATE} has step {step!r} and progress {str(progress)[:40]!r}")
    return Checkpoint(path, step, TensorFiles(path / TENSORS), progress)


def damage(path: Path, files: Files, checked: Collection[str]) -> str:
    """How the files of a folder differ from `files`, as text; empty if they do not.

    Checksums are compared for the names in `checked`.
    """
    present = {f"{TENSORS}/{file.name}" for file in (path / TENSORS).glob("*.safetensors")}
    if unknown := present - files.keys():
        return f"{min(unknown)} is not listed in {STATE}"
    for name, digest in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if name in checked and checksum(path / name) != digest:
            return f"{name} is not what was written"
    return ""


def check_progress(checkpoint: Checkpoint) -> None:
    """Check the types of the entries of a checkpoint's progress; raises a ValueError that names the checkpoint.

    The checksum of the file is right: the file was changed on purpose, or by a version with other entries.
    """
    with readable(checkpoint.path):
        for name, kind in PROGRESS.items():
            if type(checkpoint.progress[name]) is not kind:
                raise TypeError(f"progress.{name} is no {kind.__name__}")
        *running, unit = checkpoint.progress["running"]
        if len(running) != 2 or not all(map(math.isfinite, running)) or not isinstance(unit, str):
            raise TypeError("progress.running is no two numbers and a unit")
        for name in LOG:
            mark = checkpoint.progress["marks"][name]
            if (type(mark["bytes"]), type(mark["sha256"])) != (int, str):
                raise TypeError(f"progress.marks.{name} is no size and hash")


def rng_state(world: World) -> dict[str, torch.Tensor]:
    """States of this rank's random number generators, as "rank-<rank>.<device type>"."""
    states = {f"rank-{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rank-{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def restore_rng(world: World, source: TensorFiles) -> None:
    """Set this rank's random number generators to their saved states; a rank that is new keeps its own."""
    saved = source.shapes("rng")
    for name in rng_state(world).keys() & saved.keys():
        state = source.tensor("rng", name)
        if name.endswith("cuda"):
            torch.cuda.set_rng_state(state, world.device)
        else:
            torch.set_rng_state(state)
