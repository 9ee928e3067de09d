"""A loader of one rank's packs that Trainer prepares, by accelerate, which would divide the packs again."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from multipack.data.sampler import PackedBatchSampler

LENGTHS = np.random.default_rng(0).integers(10, 200, 199)


def numbers(loader):
    """Numbers of the documents that a rank reads, or the error."""
    try:
        return [number for batch in loader for number in batch.tolist()]
    except ValueError as error:
        return str(error)


def case_trainer(world, folder):
    """What this rank reads from its loader as it is, and as prepared."""
    from transformers import Trainer, TrainingArguments

    sampler = PackedBatchSampler(LENGTHS, capacity=512, packs_per_step=4, rank=world.rank, world_size=2)
    loader = DataLoader(torch.arange(len(LENGTHS)), batch_sampler=sampler)
    trainer = Trainer(torch.nn.Linear(1, 1), TrainingArguments(folder, use_cpu=True, report_to=[]))
    return numbers(loader), numbers(trainer.accelerator.prepare(loader))


def test_packs_are_not_divided_again(pools, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    found = pools(2).run(case_trainer, str(tmp_path))
    assert sorted(number for own, _ in found for number in own) == list(range(len(LENGTHS)))
    for _, prepared in found:
        assert "divides them among the ranks again" in prepared
