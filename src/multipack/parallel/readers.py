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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from multipack.data.batch import PackedBatch
from multipack.data.loader import Item, PackedLoader
from multipack.data.sampler import PackedBatchSampler
from multipack.parallel.mesh import Mesh


def opens_tokens(mesh: Mesh, readers: int) -> bool:
    """Whether this rank reads the tokens of training documents from storage; see `check_readers`."""
    return not readers or (mesh.is_replica_leader and _reader_of(mesh, readers) == mesh.data_rank)


def _reader_of(mesh: Mesh, readers: int) -> int:
    """The data-parallel rank that reads for this one: each serves ⌈size / readers⌉ neighbors, itself the first."""
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

    Args:
        documents: indexed by the sampler's numbers.
        sampler: the plan, dealt to this rank.
        collator: makes a batch of documents.
        mesh: the ranks.
        readers: data-parallel ranks that read; 0 = every rank reads its own packs.
        prefetch: batches made ahead.
    """
    if not readers or mesh.world.size == 1:
        return PackedLoader(documents, sampler, collator, prefetch)
    return ScatteredLoader(documents, sampler, collator, prefetch, mesh, readers)


class ScatteredLoader(PackedLoader):
    """A loader whose packs come from a reader rank; arguments are those of `open_loader`.

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
        # Only its members make a group: under nccl, torch would involve the other ranks in collectives.
        self._group = dist.new_group(
            list(self.data_ranks),
            timeout=timedelta(seconds=mesh.world.timeout_seconds),
            backend="gloo",
            use_local_synchronization=True,
        )

    def _items(self) -> Iterator[Item]:
        micro_batches = self.sampler.micro_batches
        for _ in self.sampler:
            state = self.sampler.state_dict()
            yield self._round(state["step"] * micro_batches + state["micro_batch"] - 1), state

    def _round(self, pack: int) -> PackedBatch:
        """Micro-batch number `pack` of this rank in the epoch; a reader makes those of all its ranks."""
        packs = list(self._read(pack)) if self._rank == self.reader else None
        received: list[Any] = [None]
        try:
            dist.scatter_object_list(received, packs, src=self.reader, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.reader} reads for rank {self._rank}, and pack {pack} did not arrive: look for an error"
                f" on ranks {', '.join(map(str, self.data_ranks))} ({error})"
            ) from error
        if isinstance(received[0], Exception):
            raise received[0]
        return received[0]  # type: ignore[no-any-return]

    def _read(self, pack: int) -> Sequence[PackedBatch | Exception]:
        """A batch for each rank that this reader serves; in place of batches the error that prevents them."""
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
