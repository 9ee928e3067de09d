"""Checkpoints: written beside, then renamed, so that every one that has a name is whole.

    .step-00000100.1f3a.partial/ … fsync …  →  rename  →  step-00000100/  →  replace `latest`  →  prune old ones

A process killed at any point leaves `latest` naming a complete checkpoint. A group of tensors (model, optimizer, …)
that every rank holds whole is one file, written by rank 0; of one that ranks divide, each writes what it holds.
Tensors are safetensors, everything else is JSON, YAML or the tokenizer's own JSON: loading one runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from multipack.atomic import PARTIAL, atomic_folder
from multipack.parallel.state import State
from multipack.parallel.world import World
from multipack.run import RunDirectory
from multipack.training.shard_writer import Part, parts_of, write_pieces, write_whole
from multipack.training.sharded import (
    INDEX,
    CheckpointSource,
    Index,
    box_of,
    index_of_file,
    index_of_pieces,
)

WHOLE, IN_PIECES = 1, 2
"""Versions of the checkpoint folder's layout: every group one file, or some of them folders of pieces."""
COMPLETE = ".complete"
"""The file of a checkpoint in pieces that is written last: without it none is loaded, however it was copied."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back.

    Attributes:
        path: its folder.
        step: steps taken when it was written.
        source: its tensors: "model" and "optimizer" as `Engine.state` names them, "observers" where one keeps some.
        progress: plan state, file marks, running loss: whatever the trainer asked to keep.
        rng: generator states by "rank-<r>.<device type>".
    """

    path: Path
    step: int
    source: CheckpointSource
    progress: dict[str, Any]
    rng: dict[str, Tensor]

    def whole(self, group: str) -> dict[str, Tensor]:
        """All whole tensors of a group, on the CPU; empty = there is no such group."""
        return self.source.whole(group)


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Content:
    """What a checkpoint is written from; progress, rng and files matter on rank 0 alone.

    Attributes:
        step: steps taken.
        tensors: of model, optimizer and whatever else the run keeps, by group: what this rank holds.
        progress: JSON-able state of the trainer.
        rng: generator states of all ranks.
        files: more text files of the checkpoint, by name.
        best: whether its validation loss is the lowest so far.
    """

    step: int
    tensors: State
    progress: dict[str, Any]
    rng: dict[str, Tensor]
    files: dict[str, str]
    best: bool = False


