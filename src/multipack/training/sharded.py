"""Saved tensors read back: from one file, or from the pieces that ranks held, by any number of ranks.

    saved by four ranks                     read by two
    model/shard-00001.safetensors  rows 0–2 ┐
    model/shard-00002.safetensors  rows 3–5 ┴─▶ rank 0: rows 0–5
    model/shard-00003.safetensors  rows 6–8 ┐
    model/shard-00004.safetensors  row 9    ┴─▶ rank 1: rows 6–9
    model/index.json               names, whole shapes, and which file holds which box of them

Reading needs no process group, and opens only files that hold something of what is asked for. What the table says is
checked before it is believed, and each file before it is read; shard_writer.py writes them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from multipack.parallel.state import local

INDEX = "index.json"
"""The table of a group in pieces."""
MARKS = "DCP_SHARDING_INFO"
"""Where a file's header says at which offsets its boxes begin, as `torch.distributed.checkpoint` names it."""


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it begins and how large it is, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box:
        """What both hold; of volume 0 where they do not meet."""
        begin = tuple(map(max, self.offsets, other.offsets))
        ends = (min(self._end(dim), other._end(dim)) for dim in range(len(begin)))
        return Box(begin, tuple(max(0, end - low) for low, end in zip(begin, ends, strict=True)))

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `within`."""
        lows = (own - other for own, other in zip(self.offsets, within.offsets, strict=True))
        return tuple(slice(low, low + size) for low, size in zip(lows, self.sizes, strict=True))

    def _end(self, dim: int) -> int:
        return self.offsets[dim] + self.sizes[dim]


@dataclass(frozen=True)
class Entry:
    """A saved tensor: its whole shape, and which file holds which box of it."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[Path, Box], ...]


Index = dict[str, Entry]
"""The saved tensors of a group by name."""


def box_of(tensor: Tensor) -> Box:
    """What this rank holds of a tensor.

    Raises:
        ValueError: a shard that is no block of the whole.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if any(placement.is_partial() for placement in tensor.placements) or sizes != local(tensor).shape:
        raise ValueError(f"a tensor of placements {tensor.placements} cannot be saved in blocks")
    return Box(tuple(offsets), tuple(sizes))


class CheckpointSource:
    """The tensors of a checkpoint, read when they are asked for; a `parallel.state.Source`.

    Args:
        path: the checkpoint's folder.
        indices: group → where its tensors are.
    """

    def __init__(self, path: Path, indices: Mapping[str, Index]) -> None:
        self.path = path
        self._indices = indices

    @property
    def groups(self) -> list[str]:
        """Names of the groups of tensors."""
        return sorted(self._indices)

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of a group's tensors; empty = there is no such group."""
        return {name: entry.shape for name, entry in self._indices.get(group, {}).items()}

    def fill(self, group: str, into: Mapping[str, Tensor]) -> None:
        """Copy saved values into tensors of these names, in place: into shards what they hold of the whole.

        Only files that hold something of it are opened. No rank waits for another.

        Raises:
            ValueError: a tensor that is not saved or has another shape; a damaged file.
        """
        read_into(self._indices.get(group, {}), into, f"checkpoint {self.path} ({group})")

    def tensor(self, group: str, name: str) -> Tensor:
        """One whole tensor, on the CPU.

        Raises:
            ValueError: it is not saved, or a file is damaged.
        """
        return read_whole(self._indices.get(group, {}), name, f"checkpoint {self.path} ({group})")

    def whole(self, group: str) -> dict[str, Tensor]:
        """All whole tensors of a group, on the CPU; empty = there is no such group."""
        return {name: self.tensor(group, name) for name in self._indices.get(group, {})}


def index_of_file(file: Path) -> Index:
    """The tensors of one safetensors file, all whole.

    Raises:
        ValueError: the file is damaged.
    """
    with _opened(file) as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return {name: Entry(shape, ((file, Box((0,) * len(shape), shape)),)) for name, shape in shapes.items()}


def index_of_pieces(folder: Path, files: Collection[str]) -> Index:
    """The tensors of a folder that `write_pieces` wrote.

    Args:
        folder: its path.
        files: names of its files.

    Raises:
        ValueError: the table is damaged, names another file, or its boxes overlap or leave a gap.
    """
    table = folder / INDEX
    try:
        found = json.loads(table.read_text(encoding="utf-8"))["tensors"]
        index = {str(name): _entry(folder, entry) for name, entry in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{table} is damaged: {error!r}; resume from an older checkpoint") from error
    for name, entry in index.items():
        strange = [file.name for file, _ in entry.pieces if file.name not in files]
        if strange:
            raise ValueError(f"{table} finds {name} in {strange[0]!r}, which is no file of this checkpoint")
        problem = _misfit(entry)
        if problem:
            raise ValueError(
                f"{table}: the pieces of {name} {problem} its shape {entry.shape}; resume from an older checkpoint"
            )
    return index


def _entry(folder: Path, found: Mapping[str, Any]) -> Entry:
    pieces = []
    for file, offsets, sizes in found["pieces"]:
        if Path(file).name != file:
            raise ValueError(f"{file!r} is not in the folder")
        pieces.append((folder / file, Box(_counts(offsets), _counts(sizes))))
    return Entry(_counts(found["shape"]), tuple(pieces))


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} are not sizes")
    return tuple(values)


