"""Tensors of a checkpoint as safetensors files: ranks divide them, each writes its part, and any mesh reads them.

    saved by four ranks                read by two
    weights-00001.safetensors  rows 0-2 ┐
    weights-00002.safetensors  rows 3-5 ┴─▶ rank 0: rows 0-5
    weights-00003.safetensors  rows 6-8 ┐
    weights-00004.safetensors  row  9   ┴─▶ rank 1: rows 6-9

The files have the layout of `torch.distributed.checkpoint` (DCP) with safetensors storage, and DCP reads them: the
header of a file gives the offsets of its pieces, so that no other index is needed. Tensors are named "<group>.<name>",
such as "model.head.weight" and "optimizer.head.weight.exp_avg".

DCP does not write them: its ranks agree on who writes what only after every rank has copied all that it holds. Here
ranks first exchange which pieces they hold, so that a checkpoint in the background copies each piece once.
"""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from multipack.atomic import with_advice
from multipack.checksums import BLOCK, HASHERS, digest_of, joined_checksum
from multipack.parallel.state import State, local, local_range
from multipack.parallel.world import World

_OFFSETS = "DCP_SHARDING_INFO"
"""Entry of a file's header with the offsets of its pieces, as `HuggingFaceStorageReader` reads it."""
_KINDS = {dtype: name for name, dtype in _TYPES.items()}
"""dtype → its name in safetensors files."""

Pieces = dict[str, tuple[Tensor, list[int]]]
"""Name of a tensor → the values of a part of it, and the index of the part's first element in the whole tensor."""


def divide(tensors: State, world: World) -> Pieces:
    """The pieces of tensors that this rank writes; collective.

    A piece that several ranks hold goes to the one with the fewest bytes so far.

    Args:
        tensors: this rank's tensors by group and name; a `DTensor` is a shard.
        world: all ranks.

    Raises:
        ValueError: on all ranks, if the pieces of a tensor overlap or leave a gap.
    """
    held = Pieces()
    entries: list[tuple[str, list[int], int, int, int]] = []
    for group, named in tensors.items():
        for name, tensor in named.items():
            values, offsets = local(tensor.detach()), [each.start for each in local_range(tensor)]
            # If there are fewer rows than ranks, some ranks hold none.
            if values.numel() or not tensor.numel():
                held[f"{group}.{name}"] = (values, offsets)
                entries.append((f"{group}.{name}", offsets, values.numel(), values.nbytes, tensor.numel()))
    missing: dict[str, int] = {}
    holders: dict[tuple[str, str, int], list[int]] = {}
    for rank, text in enumerate(world.gather(json.dumps(entries))):
        for name, offsets, elements, size, total in json.loads(text):
            ranks = holders.setdefault((name, str(offsets), size), [])
            if not ranks:
                missing[name] = missing.get(name, total) - elements
            ranks.append(rank)
    if wrong := [name for name, elements in missing.items() if elements]:
        raise ValueError(
            f"the ranks' pieces of {wrong[0]} overlap or leave a gap ({len(wrong)} tensors in all)"
        )
    bytes_of, own = [0] * world.size, Pieces()
    for (name, _, size), ranks in holders.items():
        writer = min(ranks, key=bytes_of.__getitem__)
        bytes_of[writer] += size
        if writer == world.rank:
            own[name] = held[name]
    return own


def write_pieces(file: Path, pieces: Pieces) -> str:
    """Write pieces of one rank as a file, whose folder is created; returns its checksum.

    Raises:
        OSError: it could not be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    header = {name: {"saved_offsets": offsets} for name, (_, offsets) in pieces.items()}
    tensors = {name: values for name, (values, _) in pieces.items()}
    return save_safetensors(file, tensors, {"format": "pt", _OFFSETS: json.dumps(header)})


def save_safetensors(file: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> str:
    """Write tensors as a safetensors file that is on disk afterwards.

    The library's own writer needs all tensors in host memory, twice. Here each is copied to the host when it is its
    turn, and hashed by other threads while it is written, so that no file is read again for its checksum.

    Returns:
        The checksum of the file, as of `checksum`.

    Raises:
        OSError: it could not be written.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps elements aligned
    entries, end = dict[str, Any](__metadata__=header), 0
    for name in names:
        kind, begin, end = tensors[name].dtype, end, end + tensors[name].nbytes
        entries[name] = {
            "dtype": _KINDS[kind],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    start: list[Any] = [struct.pack("<Q", len(head)) + head]
    digests, block, room = list[Future[bytes]](), [], BLOCK
    try:
        with ThreadPoolExecutor(HASHERS, "checksum") as threads, file.open("wb") as written:
            for content in chain(start, (_bytes(tensors[name]) for name in names)):
                for begin, end in _parts(len(content), room):
                    written.write(content[begin:end])
                    block.append(content[begin:end])
                    room -= end - begin
                    if room == 0:
                        digests.append(threads.submit(digest_of, block))
                        block, room = [], BLOCK
                        if len(digests) > 2 * HASHERS:  # tensors on the host that wait for their digest
                            digests[-2 * HASHERS].result()
            if block:
                digests.append(threads.submit(digest_of, block))
            written.flush()
            os.fsync(written.fileno())
    except OSError as error:
        raise with_advice(error, file) from error
    return joined_checksum([each.result() for each in digests])


def _parts(size: int, first: int) -> Iterator[tuple[int, int]]:
    """Divide a number of bytes at the ends of blocks; `first` bytes are left in the current one."""
    ends = [*range(first, size, BLOCK), size] if size else []
    return zip([0, *ends], ends, strict=False)


def _bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor's elements in order, as an array; copied to the host unless they are there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class TensorFiles(HuggingFaceStorageReader):
    """The tensors of a checkpoint in a folder, read on request; a `parallel.state.StateSource`.

    Reading is not collective. A rank opens only the files that hold a part of the requested tensors.

    Raises:
        SafetensorError, OSError, ValueError, LookupError, TypeError: the header of a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder, self._metadata = folder, super().read_metadata()

    def read_metadata(self) -> Metadata:
        """The headers of all files, which are read once."""
        return self._metadata

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of a group's tensors; empty if there is no such group."""
        found = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            kind, _, name = key.partition(".")
            if kind == group and isinstance(entry, TensorStorageMetadata):
                found[name] = tuple(entry.size)
        return found

    def fill(self, group: str, into: Mapping[str, Tensor]) -> None:
        """Copy saved values into tensors of the same names, in place; a shard receives its part of the whole.

        Raises:
            ValueError: a tensor is not saved or has another shape; a file is damaged.
        """
        wanted = {f"{group}.{name}": tensor.detach() for name, tensor in into.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(wanted, storage_reader=self, planner=planner, no_dist=True)
        except CheckpointException as error:  # no `Exception`
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise ValueError(f"{self._folder} cannot be read: {' '.join(causes.split())}") from error

    def tensor(self, group: str, name: str) -> Tensor:
        """One whole tensor, on the CPU.

        Raises:
            KeyError: it is not saved.
            ValueError: a file is damaged.
        """
        entry = self._metadata.state_dict_metadata[f"{group}.{name}"]
        assert isinstance(entry, TensorStorageMetadata)
        found = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.fill(group, {name: found})
        return found

    def whole(self, group: str) -> dict[str, Tensor]:
        """All whole tensors of a group, on the CPU; empty if there is no such group."""
        return {name: self.tensor(group, name) for name in self.shapes(group)}
