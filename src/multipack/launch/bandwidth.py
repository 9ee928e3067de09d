"""Measure the speed of collectives and check their results.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests: doc/PERFORMANCE.md, src/gather.cu and
src/scatter.cu), so that results are comparable:

    algorithm bandwidth = S / t        S: bytes of the whole message, all ranks' pieces together
    bus bandwidth       = S / t · f    f: minimum share of S that each of n ranks must send; comparable with hardware

    all_reduce                                               f = 2 (n − 1) / n
    all_gather, reduce_scatter, gather, scatter, all_to_all  f = (n − 1) / n
    reduce, broadcast                                        f = 1
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.parallel.collectives import all_gather_single, reduce_scatter_single
from multipack.parallel.world import World

Operation = Literal[
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
DTYPE = torch.float32
WARM_UP = 3
"""Number of calls before timing starts; the first ones open connections."""


@dataclass(frozen=True)
class Bandwidth:
    """Measurement of one collective.

    Attributes:
        operation, ranks: name of the collective, whose elements are of `DTYPE`, and number of ranks.
        bytes: size S of the whole message, rounded up to equal pieces on all ranks.
        seconds: mean time per call on the slowest rank, including allocation of the result.
        algorithm_bytes_per_second, bus_bytes_per_second: S / seconds, and the same times `bus_factor`.
        wrong_ranks: ranks whose result was not exact.
    """

    operation: str
    ranks: int
    bytes: int
    seconds: float
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    wrong_ranks: tuple[int, ...] = ()


def bus_factor(operation: Operation, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth; see the module's docstring."""
    if operation in ("reduce", "broadcast"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


def measure(
    world: World,
    operation: Operation,
    num_bytes: int,
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Bandwidth:
    """Time a collective over all ranks and check its result; must be called on every rank.

    Args:
        world: the ranks.
        operation: the collective; its source or destination is rank 0.
        num_bytes: size of the whole message.
        repeats: number of timed calls.
        clock: returns seconds; replaced in tests.
    """
    element = DTYPE.itemsize
    piece = -(-num_bytes // (element * world.size))
    total = piece * world.size
    size = piece if operation in ("all_gather", "gather") else total
    own = _values(world.rank, 0, size, world.size).to(world.device)
    result = call_collective(operation, own, world)
    exact = result is None or torch.equal(result.cpu(), _expected(operation, world.rank, world.size, piece))
    del result
    for _ in range(WARM_UP - 1):
        call_collective(operation, own, world)
    world.barrier()
    world.synchronize()
    began = clock()
    for _ in range(repeats):
        call_collective(operation, own, world)
    world.synchronize()
    found = [json.loads(text) for text in world.gather(json.dumps([(clock() - began) / repeats, exact]))]
    slowest = max(seconds for seconds, _ in found)
    speed = total * element / slowest
    wrong = tuple(rank for rank, (_, is_exact) in enumerate(found) if not is_exact)
    bus = speed * bus_factor(operation, world.size)
    return Bandwidth(operation, world.size, total * element, slowest, speed, bus, wrong)


def call_collective(operation: Operation, own: Tensor, world: World) -> Tensor | None:
    """Call a collective with a copy of this rank's tensor; returns its result, None on ranks that receive nothing."""
    rank, size = world.rank, world.size
    if size == 1:
        return own.clone()
    result = own.clone()
    if operation in ("all_gather", "gather"):
        result = own.new_empty(own.numel() * size)
    elif operation in ("scatter", "reduce_scatter"):
        result = own.new_empty(own.numel() // size)
    match operation:
        case "all_reduce":
            dist.all_reduce(result)
        case "reduce":
            dist.reduce(result, 0)
        case "broadcast":
            dist.broadcast(result, 0)
        case "all_gather":
            all_gather_single(result, own)
        case "gather":
            dist.gather(own, None if rank else list(result.chunk(size)), 0)
        case "scatter":
            dist.scatter(result, None if rank else list(own.chunk(size)), 0)
        case "reduce_scatter":
            reduce_scatter_single(result, own)
        case "all_to_all":
            dist.all_to_all_single(result, own)
    return None if rank and operation in ("reduce", "gather") else result


def _values(rank: int, start: int, stop: int, ranks: int) -> Tensor:
    """Elements start … stop − 1 of a rank's tensor: small integers, whose sums over ranks are exact."""
    # The period bounds sums by 128 for any number of ranks.
    phase = (torch.arange(start, stop) + rank) % max(3, ranks // 32)
    return torch.where(phase < 3, phase, 0).to(DTYPE)


def _expected(operation: Operation, rank: int, ranks: int, piece: int) -> Tensor:
    """Return the correct result on a rank that receives one, by definition and without communication."""
    own = (piece * rank, piece * (rank + 1))
    if operation in ("all_reduce", "reduce", "reduce_scatter"):
        span = own if operation == "reduce_scatter" else (0, piece * ranks)
        total = torch.zeros(span[1] - span[0], dtype=DTYPE)
        for other in range(ranks):
            total += _values(other, *span, ranks)
        return total
    if operation in ("broadcast", "scatter"):
        return _values(0, *(own if operation == "scatter" else (0, piece * ranks)), ranks)
    span = own if operation == "all_to_all" else (0, piece)
    return torch.cat([_values(other, *span, ranks) for other in range(ranks)])