class CheckpointWriter:
    """Writes a run's checkpoints, all ranks together: at once, or in a thread while training goes on.

    In the background a checkpoint is first copied to memory of the CPU. The next one waits for it, and what went wrong
    with it is raised there, or by `wait`: by every rank.

    Args:
        run: where.
        world: all ranks of the run; each calls every method.
        keep: checkpoints that stay, the newest ones and the best; 0 = all.
        background: whether `save` returns before the checkpoint is written.
        timeout_seconds: how long ranks wait for each other in it.
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
        self._crew: World | None = None
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._under_way = ""

    def save(self, content: Content) -> Path:
        """Write a checkpoint and let `latest` (and `best`) name it; returns its folder, which may not be there yet.

        Raises:
            ValueError: it, or the one before it in the background, could not be written.
            OSError: likewise, on rank 0.
        """
        self.wait()
        final = self._run.checkpoints / name_of(content.step)
        # Stopped again before the first step after a resume: the same state is there already.
        if self._world.on_main(lambda: "there" if self._is_latest(final, content.best) else ""):
            return final
        divided = divided_groups(content.tensors, self._world)
        writes = {group: self._world.is_main or group in divided for group in content.tensors}
        parts = {
            group: parts_of(tensors, copy=self._background) if writes[group] else {}
            for group, tensors in sorted(content.tensors.items())
        }
        state = (
            json.dumps({"step": content.step, "progress": content.progress}) if self._world.is_main else ""
        )
        crew = self._crew = self._crew or self._made_crew()

        def write() -> None:
            self._write(crew, final, parts, divided, state, content)

        if not self._background:
            write()
            return final
        self._under_way = final.name
        self._thread = Thread(target=self._catching, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()
        return final

    def wait(self) -> None:
        """Wait for the checkpoint that is being written in the background.

        Raises:
            ValueError: on every rank: it could not be written.
        """
        if self._thread is None:
            return
        own = self.abandon()
        told = {rank: text for rank, text in enumerate(self._world.gather(own)) if text}
        if told:
            raise ValueError(next(iter(told.values())))

    def abandon(self) -> str:
        """Let what is being written come to its end without asking other ranks; what went wrong, empty = nothing."""
        if self._thread is None:
            return ""
        self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is None:
            return ""
        return f"checkpoint {self._under_way} was not written: {error or type(error).__name__}"

    def _catching(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def _made_crew(self) -> World:
        """The ranks as writers: with a process group of their own where training's is busy, or knows GPUs only."""
        if self._world.size == 1 or (self._world.backend == "gloo" and not self._background):
            return self._world
        timeout = timedelta(seconds=self._timeout_seconds)
        return _Aside(**vars(self._world), group=dist.new_group(backend="gloo", timeout=timeout))

    def _is_latest(self, final: Path, best: bool) -> bool:
        latest = self._run.latest
        there = (
            final.is_dir() and latest.is_file() and latest.read_text(encoding="utf-8").strip() == final.name
        )
        if there and best:
            self._run.point_to(final, self._run.best)
        return there

    def _write(
        self,
        crew: World,
        final: Path,
        parts: dict[str, dict[str, Part]],
        divided: set[str],
        state: str,
        content: Content,
    ) -> None:
        group = crew.group if isinstance(crew, _Aside) else None
        written: list[str] = []
        # A folder of that name that latest does not name was abandoned by resuming from an older one: replaced.
        with _shared_folder(crew, final) as folder:
            for name in sorted(divided):
                _on_main(crew, (folder / name).mkdir)
                written += [f"{name}/{file}" for file in write_pieces(folder / name, parts[name], group)]

            def write_rest() -> None:
                whole = {name: parts[name] for name in parts if name not in divided}
                whole["rng"] = parts_of(content.rng, copy=False)
                for name, tensors in whole.items():
                    write_whole(folder / f"{name}.safetensors", tensors)
                for name, text in content.files.items():
                    _write_text(folder / name, text)
                names = [*written, *(f"{name}.safetensors" for name in whole), *content.files]
                layout = {
                    "format": IN_PIECES if divided else WHOLE,
                    **json.loads(state),
                    "groups": sorted(parts),
                    "divided": sorted(divided),
                    "files": {name: _size_of(folder, name) for name in names},
                }
                _write_text(folder / "state.json", json.dumps(layout, indent=1))
                if divided:
                    _write_text(folder / COMPLETE, f"{content.step}\n")

            _on_main(crew, write_rest)

        def name_it() -> None:
            self._run.point_to(final)
            if content.best:
                self._run.point_to(final, self._run.best)
            _prune(self._run, final, self._keep)

        _on_main(crew, name_it)


def save_checkpoint(
    run: RunDirectory,
    step: int,
    tensors: State,
    progress: dict[str, Any],
    rng: dict[str, Tensor],
    files: dict[str, str],
    keep: int,
    best: bool = False,
    world: World | None = None,
) -> Path:
    """Write one checkpoint at once; see `CheckpointWriter` and `Content`. All ranks of `world` call it."""
    writer = CheckpointWriter(run, world or World(), keep)
    return writer.save(Content(step, tensors, progress, rng, files, best))


def divided_groups(tensors: State, world: World) -> set[str]:
    """Groups that ranks divide: some hold pieces of their tensors, or tensors that others lack. Collective."""
    own = {
        group: {
            "names": hashlib.sha256("\n".join(sorted(named)).encode()).hexdigest(),
            "pieces": any(box_of(tensor).sizes != tensor.shape for tensor in named.values()),
        }
        for group, named in tensors.items()
    }
    ranks = [json.loads(text) for text in world.gather(json.dumps(own))]
    if any(rank.keys() != own.keys() for rank in ranks):
        raise ValueError(
            f"ranks save other groups of tensors than each other: {[sorted(rank) for rank in ranks]}"
        )
    return {
        group
        for group in own
        if any(rank[group]["pieces"] or rank[group] != ranks[0][group] for rank in ranks)
    }


