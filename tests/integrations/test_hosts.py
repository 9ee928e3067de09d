"""Samplers that yield one rank's batches, inside wrappers that divide batches among ranks: refused with the fix."""

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.integrations.multipack_v2 import InterleavedSampler, MultipackDistributedBatchSampler

LENGTHS = np.random.default_rng(0).integers(10, 200, 199)


def packed(ranks):
    return PackedBatchSampler(LENGTHS, capacity=512, packs_per_step=4, rank=0, world_size=ranks)


def multipack_v2(ranks):
    return MultipackDistributedBatchSampler(512, LENGTHS, ranks, 0)


def interleaved(ranks):
    return InterleavedSampler(LENGTHS, 4, ranks, 0)


SAMPLERS = pytest.mark.parametrize("sampler", [packed, multipack_v2, interleaved])


class Numbers:
    """A data set whose documents are their numbers."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, number):
        return int(number)


class BatchSamplerShard(BatchSampler):
    """Like accelerate's: reads all batches and keeps every second one."""

    def __init__(self, batch_sampler, num_processes=2):
        self.batch_sampler, self.num_processes = batch_sampler, num_processes

    def __len__(self):
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self):
        for number, batch in enumerate(self.batch_sampler):
            if number % self.num_processes == 0:
                yield batch


class Listed:
    """Like Lightning's: a sampler as a data set."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler)

    def reset(self):
        self.batches = list(self.sampler)


class DistributedSamplerWrapper(DistributedSampler):
    """Like Lightning's: divides the positions of another sampler."""

    def __init__(self, sampler, num_replicas=2):
        super().__init__(Listed(sampler), num_replicas, 0)

    def __iter__(self):
        self.dataset.reset()
        return (self.dataset.batches[number] for number in super().__iter__())


class DataLoaderDispatcher(DataLoader):
    """Like accelerate's: reads on one rank, for all processes of its state."""

    def __init__(self, sampler, num_processes=2):
        super().__init__(Numbers(), batch_sampler=sampler, collate_fn=list)
        self.state = type("PartialState", (), {"num_processes": num_processes})()

    def __iter__(self):
        yield from super().__iter__()


def refused(read):
    with pytest.raises(
        ValueError, match=r"one of 2 ranks.*divides them among the ranks again.*do not pass"
    ) as caught:
        read()
    assert "\n" not in str(caught.value)


@SAMPLERS
def test_a_sampler_of_one_rank_is_not_divided_again(sampler):
    for wrapper in (BatchSamplerShard, DataLoaderDispatcher):
        refused(lambda wrapper=wrapper: list(wrapper(sampler(2))))
        refused(lambda wrapper=wrapper: next(iter(wrapper(sampler(2)))))
        assert len(list(wrapper(sampler(2), 1))) == len(sampler(2))
        assert len(list(wrapper(sampler(1)))) > 0
    refused(lambda: len(BatchSamplerShard(sampler(2))))
    refused(lambda: len(DistributedSamplerWrapper(sampler(2))))
    refused(lambda: list(DistributedSamplerWrapper(sampler(2))))
    inside = DataLoader(Numbers(), batch_sampler=BatchSamplerShard(sampler(2)), collate_fn=list)
    refused(lambda: list(inside))
    nested = BatchSamplerShard(
        BatchSampler(sampler(2), 1, False)
    )  # the same sampler as `sampler=` of a DataLoader
    refused(lambda: list(nested))


@SAMPLERS
def test_loaders_that_divide_nothing_read_everything(sampler):
    own = sampler(2)
    loader = DataLoader(Numbers(), batch_sampler=own, collate_fn=list)
    expected = [list(batch) for batch in own]
    assert list(loader) == expected
    assert len(loader) == len(expected)


@SAMPLERS
def test_accelerate(sampler):
    data_loader = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed")
    shard = data_loader.BatchSamplerShard(sampler(2), num_processes=2, process_index=0, even_batches=False)
    refused(lambda: list(shard))
    refused(lambda: len(shard))
    loader = DataLoader(Numbers(), batch_sampler=sampler(2), collate_fn=list)
    for processes, read in ((2, refused), (1, lambda read: read())):
        prepared = data_loader.prepare_data_loader(
            loader, num_processes=processes, process_index=0, even_batches=False, put_on_device=False
        )
        read(lambda prepared=prepared: list(prepared))


@SAMPLERS
def test_lightning(sampler):
    distributed = pytest.importorskip(
        "lightning.fabric.utilities.distributed", reason="Lightning is not installed"
    )
    wrapper = distributed.DistributedSamplerWrapper(range(2), num_replicas=2, rank=0)
    refused(lambda: list(type(wrapper)(sampler(2), num_replicas=2, rank=0)))
