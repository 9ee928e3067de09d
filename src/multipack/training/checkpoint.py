"""Checkpoints: written to a temporary folder and then renamed, so that every `step-…` folder is complete.

    .step-00000100.1f3a.partial/ … fsync …  →  rename  →  step-00000100/  →  replace `latest`  →  remove old ones

    step-00000100/
      tensors/shard-00001.safetensors …   model, optimizer, random numbers: a file per rank, see checkpoint_tensors.py
      state.json                          step, progress of the run, names and sizes of all files
      config.yaml tokenizer.json …        the run's configuration and tokenizer
      .complete                           written last

If a process is killed at any point, `latest` still names a complete checkpoint. A checkpoint can be read by another
number of ranks than wrote it. Tensors are safetensors and all other files are text: loading runs no code from them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist

from multipack.atomic import PARTIAL, move_into_place, partial_path, sync_folder
from multipack.parallel.state import State
from multipack.parallel.world import World
from multipack.run import COMPLETE, RunDirectory
from multipack.training.checkpoint_tensors import TensorFiles, write_tensors

FORMAT = 3
"""Version of the layout; 1 and 2 are of earlier versions of multipack."""
STATE = "state.json"
TENSORS = "tensors"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint opened for reading.

    Attributes:
        path: folder of the checkpoint.
        step: number of steps taken when it was written.
        source: its tensors in groups: "model" and "optimizer" as in `ModelEngine.state`, "rng", and others.
        progress: JSON values of the trainer: state of the plan, positions in the run log, running loss.
    """

    path: Path
    step: int
    source: TensorFiles
    progress: dict[str, Any]


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint to write; fields other than `step` and `tensors` are used on rank 0 only.

    Attributes:
        step: number of steps taken.
        tensors: this rank's tensors by group and name. Random number states are added.
        progress: JSON values of the trainer.
        files: name → content of additional text files.
        best: whether its validation loss is the lowest so far.
    """

    step: int
    tensors: State
    progress: dict[str, Any]
    files: dict[str, str]
    best: bool = False


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


class CheckpointWriter:
    """Writes a run's checkpoints: synchronously, or in a thread while training continues. All methods are collective.

    In the background a checkpoint is first copied to CPU memory. The next `save` waits for it; errors are raised there
    or by `wait`, on every rank.

    Args:
        run: the run directory.
        world: all ranks of the run.
        keep: number of newest checkpoints to keep, besides the best; 0 = all.
        background: whether `save` returns before the checkpoint is written.
        timeout_seconds: how long ranks wait for each other while they write in the background.
    """

    def __init__(
        self,
        run: RunDirectory,
        world: World,
        keep: int,
        background: bool = False,
        timeout_seconds: float = 600.0,
    ) -> None:
        self._run, self._world, self._keep = run, world, keep
        self._background, self._timeout_seconds = background, timeout_seconds
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._writing = ""

    def save(self, content: Content) -> Path:
        """Write a checkpoint and update `latest` (and `best`).

        Returns:
            Its folder, which may not exist yet if it is written in the background.

        Raises:
            ValueError: this checkpoint, or the previous one in the background, could not be written.
        """
        self.wait()
        world, final = self._world, self._run.checkpoints / name_of(content.step)
        # Stopped again before the first step after a resume: the same state is there already.
        if world.on_main(lambda: "there" if self._is_latest(final, content.best) else ""):
            return final
        partial = Path(world.from_main(str(partial_path(final))))
        tensors = {**content.tensors, "rng": rng_state(world)}
        if self._background:
            tensors = {
                group: {name: each.detach().to("cpu", copy=True) for name, each in named.items()}
                for group, named in tensors.items()
            }
        state = json.dumps({"format": FORMAT, "step": content.step, "progress": content.progress})
        # Training continues to use the default group, and NCCL sends no objects of the CPU.
        if self._group is None and world.size > 1 and (self._background or world.backend != "gloo"):
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_seconds))

        def write() -> None:
            try:
                write_tensors(
                    partial / TENSORS,
                    tensors,
                    lambda names: self._finish(partial, final, names, state, content),
                    self._group,
                    alone=world.size == 1,
                )
            except BaseException:
                if world.is_main:
                    shutil.rmtree(partial, ignore_errors=True)
                raise

        if self._background:
            self._writing, self._pending = final.name, self._thread.submit(write)
        else:
            write()
        return final

    def wait(self) -> None:
        """Wait for the checkpoint that is being written in the background; collective.

        Raises:
            ValueError: on every rank, if it could not be written.
        """
        if self._pending is None:
            return
        for problem in self._world.gather(self.abandon()):
            if problem:
                raise ValueError(problem)

    def abandon(self) -> str:
        """Wait for the background thread without asking other ranks; returns its error, empty if there is none."""
        pending, self._pending = self._pending, None
        error = pending.exception() if pending is not None else None
        return f"checkpoint {self._writing} was not written: {error}" if error is not None else ""

    def _is_latest(self, final: Path, best: bool) -> bool:
        latest = self._run.latest
        found = (
            final.is_dir() and latest.is_file() and latest.read_text(encoding="utf-8").strip() == final.name
        )
        if found and best:
            self._run.point_to(final, self._run.best)
        return found

    def _finish(self, partial: Path, final: Path, names: list[str], state: str, content: Content) -> None:
        """Rank 0's part after all ranks have written: the text files, the final name, the pointers."""
        for name, text in content.files.items():
            _write_text(partial / name, text)
        names = [*(f"{TENSORS}/{name}" for name in names), *content.files]
        files = {name: _size_of(partial, name) for name in names}
        _write_text(partial / STATE, json.dumps({**json.loads(state), "files": files}, indent=1))
        _write_text(partial / COMPLETE, f"{content.step}\n")
        sync_folder(partial / TENSORS)
        # A folder of this name that `latest` does not name was abandoned by resuming from an older one.
        move_into_place(partial, final, replace=True)
        self._run.point_to(final)
        if content.best:
            self._run.point_to(final, self._run.best)
        _prune(self._run, final, self._keep)


