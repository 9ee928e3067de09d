"""Data-loading ranks: a few ranks open the tokens and scatter packs to all others.

    data.readers=2, 8 data-parallel ranks        storage ─▶ rank 0 ─▶ ranks 0 1 2 3
                                                 storage ─▶ rank 4 ─▶ ranks 4 5 6 7

Every rank computes the plan; only readers read tokens from storage. In a round, a reader collates one pack for each of
its ranks and scatters them. The ranks of a model replica (tensor, context, pipeline) share a reader and get the same
pack.

Rounds run ahead of training in a thread, in a separate gloo group. Requesting pack k starts rounds up to k + prefetch.
Ranks that end an iteration after the same number of packs, as in training, have therefore started the same number of
rounds, and finish them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from multipack.data.packs.batch import PackedBatch, PackedTree
from multipack.data.packs.collate import PreferenceBatch
from multipack.data.packs.loader import Item, PackedLoader
from multipack.data.packs.sampler import PackedBatchSampler
from multipack.parallel.collectives import scatter_bytes
from multipack.parallel.mesh import Mesh

FIELDS = "fields"
"""Name of the tensor of bytes that holds all other values of a batch, as JSON."""


def opens_tokens(mesh: Mesh, readers: int) -> bool:
    """Whether this rank reads the tokens of training documents from storage."""
    return not readers or (mesh.is_replica_leader and _reader_of(mesh, readers) == mesh.data_rank)


def _reader_of(mesh: Mesh, readers: int) -> int:
    """The data-parallel rank that reads for this one: the first of ⌈size / readers⌉ neighbors."""
    served = -(-mesh.data_size // readers)
    return mesh.data_rank // served * served


def open_loader(
    documents: Any,
    sampler: PackedBatchSampler,
    collator: Callable[[Sequence[Any]], PackedBatch],
    mesh: Mesh,
    *,
    readers: int = 0,
    prefetch: int = 2,
) -> PackedLoader:
    """The loader of a rank: of its own documents, or of packs that a reader scatters; collective over all ranks.

    `readers` are data-parallel ranks; 0 = every rank reads its own packs. `prefetch` batches are made ahead.
    """
    if not readers or mesh.world.size == 1:
        return PackedLoader(documents, sampler, collator, prefetch)
    return ScatteredLoader(documents, sampler, collator, prefetch, mesh, readers)


class ScatteredLoader(PackedLoader):
    """A loader whose packs come from a reader rank.

    If a reader fails, the iteration ends on all its ranks with the reader's message.

    Attributes:
        reader: the rank that reads for this one: the replica leader of the first data-parallel rank.
        data_ranks: data-parallel rank of each rank that this reader serves, by rank.
    """

    def __init__(
        self,
        documents: Any,
        sampler: PackedBatchSampler,
        collator: Callable[[Sequence[Any]], PackedBatch],
        prefetch: int,
        mesh: Mesh,
        readers: int,
    ) -> None:
        super().__init__(documents, sampler, collator, prefetch)
        self._rank = mesh.world.rank
        meshes = [replace(mesh, world=replace(mesh.world, rank=rank)) for rank in range(mesh.world.size)]
        served = [each for each in meshes if _reader_of(each, readers) == _reader_of(mesh, readers)]
        self.data_ranks = {each.world.rank: each.data_rank for each in served}
        self.reader = min(self.data_ranks)
        self._group = mesh.world.cpu_group(list(self.data_ranks))

    def _items(self) -> Iterator[Item]:
        for _ in self.sampler:
            _, step, micro_batch = position = self.sampler.position  # after this pack
            yield self._round(step * self.sampler.micro_batches + micro_batch - 1), position

    def _round(self, pack: int) -> PackedBatch:
        """Micro-batch number `pack` of this rank in the epoch; a reader makes it for all its ranks."""
        packs = [_to_bytes(each) for each in self._read(pack)] if self._rank == self.reader else None
        try:
            received = scatter_bytes(packs, self.reader, self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.reader} reads for rank {self._rank}, and pack {pack} did not arrive: look for an error"
                f" on ranks {', '.join(map(str, self.data_ranks))} ({error})"
            ) from error
        return _from_bytes(received)

    def _read(self, pack: int) -> Sequence[PackedBatch | Exception]:
        """A batch, or the error that prevents it, for each rank that this reader serves."""
        step, micro_batch = divmod(pack, self.sampler.micro_batches)
        numbers: list[int] = []
        try:
            dealt, made = self.sampler.deal_of(step), dict[int, PackedBatch]()
            for data_rank in sorted(set(self.data_ranks.values())):
                numbers = dealt[micro_batch * self.sampler.world_size + data_rank].tolist()
                made[data_rank] = self._collator([self.documents[number] for number in numbers])
        except Exception as error:
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            documents = ", ".join(map(str, numbers[:32]))
            message = f"rank {self.reader}, which reads: {error} (in a batch of the documents {documents})"
            return [kind(message)] * len(self.data_ranks)
        return [made[data_rank] for data_rank in self.data_ranks.values()]


def _to_bytes(packed: PackedBatch | Exception) -> bytes:
    """A batch in the format of safetensors: its tensors, and `FIELDS` with all other values; of an error only these."""
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if isinstance(packed, Exception):
        values["error"] = [isinstance(packed, ValueError), str(packed)]
    else:
        found = dict(vars(packed))
        if packed.tree is not None:
            found |= {f"tree.{name}": value for name, value in vars(found.pop("tree")).items()}
        for name, value in found.items():
            group = tensors if isinstance(value, Tensor) else values
            group[name] = value.clone() if isinstance(value, Tensor) else value
    text = bytearray(json.dumps(values).encode())
    return save(tensors | {FIELDS: torch.frombuffer(text, dtype=torch.uint8)})


def _from_bytes(content: Tensor) -> PackedBatch:
    """The batch of `_to_bytes`; raises the error, if it is one."""
    tensors = load(content.numpy().tobytes())
    values = json.loads(tensors.pop(FIELDS).numpy().tobytes())
    if "error" in values:
        is_value_error, message = values["error"]
        raise (ValueError if is_value_error else RuntimeError)(message)
    fields: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    for name, value in (values | tensors).items():
        group = tree if name.startswith("tree.") else fields
        group[name.removeprefix("tree.")] = tuple(value) if isinstance(value, list) else value
    if tree:
        fields["tree"] = PackedTree(**tree)
    return (PreferenceBatch if "item_weights" in fields else PackedBatch)(**fields)
