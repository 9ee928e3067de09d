"""How quick the collectives are, and whether what they give is right.

Time alone says little of a large message, and size by time little of a collective, in which some bytes cross the wire
more than once. Both bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, and
src/gather.cu and scatter.cu for these two), so that figures can be compared:

    algorithm bandwidth = S / t        S: bytes of the whole, all ranks' pieces together where there are pieces
    bus bandwidth       = S / t · f    f: what n ranks must send at the least; comparable with the hardware's own figure

    all_reduce                                           f = 2 (n − 1) / n
    all_gather, reduce_scatter, gather, scatter, all_to_all  f = (n − 1) / n
    reduce, broadcast                                    f = 1
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from multipack.parallel import collectives
from multipack.parallel.world import World

Operation = Literal[
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
}
WARM_UP = 3
"""Calls before the clock starts: the first ones open connections."""


@dataclass(frozen=True)
class Bandwidth:
    """One collective, measured.

    Attributes:
        operation: its name.
        dtype: of its elements.
        ranks: how many took part.
        bytes: of the whole (S above), rounded up so that all ranks have equally many elements.
        seconds: a call's mean, on the slowest rank; memory for the result is allocated within.
        algorithm_bytes_per_second: bytes / seconds.
        bus_bytes_per_second: the same times `bus_factor`.
        wrong_ranks: ranks whose result was not what it must be, to the last bit.
    """

    operation: str
    dtype: str
    ranks: int
    bytes: int
    seconds: float
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    wrong_ranks: tuple[int, ...] = ()


def bus_factor(operation: Operation, ranks: int) -> float:
    """Bus bandwidth by algorithm bandwidth: see above."""
    if operation in ("reduce", "broadcast"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


def measure(
    world: World,
    operation: Operation,
    num_bytes: int,
    dtype: str = "fp32",
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Bandwidth:
    """Time a collective over all ranks, and check its result; every rank must call it.

    Args:
        world: the ranks.
        operation: which collective; where one rank gives or gets all, it is rank 0.
        num_bytes: of the whole.
        dtype: of its elements, a name of `DTYPES`.
        repeats: calls that are timed together.
        clock: seconds; replaced in tests.

    Returns:
        The same figures on every rank.
    """
    element = DTYPES[dtype].itemsize
    each = -(-num_bytes // (element * world.size))
    whole = each * world.size
    joins = operation in ("all_gather", "gather")
    own = _numbers(world.rank, 0, each if joins else whole, world.size, dtype).to(world.device)
    call: Callable[[Tensor], Tensor] = getattr(collectives, operation)
    result = call(own)
    expected = _expected(operation, world.rank, world.size, each, dtype)
    right = result.shape == expected.shape and torch.equal(result.cpu(), expected)
    del result, expected
    for _ in range(WARM_UP - 1):
        call(own)
    world.barrier()
    world.synchronize()
    began = clock()
    for _ in range(repeats):
        call(own)
    world.synchronize()
    seconds = (clock() - began) / repeats
    told = torch.tensor([[seconds, float(right)]], dtype=torch.float64, device=world.device)
    everybody = collectives.all_gather(told).tolist()
    slowest = max(seconds for seconds, _ in everybody)
    bandwidth = whole * element / slowest
    return Bandwidth(
        operation,
        dtype,
        world.size,
        whole * element,
        slowest,
        bandwidth,
        bandwidth * bus_factor(operation, world.size),
        tuple(rank for rank, (_, right) in enumerate(everybody) if not right),
    )


def _numbers(rank: int, start: int, stop: int, ranks: int, dtype: str) -> Tensor:
    """Elements start … stop − 1 of what a rank holds: small whole numbers, mostly 0 where there are many ranks.

    Their sums over all ranks stay below 256, so they are exact in every dtype.
    """
    phase = (torch.arange(start, stop) + rank) % max(3, ranks // 32)
    return torch.where(phase < 3, phase, 0).to(DTYPES[dtype])


def _expected(operation: Operation, rank: int, ranks: int, each: int, dtype: str) -> Tensor:
    """What a rank must get, from the definition, without any collective."""
    whole, mine = (0, each * ranks), (each * rank, each * (rank + 1))
    if operation in ("reduce", "gather") and rank:
        return torch.empty(0, dtype=DTYPES[dtype])
    if operation in ("all_reduce", "reduce", "reduce_scatter"):
        span = mine if operation == "reduce_scatter" else whole
        total = torch.zeros(span[1] - span[0], dtype=torch.int64)
        for other in range(ranks):
            total += _numbers(other, *span, ranks, "int64")
        return total.to(DTYPES[dtype])
    if operation in ("broadcast", "scatter"):
        return _numbers(0, *(mine if operation == "scatter" else whole), ranks, dtype)
    span = mine if operation == "all_to_all" else (0, each)
    return torch.cat([_numbers(other, *span, ranks, dtype) for other in range(ranks)])