def _misfit(entry: Entry) -> str:
    """What is wrong with boxes that should fill a shape, each number once; empty = nothing."""
    whole = Box((0,) * len(entry.shape), entry.shape)
    boxes = [box for _, box in entry.pieces]
    if any(len(box.sizes) != len(entry.shape) or len(box.offsets) != len(entry.shape) for box in boxes):
        return "have another number of dimensions than"
    if any(box.common(whole) != box for box in boxes):
        return "reach beyond"
    # Sorted by their first row, only those can overlap that begin before another ends.
    boxes.sort(key=lambda box: box.offsets)
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if entry.shape and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if box.common(other).volume:
                return "overlap in"
    return "" if boxes and sum(box.volume for box in boxes) == whole.volume else "do not fill"


@torch.no_grad()
def read_into(index: Index, into: Mapping[str, Tensor], where: str) -> None:
    """Copy saved values into tensors, in place: into shards what they hold of the whole.

    Args:
        index: where each tensor is saved.
        into: by name; their types and devices may differ from the saved ones'.
        where: what is read, for messages.

    Raises:
        ValueError: a tensor that is not saved, or has another shape; a damaged file.
    """
    wanted: dict[Path, list[tuple[str, Box, Box, Tensor]]] = defaultdict(list)
    for name, tensor in into.items():
        entry = index.get(name)
        if entry is None:
            raise ValueError(f"{where} has no tensor {name}")
        if entry.shape != tuple(tensor.shape):
            raise ValueError(f"{where} has {name} {entry.shape} instead of {tuple(tensor.shape)}")
        own, target = box_of(tensor), local(tensor)
        for file, box in entry.pieces:
            common = box.common(own)
            if common.volume:
                wanted[file].append((name, box, common, target[common.slices(own)]))
    for file, copies in wanted.items():
        with _opened(file) as opened:
            marks = _marks(opened, file)
            for name, box, common, target in copies:
                _check(opened, marks, file, name, box)
                whole = common == box
                target.copy_(opened.get_tensor(name) if whole else opened.get_slice(name)[common.slices(box)])


def read_whole(index: Index, name: str, where: str) -> Tensor:
    """A whole tensor, assembled from its pieces one by one.

    Raises:
        ValueError: there is none of this name, or a file is damaged.
    """
    if name not in index:
        raise ValueError(f"{where} has no tensor {name}")
    entry = index[name]
    first, box = entry.pieces[0]
    with _opened(first) as opened:
        _check(opened, _marks(opened, first), first, name, box)
        if box.sizes == entry.shape:
            tensor: Tensor = opened.get_tensor(name)
            return tensor
        dtype = opened.get_slice(name)[tuple(slice(0, 1) for _ in box.sizes)].dtype
    assembled = torch.empty(entry.shape, dtype=dtype)
    read_into(index, {name: assembled}, where)
    return assembled


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file; what is wrong with it is a ValueError that names it."""
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}; resume from an older checkpoint") from error


def _marks(opened: Any, file: Path) -> dict[str, Any]:
    """Where the boxes in a file begin, by its own account; empty for a file of whole tensors."""
    try:
        marks = json.loads((opened.metadata() or {}).get(MARKS, "{}"))
        return {name: mark["saved_offsets"] for name, mark in marks.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: its marks are {error!r}") from error


def _check(opened: Any, marks: Mapping[str, Any], file: Path, name: str, box: Box) -> None:
    """Whether a file holds the box that the table says."""
    if name not in opened.keys():  # noqa: SIM118 - no mapping
        raise ValueError(f"{file} is damaged: it lacks {name}; resume from an older checkpoint")
    sizes, offsets = opened.get_slice(name).get_shape(), marks.get(name, [0] * len(box.sizes))
    if tuple(sizes) != box.sizes or offsets != list(box.offsets):
        raise ValueError(
            f"{file} is damaged: it holds {tuple(sizes)} numbers of {name} from {offsets}, and the checkpoint's table"
            f" says {box.sizes} from {list(box.offsets)}; resume from an older checkpoint"
        )
