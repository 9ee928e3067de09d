"""Run by torchrun from test_ranks.py: the batches of each rank's samplers, in a group of gloo processes."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch.utils.data import SequentialSampler

from multipack.integrations.axolotl import MultipackBatchSampler
from multipack.integrations.multipack_v2 import MultipackDistributedBatchSampler


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 600), 1, 2048).astype(np.int64)
    shards = np.array_split(np.arange(600), [100, 330])[rank]  # of very different sizes
    report = {"shard": len(shards)}
    own = MultipackBatchSampler(shards.tolist(), 2, 4096, lengths)
    report["alone"] = len(own.generate_batches())
    report["iterated"] = len(list(own))  # iteration before len, on every rank
    report["len"], report["left_out"] = len(own), own.left_out.size
    report["trained"] = sorted(
        number for batch in own.generate_batches() for held in batch for number in held
    )

    same = MultipackBatchSampler(SequentialSampler(lengths), 1, 4096, lengths)
    report["batches"] = [[sum(lengths[held].tolist()) for held in batch] for batch in same]
    report["squares"] = [
        int((lengths[held] ** 2).sum()) for batch in same.generate_batches() for held in batch
    ]

    few = MultipackBatchSampler([[0, 1, 2], [3], [4, 5, 6]][rank], 2, 4096, lengths)
    try:
        len(few)
    except ValueError as error:
        report["error"] = str(error)

    packed = MultipackDistributedBatchSampler(4096, lengths)
    report["place"] = [packed.num_replicas, packed.rank]
    report["documents"] = [batch.tolist() for batch in packed]
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
    assert world == 3


if __name__ == "__main__":
    main()
