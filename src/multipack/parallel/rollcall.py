"""Which ranks of a process group are alive, found through the store that they were joined with.

A collective that lacks a rank can only wait, and its error, when it comes, names no rank. The store knows who has
answered, on every backend:

    rank 0  answers ─┐
    rank 1  answers ─┼─ store ─▶ each rank waits for all answers, or after a while knows who is missing: rank 2
    rank 2    ·      ┘
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Group = dist.ProcessGroup | None
"""The ranks that take part; None = all ranks of the run."""


def place_in(group: Group = None) -> tuple[int, int]:
    """This process's rank within a group and the group's size; (0, 1) for a process on its own.

    Raises:
        ValueError: this process is not in the group.
    """
    if not dist.is_initialized():
        if group is not None:
            raise ValueError("a group was given, but no process group is initialized: see world.connected")
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the given group, so it must not call")
    return rank, dist.get_world_size(group)


def ranks_of(group: Group = None) -> list[int]:
    """The ranks of a group, in its order, numbered as in the whole run."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def missing_ranks(group: Group = None, seconds: float = 5.0) -> str:
    """Answer in the store, wait for the other ranks of a group, and name those that did not answer.

    Args:
        group: the ranks that are expected to call this function, equally often.
        seconds: how long to wait for them.

    Returns:
        `rank 2` or `ranks 0, 3`, numbered as in the whole run; empty if all answered. If the store cannot be reached,
        the process that holds it is named.
    """
    rank, size = place_in(group)
    if size == 1:
        return ""
    store: Any = (group or dist.group.WORLD).get_group_store()  # type: ignore[union-attr]
    names = ranks_of(group)
    try:
        number = store.add(f"multipack/answers/{rank}", 1)
        keys = [f"multipack/answer/{number}/{other}" for other in range(size)]
        store.set(keys[rank], "")
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return _named([name for name, key in zip(names, keys, strict=True) if not store.check([key])])
    except dist.DistNetworkError:
        return "the process that holds the store (rank 0 or its launcher)"
    return ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
