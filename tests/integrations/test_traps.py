"""Settings of hosts that lose or mix documents without an error elsewhere: here they do no harm, or raise with the fix.

T1  flat batches in accelerate's BatchSamplerShard: those of another size are left out     refused
T2  one rank's batches in a loader that accelerate prepares: divided twice                 refused
T3  batches that are no multiple of the ranks: the first ones are trained again            a multiple of the ranks
T4  split_batches, dispatch_batches                                                        refused
T5  use_cache: no mask of documents is made                                                in every batch; test_probe
T6  attention_mask, all ones or with the documents' numbers                                in no batch; test_probe
T7  accelerate finds no set_epoch, or a sampler that it wraps                              `sampler` is the sampler
T8  Lightning calls set_epoch of `batch_sampler.sampler` only                              the same
T9  a new loader of accelerate begins at epoch 0, whatever the sampler says                refused
T10 positions that go on from document to document, or skip inside one                     made anew; test_probe
T11 several packed rows, of which FlashAttention reads the bounds of one                   one row; test_probe
T12 a mask that replaces the windows of a model                                            a window has to be given
"""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.integrations.axolotl_sampler import MultipackBatchSampler
from multipack.integrations.collator import PackedDataCollator
from multipack.integrations.multipack_v2 import InterleavedSampler, MultipackDistributedBatchSampler

LENGTHS = np.random.default_rng(0).integers(10, 200, 61)


def packed(ranks):
    return PackedBatchSampler(LENGTHS, capacity=512, packs_per_step=4, rank=0, world_size=ranks)


def multipack_v2(ranks):
    return MultipackDistributedBatchSampler(512, LENGTHS, ranks, 0)


def interleaved(ranks):
    return InterleavedSampler(LENGTHS, 4, ranks, 0)


SAMPLERS = pytest.mark.parametrize("sampler", [packed, multipack_v2, interleaved])


@pytest.fixture
def data_loader():
    return pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed")


def prepared(data_loader, sampler, processes=1, **settings):
    """A loader as `accelerator.prepare` makes it."""
    loader = DataLoader(torch.arange(len(LENGTHS)), batch_sampler=sampler)
    return data_loader.prepare_data_loader(
        loader, num_processes=processes, process_index=0, put_on_device=False, **settings
    )


def refused(read):
    with pytest.raises(
        ValueError, match=r"one of 2 ranks.*divides them among the ranks again.*do not pass"
    ) as caught:
        read()
    assert "\n" not in str(caught.value)


@SAMPLERS
def test_t1_t2_batches_of_a_rank_are_not_divided_again(data_loader, sampler):
    for settings in ({}, {"even_batches": False}):
        refused(lambda settings=settings: list(prepared(data_loader, sampler(2), 2, **settings)))
    shard = data_loader.BatchSamplerShard
    refused(lambda: len(shard(sampler(2), num_processes=2)))
    # The same sampler as `sampler=` of a DataLoader.
    refused(lambda: list(shard(BatchSampler(sampler(2), 1, False), num_processes=2)))


@SAMPLERS
def test_t4_batches_are_not_split_or_dispatched(data_loader, sampler):
    with pytest.raises((ValueError, TypeError), match=r"split_batches|batch_size|divides them"):
        list(prepared(data_loader, sampler(2), 2, split_batches=True))
    refused(lambda: list(DataLoaderDispatcher(sampler(2))))
    assert len(list(DataLoaderDispatcher(sampler(2), 1))) == len(sampler(2))
    assert len(list(DataLoaderDispatcher(sampler(1)))) > 0


class DataLoaderDispatcher(DataLoader):
    """Like accelerate's, which needs processes: reads on one rank, for all processes of its state."""

    def __init__(self, sampler, num_processes=2):
        super().__init__(torch.arange(len(LENGTHS)), batch_sampler=sampler)
        self.state = type("PartialState", (), {"num_processes": num_processes})()

    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize("even", [True, False])
def test_t3_batches_of_all_ranks_are_a_multiple_of_them(data_loader, even):
    sampler = MultipackBatchSampler(range(len(LENGTHS)), 1, 512, LENGTHS, multiple_of=2)
    read = []
    for rank in range(2):
        shard = data_loader.BatchSamplerShard(sampler, num_processes=2, process_index=rank, even_batches=even)
        read += [number for batch in shard for held in batch for number in held]
        sampler.set_epoch(1)
        sampler.set_epoch(0)
    assert sorted(read) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("returns", ["flattened", "padded", "4d_mask"])
def test_t5_t6_t10_t11_batches_have_no_cache_and_no_fields_that_mix_documents(returns):
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "position_ids": [3, 4, 9]}]
    rows += [{"input_ids": [8, 9], "attention_mask": [1, 1], "position_ids": [100, 101]}]
    batch = PackedDataCollator(returns, window=None)(rows)
    assert batch["use_cache"] is False
    if returns == "padded":
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
        return
    assert batch["input_ids"].shape == (1, 5)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert ("attention_mask" in batch) == (returns == "4d_mask")
    assert ("cu_seq_lens_q" in batch) == (returns == "flattened")


@SAMPLERS
def test_t7_every_epoch_of_accelerate_has_its_own_order(data_loader, sampler):
    loader = prepared(data_loader, sampler(1))
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first != second
    own = sampler(1)
    own.set_epoch(1)
    assert [list(batch) for batch in own] == second


@SAMPLERS
def test_t8_lightning_sets_the_epoch(sampler):
    data = pytest.importorskip("lightning.fabric.utilities.data", reason="Lightning is not installed")
    own = sampler(2)
    data._set_sampler_epoch(DataLoader(torch.arange(len(LENGTHS)), batch_sampler=own), 3)
    assert own.epoch == 3


@SAMPLERS
def test_t9_a_loader_that_counts_epochs_does_not_go_back(data_loader, sampler):
    own = sampler(1)
    own.set_epoch(1)
    expected = [list(batch) for batch in own]
    loader = prepared(data_loader, own)
    with pytest.raises(
        ValueError, match=r"begins epoch 0, but its sampler is at epoch 1: call set_epoch\(1\)"
    ):
        list(loader)
    with pytest.raises(ValueError, match=r"call set_epoch\(1\) of the loader"):
        list(data_loader.skip_first_batches(loader, 2))
    loader.set_epoch(1)
    assert [batch.tolist() for batch in loader] == expected
    skipping = data_loader.skip_first_batches(loader, 2)
    skipping.set_epoch(1)
    own.set_epoch(1)
    assert [batch.tolist() for batch in skipping] == expected[2:]


def test_t12_a_mask_has_the_windows_of_its_model():
    with pytest.raises(
        ValueError, match=r"replaces the windows of a model: give window=windows_of\(model.config\)"
    ):
        PackedDataCollator("4d_mask")


@SAMPLERS
def test_loaders_that_divide_nothing_read_everything(sampler):
    own = sampler(2)
    loader = DataLoader(torch.arange(len(LENGTHS)), batch_sampler=own)
    assert [batch.tolist() for batch in loader] == [list(batch) for batch in own]
    assert len(loader) == len(own)


@SAMPLERS
def test_lightning_does_not_divide_again(sampler):
    distributed = pytest.importorskip(
        "lightning.fabric.utilities.distributed", reason="Lightning is not installed"
    )
    wrapper = distributed.DistributedSamplerWrapper
    refused(lambda: list(wrapper(sampler(2), num_replicas=2, rank=0)))
    refused(lambda: len(wrapper(sampler(2), num_replicas=2, rank=0)))