@dataclass(frozen=True)
class _Aside(World):
    """The same ranks over another process group, so that a thread's collectives never meet those of training."""

    group: dist.ProcessGroup | None = None

    def from_main(self, text: str) -> str:
        box = [text]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def _on_main(crew: World, function: Callable[[], object]) -> None:
    """Run `function` on rank 0 alone; whatever goes wrong there, every rank fails with it."""

    def run() -> str:
        try:
            function()
        except (ValueError, OSError):
            raise
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return ""

    crew.on_main(run)


@contextmanager
def _shared_folder(crew: World, final: Path) -> Iterator[Path]:
    """`atomic_folder`, made by rank 0 and written into by all; it gets its name when rank 0's block ends well."""
    with ExitStack() as stack:
        folder = crew.on_main(lambda: str(stack.enter_context(atomic_folder(final, replace=True))))
        yield Path(folder)
        _on_main(crew, stack.close)


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
    for leftover in run.checkpoints.glob(f".step-*{PARTIAL}"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    best = run.best.read_text(encoding="utf-8").strip() if run.best.is_file() else ""
    found = (path for path in run.checkpoints.glob("step-*") if path.name < newest.name)
    older = sorted(path for path in found if path.name != best)
    for path in older[: max(len(older) - keep + 1, 0)] if keep else []:
        shutil.rmtree(path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint: everything but its tensors is read, and where those are is checked.

    Args:
        path: its folder.

    Raises:
        ValueError: it is not complete, a file is missing, damaged or has another size than when it was written, or the
            format is newer.
    """
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        version, files = state["format"], dict(state.get("files", {}))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a complete checkpoint: {error}") from error
    if version not in (WHOLE, IN_PIECES):
        raise ValueError(
            f"{path} has checkpoint format {version}, this version reads {WHOLE} and {IN_PIECES}"
        )
    if version == IN_PIECES and not (path / COMPLETE).is_file():
        raise ValueError(
            f"{path} is not a complete checkpoint: {COMPLETE}, which is written last, is missing; resume from an older"
            f" one in {path.parent}"
        )
    _check_files(path, files)
    try:
        return Checkpoint(
            path=path,
            step=state["step"],
            source=CheckpointSource(path, _indices(path, state)),
            progress=state["progress"],
            rng=load_file(path / "rng.safetensors"),
        )
    except (SafetensorError, LookupError, TypeError, OSError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}; resume from an older one") from error


def _check_files(path: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"checkpoint {path} names {name!r}, which is not in its folder")
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise ValueError(f"checkpoint {path}: {name} {what}; resume from an older one in {path.parent}")


def _indices(path: Path, state: dict[str, Any]) -> dict[str, Index]:
    """Where the tensors of every group are; only files that the checkpoint also lists as its own are opened."""
    files, divided = state["files"], state.get("divided", [])
    indices = {}
    for group in state.get("groups", ["model", "optimizer"]):
        if group in divided and f"{group}/{INDEX}" in files:
            own = {name.removeprefix(f"{group}/") for name in files if name.startswith(f"{group}/")}
            indices[group] = index_of_pieces(path / group, own)
        elif group not in divided and f"{group}.safetensors" in files:
            indices[group] = index_of_file(path / f"{group}.safetensors")
        else:
            raise ValueError(f"checkpoint {path} lists no file of its {group}; resume from an older one")
    return indices


def gather_rng(world: World) -> dict[str, Tensor]:
    """The generator states of all ranks, for rank 0 to write."""
    own = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(world.device)
    packed = json.dumps({kind: state.numpy().tobytes().hex() for kind, state in own.items()})
    return {
        f"rank-{rank}.{kind}": torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
        for rank, states in enumerate(world.gather(packed))
        for kind, state in json.loads(states).items()
    }


def restore_rng(world: World, rng: dict[str, Tensor]) -> bool:
    """Set this rank's generators as they were, if it is known; False on all ranks where the checkpoint had fewer."""
    if f"rank-{world.rank}.cpu" in rng:
        torch.set_rng_state(rng[f"rank-{world.rank}.cpu"])
    if world.device.type == "cuda" and f"rank-{world.rank}.cuda" in rng:
        torch.cuda.set_rng_state(rng[f"rank-{world.rank}.cuda"], world.device)
    return f"rank-{world.size - 1}.cpu" in rng
