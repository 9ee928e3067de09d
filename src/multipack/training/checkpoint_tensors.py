"""Tensors of a checkpoint as safetensors files, written and read by `torch.distributed.checkpoint` (DCP).

    saved by four ranks              read by two
    shard-00001.safetensors  rows 0-2 ┐
    shard-00002.safetensors  rows 3-5 ┴─▶ rank 0: rows 0-5
    shard-00003.safetensors  rows 6-8 ┐
    shard-00004.safetensors  row  9   ┴─▶ rank 1: rows 6-9

Each rank writes one file with the pieces that it holds; a piece that several ranks hold is written by one of them. The
header of a file gives the offsets of its pieces, so that no other index is needed. Tensors are named "<group>.<name>",
such as "model.head.weight" and "optimizer.head.weight.exp_avg".

The safetensors storage of DCP reads and writes no pickle, in contrast to its default storage. Ranks do exchange their
plans as pickled objects over the process group, as torch's own collectives for objects do.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from multipack.parallel.state import State

_OFFSETS = "DCP_SHARDING_INFO"
"""Entry of a file's header with the offsets of its pieces, as `HuggingFaceStorageReader` reads it."""


def write_tensors(
    folder: Path,
    tensors: State,
    finish: Callable[[list[str]], None],
    group: ProcessGroup | None = None,
    alone: bool = False,
) -> None:
    """Write what each rank holds of named tensors into `folder`, which is created. Collective.

    Args:
        folder: the same for all ranks, on a file system that they share.
        tensors: by group and name; `DTensor`s where a rank holds a shard.
        finish: called on rank 0 with the names of all files once every rank has written. If it fails, all ranks do.
        group: all ranks; None = the default group.
        alone: this process is the only one.

    Raises:
        ValueError: on all ranks, if one of them could not write, or if pieces overlap or leave a gap.
    """
    flat = {
        f"{kind}.{name}": each.detach() for kind, named in tensors.items() for name, each in named.items()
    }
    with _translated(f"{folder} was not written"):
        save(
            flat,
            storage_writer=_TensorWriter(folder, finish),
            planner=_TensorPlanner(),
            process_group=group,
            no_dist=alone,
        )


class _TensorPlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class _TensorWriter(HuggingFaceStorageWriter):
    def __init__(self, folder: Path, finish: Callable[[list[str]], None]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._finish = folder, finish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces as one file.

        The writer of DCP makes the whole file in memory first, and a copy of it: 160 MB of tensors took 320 MB more and
        2.7 times the CPU time (torch 2.13).
        """
        name = f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
        tensors = {item.index.fqn: cast(Tensor, planner.resolve_data(item)) for item in plan.items}
        offsets = {item.index.fqn: {"saved_offsets": [*(item.index.offset or ())]} for item in plan.items}
        if tensors:
            header = {"format": "pt", _OFFSETS: json.dumps(offsets)}
            save_safetensors(self._folder / name, tensors, header)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(item.index, tensors[item.index.fqn].nbytes, name) for item in plan.items]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0's last step, after all ranks have written."""
        self._finish(sorted({each.storage_data for rank in results for each in rank}))


def save_safetensors(file: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> None:
    """Write tensors as a safetensors file that is on disk afterwards, with the permissions of its folder.

    Raises:
        OSError: it could not be written.
    """
    try:
        save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, file, header)
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    with file.open("rb") as written:
        os.fsync(written.fileno())
    # safetensors gives its files to their owner alone, whatever the umask says.
    file.chmod(file.parent.stat().st_mode & 0o666)


class TensorFiles:
    """The tensors of a checkpoint, read when they are asked for; a `parallel.state.StateSource`.

    Reading is not collective. A rank opens only files that hold something of what it asks for.

    Args:
        folder: what `write_tensors` wrote.

    Raises:
        ValueError: a file is damaged, or pieces are missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _translated(f"{folder} is damaged"):
            self._metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            volumes = [math.prod(chunk.sizes) for chunk in entry.chunks]
            negative = any(offset < 0 for chunk in entry.chunks for offset in chunk.offsets)
            if negative or sum(volumes) != math.prod(entry.size):
                raise ValueError(
                    f"{folder} is damaged: the pieces of {key} do not fill its shape {[*entry.size]}"
                )
            kind, _, name = key.partition(".")
            self._shapes.setdefault(kind, {})[name] = tuple(entry.size)

    @property
    def groups(self) -> list[str]:
        """Names of the groups of tensors."""
        return sorted(self._shapes)

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of a group's tensors; empty if there is no such group."""
        return dict(self._shapes.get(group, {}))

    def fill(self, group: str, into: Mapping[str, Tensor]) -> None:
        """Copy saved values into tensors of the same names, in place; a shard receives its part of the whole.

        Raises:
            ValueError: a tensor is not saved or has another shape; a file is damaged.
        """
        shapes = self.shapes(group)
        for name, tensor in into.items():
            if name not in shapes:
                raise ValueError(f"{self._folder} has no tensor {name} ({group})")
            if shapes[name] != tuple(tensor.shape):
                raise ValueError(
                    f"{self._folder} has {name} ({group}) {shapes[name]} instead of {tuple(tensor.shape)}"
                )
        wanted = {f"{group}.{name}": tensor.detach() for name, tensor in into.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _translated(f"{self._folder} is damaged"):
            load(
                wanted,
                storage_reader=_TensorReader(self._folder, self._metadata),
                planner=planner,
                no_dist=True,
            )

    def tensor(self, group: str, name: str) -> Tensor:
        """One whole tensor, on the CPU.

        Raises:
            ValueError: it is not saved, or a file is damaged.
        """
        entry = self._metadata.state_dict_metadata.get(f"{group}.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{self._folder} has no tensor {name} ({group})")
        found = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.fill(group, {name: found})
        return found

    def whole(self, group: str) -> dict[str, Tensor]:
        """All whole tensors of a group, on the CPU; empty if there is no such group."""
        return {name: self.tensor(group, name) for name in self.shapes(group)}


class _TensorReader(HuggingFaceStorageReader):
    """A reader that knows the headers of all files already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(str(folder))
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


@contextmanager
def _translated(problem: str) -> Iterator[None]:
    """Turn errors of DCP, which are no `Exception`s, and of safetensors into ValueErrors; silence its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = (f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
        raise ValueError(f"{problem}: {'; '.join(causes)}") from error
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{problem}: {error}") from error
