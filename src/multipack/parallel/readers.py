"""Reader ranks: a few ranks open the tokens and scatter packs to all others.

    data.readers=2, 8 data-parallel ranks        storage ─▶ rank 0 ─▶ ranks 0 1 2 3
                                                 storage ─▶ rank 4 ─▶ ranks 4 5 6 7

Every rank plans alone, as ever, and knows which pack comes next; only readers ask storage for tokens. A reader collates
the packs of all its ranks, a round (one pack each) at a time, and sends each rank's as one flat tensor. Ranks that hold
one model together (tensor, context, pipeline) share a reader and get the same packs.

All of it happens ahead, in a thread, over a process group of its own, so that it never interleaves with training's
collectives. How far ahead is no matter of chance: when a rank asks for pack k, rounds up to k + prefetch are begun, on
every rank alike. So when all ranks end an iteration after equally many packs, as training does, they have begun equally
many rounds; these are finished, and no rank waits for one that has left.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.data.loader import Indexed, Item, PackedLoader, Sampler
from multipack.data.preference import PreferenceBatch
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import check_readers
from multipack.planning.packing import Packs

_KINDS: dict[str, type[PackedBatch]] = {"PackedBatch": PackedBatch, "PreferenceBatch": PreferenceBatch}
_DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float32, torch.float64)}
_ALIGN = 8
"""Bytes that every tensor of a flat one begins at a multiple of."""
_BATCH, _FAILED = 0, 1
"""What a message is: a pack, or why there is none."""
_BY_NAME: dict[str, type[Exception]] = {"ValueError": ValueError}
"""Errors of a reader that stay what they are on the ranks that it reads for; others are a RuntimeError there."""


class DealtSampler(Sampler, Protocol):
    """A sampler which knows all ranks' packs, such as `PackedBatchSampler`."""

    world_size: int
    """Data-parallel ranks."""
    rank: int
    """Which of them this rank belongs to."""
    micro_batches: int
    """Packs of a rank in a step."""

    def deal_of(self, step: int) -> Packs:
        """A step's packs: number m · world_size + r is rank r's micro-batch m."""
        ...


@dataclass(frozen=True)
class Readers:
    """Who reads for whom, seen from one rank, and the way between them.

    Attributes:
        rank: this rank, numbered as in the whole run.
        reader: the rank that reads for this one.
        data_ranks: data-parallel rank of each rank that this reader reads for, by rank, the reader's own too.
        group: the process group of these ranks; None = this rank is alone.
    """

    rank: int
    reader: int
    data_ranks: dict[int, int]
    group: dist.ProcessGroup | None

    @property
    def reads(self) -> bool:
        """Whether this rank opens tokens."""
        return self.rank == self.reader

    @property
    def others(self) -> list[int]:
        """The ranks that this one reads for, itself not among them."""
        return [rank for rank in self.data_ranks if rank != self.rank] if self.reads else []


def opens_tokens(mesh: Mesh, readers: int) -> bool:
    """Whether this rank asks storage for the tokens that are trained on.

    Raises:
        ValueError: more readers than data-parallel ranks.
    """
    check_readers(readers, mesh.data_size)
    if not readers:
        return True
    return mesh.is_replica_leader and _reader_of(mesh.data_rank, mesh.data_size, readers) == mesh.data_rank