def _write_text(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _size_of(folder: Path, name: str) -> int:
    if not (folder / name).is_file():
        raise ValueError(
            f"rank 0 does not find {name}, which another rank wrote into {folder}: the run directory must be on a"
            " file system that all hosts share"
        )
    return (folder / name).stat().st_size


def _prune(run: RunDirectory, newest: Path, keep: int) -> None:
    """Remove what killed processes left and all but the newest checkpoints and the best."""
    leftovers = [*run.checkpoints.glob(f".step-*{PARTIAL}"), *run.checkpoints.glob(".step-*.old")]
    best = run.best.read_text(encoding="utf-8").strip() if run.best.is_file() else ""
    found = (path for path in run.checkpoints.glob("step-*") if path.name < newest.name)
    older = sorted(path for path in found if path.name != best)
    outdated = older[: max(len(older) - keep + 1, 0)] if keep else []
    for path in [*leftovers, *outdated]:
        # One that cannot be removed, as where a file is open over NFS, is tried again after the next checkpoint.
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint: everything but the values of its tensors is read and checked.

    Args:
        path: its folder.

    Raises:
        ValueError: it is incomplete or of another format; a file is missing, damaged or has another size than when it
            was written.
    """
    advice = f"resume from an older one in {path.parent}"
    if not (path / STATE).is_file():
        raise ValueError(f"{path} is not a complete checkpoint: it has no {STATE}; {advice}")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        version, step, progress, files = (state[key] for key in ("format", "step", "progress", "files"))
        sizes = {str(name): int(size) for name, size in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path / STATE} is damaged: {error!r}; {advice}") from error
    if version != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {version}, and this version of multipack reads format {FORMAT}: continue"
            " with the version that wrote it, or export its weights with that version and start from them"
            " (train.init_from)"
        )
    if not (path / COMPLETE).is_file():
        raise ValueError(f"{path} is not a complete checkpoint: {COMPLETE} is missing; {advice}")
    _check_files(path, sizes, advice)
    try:
        return Checkpoint(path, int(step), TensorFiles(path / TENSORS), dict(progress))
    except (ValueError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}; {advice}") from error


def _check_files(path: Path, sizes: Mapping[str, int], advice: str) -> None:
    """Each file that was written is there with its size, and no other file of tensors is."""
    for name, size in sizes.items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"checkpoint {path} lists {name!r}, which is not in its folder")
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            problem = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise ValueError(f"checkpoint {path}: {name} {problem}; {advice}")
    for file in (path / TENSORS).glob("*.safetensors"):
        if f"{TENSORS}/{file.name}" not in sizes:
            raise ValueError(f"checkpoint {path}: {TENSORS}/{file.name} is not listed in {STATE}; {advice}")


def rng_state(world: World) -> dict[str, torch.Tensor]:
    """States of this rank's random number generators, as "rank-<rank>.<device type>"."""
    states = {f"rank-{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rank-{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def restore_rng(world: World, source: TensorFiles) -> bool:
    """Set this rank's generators as they were, if they were saved.

    Returns:
        False, on all ranks, if the checkpoint was written by fewer ranks.
    """
    saved = source.shapes("rng")
    if f"rank-{world.rank}.cpu" in saved:
        torch.set_rng_state(source.tensor("rng", f"rank-{world.rank}.cpu"))
    if world.device.type == "cuda" and f"rank-{world.rank}.cuda" in saved:
        torch.cuda.set_rng_state(source.tensor("rng", f"rank-{world.rank}.cuda"), world.device)
    return f"rank-{world.size - 1}.cpu" in saved
