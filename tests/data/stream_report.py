"""Run twice by test_stream.py: two gloo processes whose shards end at different times, and what each of them saw."""

import itertools
import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from multipack.planning.stream import PackStream

SHARDS = [40, 400]


def agreement(operation):
    def agree(steps):
        shared = torch.tensor([steps])
        dist.all_reduce(shared, operation)
        return int(shared)

    return agree


def summed(value):
    shared = torch.tensor([value])
    dist.all_reduce(shared)
    return int(shared)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    lengths = np.random.default_rng(rank).lognormal(3.0, 0.9, SHARDS[rank]).clip(1, 120).astype(int)
    report = {}
    for policy, operation in (("all go on", dist.ReduceOp.MAX), ("all stop", dist.ReduceOp.MIN)):

        def made(operation=operation):
            agree = agreement(operation)
            return PackStream(lengths, length=None, capacity=128, packs_per_step=2, lookahead=2, agree=agree)

        whole = made()
        steps = [(step.positions.tolist(), summed(step.denominator)) for step in whole]
        first = made()
        head = [step.positions.tolist() for step in itertools.islice(first, 3)]
        second = made()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        head += [step.positions.tolist() for step in second]
        report[policy] = {
            "steps": len(steps),
            "empty": sum(not positions for positions, _ in steps),
            "denominators": [denominator for _, denominator in steps],
            "positions": [position for positions, _ in steps for position in positions],
            "left": whole.left.tolist(),
            "unread": len(lengths) - whole.position,
            "resumed": head == [positions for positions, _ in steps],
        }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
