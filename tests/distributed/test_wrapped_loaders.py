"""A loader of one rank's packs that accelerate prepares, as for Trainer, which would divide the packs again."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from multipack.data.packs.sampler import PackedBatchSampler

LENGTHS = np.random.default_rng(0).integers(10, 200, 199)


def numbers(loader):
    """Numbers of the documents that a rank reads, or the error."""
    try:
        return [number for batch in loader for number in batch.tolist()]
    except ValueError as error:
        return str(error)


def case_prepared(world):
    """What this rank reads from its loader as it is, and as prepared."""
    from accelerate import Accelerator

    sampler = PackedBatchSampler(LENGTHS, capacity=512, packs_per_step=4, rank=world.rank, world_size=2)
    loader = DataLoader(torch.arange(len(LENGTHS)), batch_sampler=sampler)
    return numbers(loader), numbers(Accelerator(cpu=True).prepare(loader))


def test_packs_are_not_divided_again(pools):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    found = pools(2).run(case_prepared)
    assert sorted(number for own, _ in found for number in own) == list(range(len(LENGTHS)))
    for _, prepared in found:
        assert "divides them among the ranks again" in prepared