def _reader_of(data_rank: int, data_size: int, readers: int) -> int:
    """The data-parallel rank that reads for another: each serves ⌈size / readers⌉ neighbors, itself the first."""
    served = -(-data_size // readers)
    return data_rank // served * served


def join_readers(mesh: Mesh, readers: int, timeout_seconds: float = 600.0) -> Readers:
    """Make the groups of readers and the ranks that they read for; collective over all ranks of the run.

    Each loader needs a group of its own, as training and validation read at the same time. Where ⌈size / readers⌉
    leaves nobody for the last readers, there are fewer. With as many readers as data-parallel ranks, one rank of those
    that hold a model together reads for the others.

    Args:
        mesh: how the ranks are arranged.
        readers: data-parallel ranks that read, at least 1.
        timeout_seconds: how long a pack may wait for its reader, or for the rank that it is for.

    Raises:
        ValueError: no readers, or more than data-parallel ranks.
    """
    if readers < 1:
        raise ValueError(f"data.readers={readers}: without readers every rank reads its own packs")
    check_readers(readers, mesh.data_size)
    served: dict[
        int, dict[int, int]
    ] = {}  # by data-parallel rank that reads: ranks, and their data-parallel ranks
    reader: dict[int, int] = {}
    for rank in range(mesh.world.size):
        there = replace(mesh, world=replace(mesh.world, rank=rank))
        first = _reader_of(there.data_rank, mesh.data_size, readers)
        served.setdefault(first, {})[rank] = there.data_rank
        if opens_tokens(there, readers):
            reader[first] = rank
    groups = {}
    for first, members in served.items():  # every rank takes part in making every group
        timeout = timedelta(seconds=timeout_seconds)
        alone = len(members) == 1
        groups[first] = None if alone else dist.new_group(list(members), timeout=timeout, backend="gloo")
    own = _reader_of(mesh.data_rank, mesh.data_size, readers)
    return Readers(mesh.world.rank, reader[own], served[own], groups[own])


def open_loader(
    documents: Indexed,
    sampler: DealtSampler,
    collator: Callable[[Sequence[Any]], PackedBatch],
    mesh: Mesh,
    *,
    readers: int = 0,
    prefetch: int = 2,
    timeout_seconds: float = 600.0,
) -> PackedLoader:
    """The loader of a rank: of its own documents, or of packs that a reader sends; collective over all ranks.

    Args:
        documents: what the sampler's numbers mean.
        sampler: the plan, dealt to this rank.
        collator: makes a batch of documents.
        mesh: how the ranks are arranged.
        readers: data-parallel ranks that read; 0 = every rank reads its own.
        prefetch: batches made ahead.
        timeout_seconds: how long a pack may wait for its reader.

    Raises:
        ValueError: more readers than data-parallel ranks.
    """
    if not readers:
        return PackedLoader(documents, sampler, collator, prefetch)
    way = join_readers(mesh, readers, timeout_seconds)
    return ScatteredLoader(documents, sampler, collator, way, prefetch)


class ScatteredLoader(PackedLoader):
    """A `PackedLoader` whose packs come from a reader rank; on a reader, one that also serves the others.

    All ranks of the group must take equally many batches before they end an iteration, as training does: every rank
    has as many micro-batches in a step. An error while a reader makes a round ends the iteration on all its ranks,
    with the reader's message.

    Args:
        documents: what the sampler's numbers mean; looked at by readers alone.
        sampler: the plan, dealt to this rank; the same plan on all ranks.
        collator: makes a batch of documents, on readers.
        readers: who reads for whom; not shared with another loader.
        prefetch: rounds made ahead; 0 = each is made when it is asked for.

    Attributes:
        rounds: rounds that were begun since this loader was made: equally many on all ranks whenever these have taken
            equally many batches.
        bytes_sent: bytes that were sent to other ranks.
    """

    def __init__(
        self,
        documents: Indexed,
        sampler: DealtSampler,
        collator: Callable[[Sequence[Any]], PackedBatch],
        readers: Readers,
        prefetch: int = 2,
    ) -> None:
        super().__init__(documents, sampler, collator, prefetch)
        self.readers = readers
        self.rounds = self.bytes_sent = 0
        self._dealt = sampler
        self._iterations = 0

    def _items(self) -> Iterator[Item]:
        self._iterations += 1
        return self._rounds(self._iterations)

    def _ahead(self, items: Iterator[Item]) -> _Ordered:
        return _Ordered(items, self._prefetch)

    def _rounds(self, iteration: int) -> Iterator[Item]:
        exchange = self._serve if self.readers.reads else self._receive
        for _ in self._dealt:
            state = self._dealt.state_dict()
            micro_batches = self._dealt.micro_batches
            place = state["step"] * micro_batches + state["micro_batch"] - 1
            self.rounds += 1
            yield exchange((iteration, place), *divmod(place, micro_batches)), state

    def _serve(self, number: tuple[int, int], step: int, micro_batch: int) -> PackedBatch:
        """Make a round and send each rank's pack; nobody gets one before all are made."""
        try:
            packs = self._dealt.deal_of(step)
            made = {
                data_rank: self._collate(packs[micro_batch * self._dealt.world_size + data_rank].tolist())
                for data_rank in sorted({self._dealt.rank, *self.readers.data_ranks.values()})
            }
        except Exception as error:
            reason = _flat(json.dumps([type(error).__name__, _message(error)]).encode())
            self._send(number, _FAILED, dict.fromkeys(self.readers.others, reason))
            raise
        wanted = {self.readers.data_ranks[rank] for rank in self.readers.others}
        flat = {data_rank: encode_batch(made[data_rank]) for data_rank in wanted}
        self._send(
            number, _BATCH, {rank: flat[self.readers.data_ranks[rank]] for rank in self.readers.others}
        )
        return made[self._dealt.rank]

    def _collate(self, numbers: list[int]) -> PackedBatch:
        try:
            return self._collator([self.documents[number] for number in numbers])
        except Exception as error:
            error.add_note(f"while making a batch of the documents {', '.join(map(str, numbers[:32]))}")
            raise

    def _send(self, number: tuple[int, int], kind: int, contents: dict[int, Tensor]) -> None:
        """Send each rank its message: a header of fixed size, which says how large the content is, and the content."""
        group, under_way = self.readers.group, list[tuple[int, Any]]()
        for rank, content in contents.items():
            header = torch.tensor([*number, kind, content.numel()])
            with _blaming(rank, "did not take", number):
                under_way += [(rank, dist.isend(message, rank, group)) for message in (header, content)]
            self.bytes_sent += content.numel()
        for rank, work in under_way:
            with _blaming(rank, "did not take", number):
                work.wait()

    def _receive(self, number: tuple[int, int], step: int, micro_batch: int) -> PackedBatch:
        """The pack of this rank in a round."""
        reader, header = self.readers.reader, torch.empty(4, dtype=torch.int64)
        with _blaming(reader, "reads for this rank and did not send", number):
            dist.recv(header, reader, self.readers.group)
            *came, kind, size = header.tolist()
            content = torch.empty(size, dtype=torch.uint8)
            dist.recv(content, reader, self.readers.group)
        if came != list(number):
            raise RuntimeError(
                f"rank {reader} sent pack {came[1]} of iteration {came[0]}, and rank {self.readers.rank} is at pack"
                f" {number[1]} of iteration {number[0]}: all ranks must take as many packs before they end an iteration"
            )
        if kind == _FAILED:
            name, message = json.loads(content.numpy().tobytes())
            told = message if name in _BY_NAME else f"{name}: {message}"
            raise _BY_NAME.get(name, RuntimeError)(
                f"rank {reader}, which reads for rank {self.readers.rank}: {told}"
            )
        return decode_batch(content)


@contextmanager
def _blaming(rank: int, deed: str, number: tuple[int, int]) -> Iterator[None]:
    """Errors of the process group name the rank that is missing."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} {deed} pack {number[1]}: look for an error there ({error})"
        ) from error


class _Ordered:
    """Makes items in a thread, each after it was ordered: as many as were asked for, and `size` more.

    A thread that works until a queue is full is as far as it happens to be; this one is equally far on all ranks.
    """

    def __init__(self, items: Iterator[Item], size: int) -> None:
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self._size = size
        self._thread = threading.Thread(
            target=self._run, args=(items,), name="multipack-readers", daemon=True
        )
        self._thread.start()

    def _run(self, items: Iterator[Item]) -> None:
        while self._orders.get():
            try:
                self._made.put(next(items, None))
            except BaseException as error:  # whatever it is, it is raised where the batch was wanted
                self._made.put(error)  # and the iterator has nothing more

    def items(self) -> Iterator[Item]:
        """What the thread made, in order; an exception in it is raised here."""
        for _ in range(self._size):
            self._orders.put(True)
        while True:
            self._orders.put(True)
            item = self._made.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        """Finish what was ordered, which other ranks count on, and end the thread."""
        self._orders.put(False)
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()


def encode_batch(batch: PackedBatch) -> Tensor:
    """A batch as one flat uint8 tensor: the length of a description, the description (JSON), then every tensor.

    Raises:
        TypeError: a batch of an unknown kind.
    """
    kind = type(batch).__name__
    if _KINDS.get(kind) is not type(batch):
        raise TypeError(f"batches of type {kind} cannot be sent: there are {', '.join(_KINDS)}")
    values, tensors = dict[str, Any](), list[Tensor]()
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            tensors.append(value)
            value = {"dtype": str(value.dtype), "shape": list(value.shape)}
        values[field.name] = value
    described = _flat(json.dumps({"kind": kind, "values": values}).encode())
    parts = [torch.tensor([described.numel()]).view(torch.uint8), described]
    parts += [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([piece for part in parts for piece in (part, _filler(part.numel()))])


def decode_batch(content: Tensor) -> PackedBatch:
    """The batch that `encode_batch` made flat; its tensors share the memory of `content`."""
    size = int(content[:_ALIGN].view(torch.int64))
    described = json.loads(content[_ALIGN : _ALIGN + size].numpy().tobytes())
    values, at = described["values"], _ALIGN + size + len(_filler(size))
    for name, value in values.items():
        if isinstance(value, dict):
            dtype = _DTYPES[value["dtype"]]
            size = torch.Size(value["shape"]).numel() * dtype.itemsize
            values[name] = content[at : at + size].view(dtype).view(value["shape"])
            at += size + len(_filler(size))
        elif isinstance(value, list):
            values[name] = tuple(value)
    return _KINDS[described["kind"]](**values)


def _flat(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _filler(size: int) -> Tensor:
    return torch.zeros(-size % _ALIGN, dtype=torch.uint8)


def _message(error: BaseException) -> str:
    return "; ".join([str(error), *getattr(error, "__notes__", ())])
