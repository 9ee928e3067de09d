"""Axolotl's sampler beside Axolotl: no more bins, and no document lost where the host divides batches among ranks."""

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from multipack.integrations import axolotl_sampler
from multipack.integrations.axolotl import MultipackBatchSampler, pack_group, pack_parallel
from multipack.planning.packing import pack


def lognormal(count, longest=2048):
    return np.random.default_rng(0).lognormal(5.5, 1.0, count).clip(1, longest).astype(np.int64)


def shuffled(lengths):
    return RandomSampler(lengths, generator=torch.Generator().manual_seed(0))


def documents_of(batches):
    return [document for batch in batches for held in batch for document in held]


class Shard:
    """What a rank gets of the batches in accelerate with drop_last: whole rounds of whole batches, in turn."""

    def __init__(self, batches, size, ranks, rank):
        whole = [batch for batch in batches if len(batch) == size]
        self.batches = whole[rank : len(whole) // ranks * ranks : ranks]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("sequential", [False, True])
def test_no_document_is_lost_between_ranks(size, sequential, monkeypatch):
    lengths = lognormal(1500)
    for ranks in (1, 2, 8, 64):
        monkeypatch.setattr(axolotl_sampler, "world_size", lambda ranks=ranks: ranks)
        sampler = MultipackBatchSampler(shuffled(lengths), size, 4096, lengths, sequential=sequential)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert len(batches) % ranks == 0
        shares = [Shard(batches, size, ranks, rank).batches for rank in range(ranks)]
        assert {len(share) for share in shares} == {len(batches) // ranks}
        seen = [document for share in shares for document in documents_of(share)]
        assert sorted([*seen, *sampler.left_out.tolist()]) == list(range(1500))
        assert ranks == 1 or sampler.left_out.size == 0


@pytest.mark.parametrize("sequential", [False, True])
def test_documents_that_fill_no_round_are_left_out(sequential, monkeypatch):
    """Ten documents of a bin each fill one round of eight batches; batches of two bins are fewer than the ranks."""
    lengths = np.full(10, 7)
    monkeypatch.setattr(axolotl_sampler, "world_size", lambda: 8)
    sampler = MultipackBatchSampler(range(10), 1, 10, lengths, sequential=sequential)
    assert len(list(sampler)) == 8
    assert sorted([*documents_of(sampler), *sampler.left_out.tolist()]) == list(range(10))
    few = MultipackBatchSampler(range(10), 2, 10, lengths, sequential=sequential)
    with pytest.raises(ValueError, match=r"on each of 8 ranks.*eval_sample_packing"):
        len(few)
    divided = DistributedSampler(range(10), num_replicas=8, rank=0)
    assert len(MultipackBatchSampler(divided, 1, 10, lengths, sequential=sequential)) == 2


def first_fit_bins(lengths, capacity, limit):
    """Bins of Axolotl's packing: in the sampler's order, each document into the first bin with room and a place."""
    rooms, sizes, first, shortest = [], [], 0, min(lengths)
    for length in lengths:
        number = first
        while number < len(rooms) and (rooms[number] < length or sizes[number] == limit):
            number += 1
        if number == len(rooms):
            rooms.append(capacity)
            sizes.append(0)
        rooms[number] -= length
        sizes[number] += 1
        while first < len(rooms) and (rooms[first] < shortest or sizes[first] == limit):
            first += 1
    return len(rooms)


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        ("natural_instructions_193k", 32_768),
        ("tinyshakespeare_speeches", 8192),
        ("stdlib311_doc2src", 65_536),
        ("instructlab_sdg_24k", 32_768),
        ("gsm8k_train", 32_768),
    ],
)
def test_a_limit_of_200_documents_needs_no_more_bins_than_axolotl(name, capacity, shared_data):
    """Short documents and Axolotl's default bin_size: packing the longest first would need up to 41 % more bins."""
    lengths = np.load(shared_data / "lengths" / f"{name}.npy")
    lengths = lengths[:: 1 + len(lengths) // 50_000]
    order = np.random.default_rng(1).permutation(len(lengths))
    groups = [lengths[order[first : first + 100_000]] for first in range(0, len(order), 100_000)]
    theirs = sum(first_fit_bins(group.tolist(), capacity, 200) for group in groups)
    bound = pack(lengths, capacity, max_documents=200).lower_bound
    for own in (
        pack(lengths[order], capacity, max_documents=200),
        pack_group(lengths[order], 0, capacity, len(order), 200),
        pack_parallel(lengths[order], capacity, 100_000, 200),
    ):
        assert len(own) <= min(theirs, int(np.ceil(1.01 * bound)))
    for size, drop_last in ((1, False), (1, True), (8, False), (8, True)):
        sampler = MultipackBatchSampler(order.tolist(), size, capacity, lengths, drop_last=drop_last)
        batches = sampler.generate_batches()
        assert len(batches) <= (theirs // size if drop_last else -(-theirs // size))
        assert sum(map(len, batches)) <= max(np.ceil(1.01 * bound), -(-bound // size) * size)
        assert all(len(held) <= 200 for batch in batches for held in batch)
        assert sorted([*documents_of(batches), *sampler.left_out.tolist()]) == list(range(len(lengths)))
