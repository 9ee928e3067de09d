"""Which rank this is, and what all ranks agree on, where the host has initialized torch.distributed."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist

from multipack.planning.lengths import check_integer


def world_size() -> int:
    """Ranks of torch.distributed, 1 outside of it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """How many ranks there are and which one this is, from torch.distributed where it is not given.

    Raises:
        ValueError: torch.distributed is not initialized and this does not look like a single process, or the rank is
            outside the ranks.
    """
    if num_replicas is None or rank is None:
        if dist.is_available() and dist.is_initialized():
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        elif (num_replicas or 1) > 1 or os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                "torch.distributed is not initialized, so this process does not know its rank: call"
                " torch.distributed.init_process_group first, or give both num_replicas and rank"
            )
        else:
            num_replicas, rank = 1, rank or 0
    replicas = check_integer("num_replicas", num_replicas)
    number = check_integer("rank", rank, 0)
    if number >= replicas:
        raise ValueError(f"rank={number} is outside num_replicas={replicas}: ranks count from 0")
    return replicas, number


def reduced(value: float, how: Literal["min", "max"]) -> float:
    """The least or largest value of any rank; every rank has to call it."""
    if world_size() == 1:
        return float(value)
    # Backends other than these hold no tensors of the host.
    on_host = dist.get_backend() in ("gloo", "mpi", "ucc", "undefined")
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
    box = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MIN if how == "min" else dist.ReduceOp.MAX)
    return float(box.item())
