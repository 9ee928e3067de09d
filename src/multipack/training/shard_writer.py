"""Tensors written as files: whole ones by one rank, divided ones by every rank what it holds.

    rank 0 ─▶ model/shard-00001.safetensors  rows 0–2 ┐
    rank 1 ─▶ model/shard-00002.safetensors  rows 3–5 ┤ rank 0 ─▶ model/index.json
    rank 2 ─▶ model/shard-00003.safetensors  row 6    ┘

`torch.distributed.checkpoint` arranges it: what several ranks hold alike one of them writes, and boxes that overlap or
leave a gap are refused. Its own file writers keep their table in a pickle, or none at all: here it is JSON, and shards
are safetensors with the marks that its HuggingFaceStorageReader knows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from multipack.atomic import sync_folder
from multipack.parallel.state import local
from multipack.training.sharded import INDEX, MARKS, Box, box_of


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor.

    Attributes:
        shape: of the whole tensor.
        box: what is held of it.
        values: of the box.
    """

    shape: tuple[int, ...]
    box: Box
    values: Tensor


@torch.no_grad()
def parts_of(tensors: Mapping[str, Tensor], copy: bool) -> dict[str, Part]:
    """What this rank holds of each tensor, without those of which it holds nothing.

    Args:
        tensors: by name.
        copy: into memory of the CPU, so that the tensors may change meanwhile.
    """
    parts = {}
    for name, tensor in tensors.items():
        values = local(tensor).detach()
        if values.numel() or not tensor.numel():
            kept = values.to("cpu", copy=True) if copy else values
            parts[name] = Part(tuple(tensor.shape), box_of(tensor), kept)
    return parts


def write_whole(file: Path, parts: Mapping[str, Part]) -> None:
    """Write whole tensors as one safetensors file, and sync it."""
    _write(file, {name: part.values for name, part in parts.items()}, {"format": "pt"})


def write_pieces(folder: Path, parts: Mapping[str, Part], group: ProcessGroup | None) -> list[str]:
    """Write a group's tensors, each rank what it holds. Collective.

    Args:
        folder: where; it is there already, and the same for all ranks.
        parts: of this rank.
        group: all ranks; None = the default group.

    Returns:
        On rank 0 the names of the files that were written, by whichever rank.

    Raises:
        ValueError: on all ranks: one of them could not write, or the pieces do not make whole tensors.
    """
    writer = _Writer(folder)
    try:
        save(dict(parts), storage_writer=writer, planner=_Planner(), process_group=group)
    except CheckpointException as error:  # which is no Exception
        told = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
        raise ValueError(f"{folder} was not written: {told}") from error
    return writer.written


class _Planner(DefaultSavePlanner):
    """Plans to write `Part`s, which need not live on the device of their mesh."""

    state_dict: dict[str, Part]

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, part) for name, part in self.state_dict.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state_dict[write_item.index.fqn].values


def _item(name: str, part: Part) -> WriteItem:
    offsets, sizes = torch.Size(part.box.offsets), torch.Size(part.box.sizes)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, sizes),
        properties=TensorProperties.create_from_tensor(part.values),
        size=torch.Size(part.shape),
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


class _Writer(StorageWriter):
    """One safetensors file a rank, and the table of all of them as JSON."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.written: list[str] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = (f"shard-{number:05d}.safetensors" for number in range(1, len(plans) + 1))
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        tensors, offsets, results = {}, {}, []
        for item in plan.items:
            values, name = planner.resolve_data(item), item.index.fqn
            assert isinstance(values, Tensor)
            assert item.index.offset is not None
            tensors[name], offsets[name] = values, {"saved_offsets": list(item.index.offset)}
            results.append(WriteResult(item.index, values.nbytes, plan.storage_data))
        if tensors:
            marks = {"format": "pt", "DCP_VERSION": "1.0", MARKS: json.dumps(offsets)}
            _write(self._folder / plan.storage_data, tensors, marks)
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {
            (result.index.fqn, result.index.offset): result.storage_data
            for rank in results
            for result in rank
        }
        table = {
            name: {
                "shape": list(tensor.size),
                "pieces": [
                    [files[name, chunk.offsets], list(chunk.offsets), list(chunk.sizes)]
                    for chunk in tensor.chunks
                ],
            }
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        with (self._folder / INDEX).open("w", encoding="utf-8") as file:
            json.dump({"tensors": table}, file)
            file.flush()
            os.fsync(file.fileno())
        self.written = [*sorted(set(files.values())), INDEX]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _write(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        save_file({name: values.cpu().contiguous() for name, values in tensors.items()}, file, metadata)
    except SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error
    with file.open("rb") as written:
        os.fsync(written.fileno())
    sync_folder(file.parent)
