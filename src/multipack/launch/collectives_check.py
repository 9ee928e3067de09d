"""Checks the collectives of training, in the processes that `multipack doctor` starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from multipack.parallel.joining import connected
from multipack.parallel.parallel_config import Device
from multipack.parallel.world import World

TIMEOUT_SECONDS = 60.0
"""Timeout of one collective."""


def _from_first(own: Tensor) -> Tensor:
    received = own.clone()
    dist.broadcast(received, 0)
    return received


def wrong_results(world: World) -> dict[str, list[int]]:
    """Name of each collective → ranks with a wrong result; collective. Sums of small integers are exact."""
    everybody = [torch.arange(2.0 * world.size) + rank for rank in range(world.size)]
    total = torch.stack(everybody).sum(0)
    expected: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "all_reduce": (all_reduce, total),
        "all_gather": (all_gather, torch.cat(everybody)),
        "reduce_scatter": (reduce_scatter, total.chunk(world.size)[world.rank]),
        "broadcast": (_from_first, everybody[0]),
        "all_to_all": (all_to_all, torch.cat([each.chunk(world.size)[world.rank] for each in everybody])),
    }
    own = everybody[world.rank].to(world.device)
    wrong = [name for name, (call, result) in expected.items() if not torch.equal(call(own).cpu(), result)]
    found = [json.loads(text) for text in world.gather(json.dumps(wrong))]
    return {name: [rank for rank, wrong in enumerate(found) if name in wrong] for name in expected}


if __name__ == "__main__":
    with connected(cast(Device, sys.argv[1]), TIMEOUT_SECONDS) as world:
        found = wrong_results(world)
    if world.is_main:
        print(json.dumps(found))
