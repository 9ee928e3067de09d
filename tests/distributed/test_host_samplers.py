"""The samplers of other tools on two ranks, which torch.distributed gives them: all have equally many batches."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from multipack.data.packs.sampler import PackedBatchSampler
from multipack.integrations.axolotl import MultipackBatchSampler
from multipack.integrations.multipack_v2 import MultipackDistributedBatchSampler


def _report(world):
    """The batches of this rank's samplers, and what they say of them."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 600), 1, 2048).astype(np.int64)
    shards = np.array_split(np.arange(600), [200])[world.rank]  # of very different sizes
    report = {"shard": len(shards)}
    own = MultipackBatchSampler(shards.tolist(), 2, 4096, lengths)
    report["alone"] = len(own.generate_batches())
    report["iterated"] = len(list(own))  # iteration before len, on every rank
    report["len"], report["left_out"] = len(own), own.left_out.size
    report["trained"] = [number for batch in own.generate_batches() for held in batch for number in held]
    report["efficiency"], report["gathered"] = own.efficiency(), own.gather_efficiency()
    report["fewest"] = own.gather_len_batches(7.5 - world.rank)

    same = MultipackBatchSampler(SequentialSampler(lengths), 1, 4096, lengths)
    report["batches"] = [[sum(lengths[held].tolist()) for held in batch] for batch in same]
    report["squares"] = [
        int((lengths[held] ** 2).sum()) for batch in same.generate_batches() for held in batch
    ]

    if world.rank == 0:  # one rank reads for all, as Axolotl does where it packs a stream
        alone = MultipackBatchSampler(SequentialSampler(lengths), 1, 4096, lengths)
        report["read"] = [number for batch in alone for held in batch for number in held]

    few = MultipackBatchSampler([[0, 1, 2], [3]][world.rank], 2, 4096, lengths)
    with pytest.raises(ValueError, match="too few for a batch of batch_size=2"):
        len(few)

    packed = MultipackDistributedBatchSampler(4096, lengths)
    report["place"] = [packed.num_replicas, packed.rank]
    report["documents"] = [batch.tolist() for batch in packed]
    return report


@pytest.fixture(scope="module")
def reports(pools):
    return pools(2).run(_report)


def test_ranks_with_different_shards_have_equal_numbers_of_batches(reports):
    alone = [report["alone"] for report in reports]
    assert len(set(alone)) > 1
    assert {report["len"] for report in reports} == {report["iterated"] for report in reports} == {min(alone)}
    for report in reports:
        assert len(report["trained"]) + report["left_out"] == report["shard"]
    assert reports[alone.index(max(alone))]["left_out"] > 0


def test_estimates_are_the_same_on_all_ranks(reports):
    best = max(report["efficiency"] for report in reports)
    assert {report["gathered"] for report in reports} == {int(0.997 * best * 200) / 200}
    assert [report["fewest"] for report in reports] == [6, 6]


def test_batches_side_by_side_are_equal_in_cost(reports):
    """Hosts assign batch b to rank b % ranks; the same sampler on all ranks gives the same batches."""
    assert reports[0]["batches"] == reports[1]["batches"]
    squares = np.array(reports[0]["squares"])
    sides = squares[: len(squares) // 2 * 2].reshape(-1, 2)
    mixed = np.random.default_rng(0).permutation(squares)[: sides.size].reshape(-1, 2)
    assert np.ptp(sides, axis=1).mean() < np.ptp(mixed, axis=1).mean()


def test_iterating_is_no_collective(reports):
    assert sorted(reports[0]["read"]) == list(range(600))


def test_rank_and_replicas_come_from_the_group(reports):
    assert [report["place"] for report in reports] == [[2, 0], [2, 1]]
    assert len({len(report["documents"]) for report in reports}) == 1
    held = [number for report in reports for batch in report["documents"] for number in batch]
    assert sorted(held) == list(range(600))


# A loader of one rank's packs that accelerate prepares, as for Trainer, which would divide the packs again.

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
