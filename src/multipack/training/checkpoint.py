"""Checkpoints: written beside, then renamed, so that every one that has a name is whole.

    .step-00000100.1f3a.partial/ … fsync …  →  rename  →  step-00000100/  →  replace `latest`  →  prune old ones

A process killed at any point leaves `latest` naming a complete checkpoint. Tensors are safetensors, everything
else is JSON, YAML or the tokenizer's own JSON: loading one runs no code from it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from multipack.atomic import PARTIAL, atomic_folder
from multipack.parallel.world import World
from multipack.run import RunDirectory

FORMAT = 1
"""Version of the checkpoint folder's layout."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back.

    Attributes:
        path: its folder.
        step: steps taken when it was written.
        tensors: {"model": …, "optimizer": …} as `Engine.state` gives them, and {"observers": …} where one keeps some.
        progress: plan state, file marks, running loss: whatever the trainer asked to keep.
        rng: generator states by "rank-<r>.<device type>".
    """

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    progress: dict[str, Any]
    rng: dict[str, Tensor]


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def save_checkpoint(
    run: RunDirectory,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    progress: dict[str, Any],
    rng: dict[str, Tensor],
    files: dict[str, str],
    keep: int,
    best: bool = False,
) -> Path:
    """Write a checkpoint and let `latest` (and `best`) name it. To be called by one rank.

    Args:
        run: where.
        step: steps taken.
        tensors: of model, optimizer and whatever else the run keeps, by group.
        progress: JSON-able state of the trainer.
        rng: generator states of all ranks.
        files: more text files of the checkpoint, by name.
        keep: checkpoints that stay, the newest ones and the best; 0 = all.
        best: whether its validation loss is the lowest so far.
    """
    final = run.checkpoints / name_of(step)
    if (
        final.is_dir()
        and run.latest.is_file()
        and run.latest.read_text(encoding="utf-8").strip() == final.name
    ):
        if best:
            run.point_to(final, run.best)
        return final  # stopped again before the first step after a resume: the same state is there already
    # A folder of that name that latest does not name was abandoned by resuming from an older one: replaced.
    with atomic_folder(final, replace=True) as folder:
        groups = {**tensors, "rng": rng}
        for name, group in groups.items():
            contiguous = {key: value.detach().cpu().contiguous() for key, value in group.items()}
            save_file(contiguous, folder / f"{name}.safetensors", metadata={"format": "pt"})
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        written = [folder / name for name in [*(f"{group}.safetensors" for group in groups), *files]]
        state = {
            "format": FORMAT,
            "step": step,
            "progress": progress,
            "groups": sorted(tensors),
            "files": {path.name: path.stat().st_size for path in written},
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        for path in [*written, folder / "state.json"]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    run.point_to(final)
    if best:
        run.point_to(final, run.best)
    _prune(run, final, keep)
    return final


def _prune(run: RunDirectory, newest: Path, keep: int) -> None:
    for leftover in run.checkpoints.glob(f".step-*{PARTIAL}"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    best = run.best.read_text(encoding="utf-8").strip() if run.best.is_file() else ""
    found = (path for path in run.checkpoints.glob("step-*") if path.name < newest.name)
    older = sorted(path for path in found if path.name != best)
    for path in older[: max(len(older) - keep + 1, 0)] if keep else []:
        shutil.rmtree(path)


def load_checkpoint(path: Path, groups: Collection[str] | None = None) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: its folder.
        groups: of tensors to read, as far as it has them; None = all. An optimizer is twice as large as its model.

    Raises:
        ValueError: a file is missing or has another size than when it was written, or the format is newer.
    """
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a complete checkpoint: {error}") from error
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has checkpoint format {state.get('format')}, this version reads {FORMAT}")
    for name, size in state.get("files", {}).items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise ValueError(f"checkpoint {path}: {name} {what}; resume from an older one in {path.parent}")
    try:
        return Checkpoint(
            path=path,
            step=state["step"],
            tensors={name: load_file(path / f"{name}.safetensors") for name in _groups(state, groups)},
            progress=state["progress"],
            rng=load_file(path / "rng.safetensors"),
        )
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}; resume from an older one") from error


def _groups(state: dict[str, Any], wanted: Collection[str] | None) -> list[str]:
    """Names of the groups of tensors; only those that the checkpoint also lists as files of its own are opened."""
    groups = state.get("groups", ["model", "optimizer"])
    listed = [name for name in groups if f"{name}.safetensors" in state["files"]]
    return [name for name in listed if wanted is None or name in wanted]


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
    """Set this rank's generators as they were; False where the checkpoint had fewer ranks than this one."""
    if f"rank-{world.rank}.cpu" not in rng:
        return False
    torch.set_rng_state(rng[f"rank-{world.rank}.cpu"])
    if world.device.type == "cuda" and f"rank-{world.rank}.cuda" in rng:
        torch.cuda.set_rng_state(rng[f"rank-{world.rank}.cuda"], world.device)
    return True
