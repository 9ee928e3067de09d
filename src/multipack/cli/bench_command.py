"""The command `multipack bench collectives`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

from multipack.cli.command_options import Json, fail, nearest, option, print_json

if TYPE_CHECKING:
    from multipack.launch.bandwidth import Bandwidth
    from multipack.parallel.parallel_config import Device

COLUMNS = ("operation", "bytes", "microseconds", "algorithm GB/s", "bus GB/s", "result")
DEVICES = ("auto", "cpu", "cuda")
TIMEOUT_SECONDS = 300.0
"""Timeout of one collective: enough for a large message over a slow link."""


def collectives(
    processes: Annotated[int, option("Processes to start; default: one per GPU, or 2.", "-n")] = 0,
    sizes: Annotated[str, typer.Option(help="Sizes of the whole message.")] = "1KiB,64KiB,1MiB,16MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls per measurement.")] = 20,
    device: Annotated[str, typer.Option(help="auto (GPUs if there are any), cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Time every collective between processes, and check its result.

    Examples:
      multipack bench collectives
      multipack bench collectives -n 4 --sizes 4KiB,4MiB --json
      torchrun --nproc-per-node 8 -m multipack bench collectives --sizes 256MiB

    Starts processes on this host; under a launcher, uses those that it started.
    Algorithm bandwidth is size / time. Bus bandwidth, as defined by nccl-tests,
    is comparable with the bandwidth of the hardware.
    """
    from multipack.launch.bandwidth import OPERATIONS, measure
    from multipack.parallel.joining import connected
    from multipack.parallel.ranks import find_ranks
    from multipack.reports.console import Console

    if device not in DEVICES:
        raise ValueError(f"--device {device} is not one of {', '.join(DEVICES)}{nearest(device, DEVICES)}")
    wanted = [_bytes(word.strip()) for word in sizes.split(",")]
    ranks = find_ranks(os.environ)
    if ranks.launcher == "none":
        _restart_by_torchrun(processes, device)
    if processes not in (0, ranks.size):
        raise ValueError(f"-n {processes}: {ranks.launcher} started {ranks.size} processes; leave -n out")
    with connected(cast("Device", device), TIMEOUT_SECONDS) as world:
        found = [measure(world, operation, size, repeats) for operation in OPERATIONS for size in wanted]
    if world.is_main and as_json:
        print_json([asdict(row) for row in found])
    elif world.is_main:
        processes_text = f"{world.size} process{'es' * (world.size > 1)}"
        title = f"collectives between {processes_text}, {world.backend} on {world.device.type}, fp32"
        Console().table(title, COLUMNS, [_cells(row) for row in found])
    wrong = [row for row in found if row.wrong_ranks]
    if wrong:
        ranks_named = ", ".join(map(str, wrong[0].wrong_ranks))
        message = f"{wrong[0].operation} of {wrong[0].bytes:,} bytes has a wrong result on rank {ranks_named}"
        fail(f"{message} ({len(wrong)} of {len(found)} measurements are wrong)", 3)


def _restart_by_torchrun(processes: int, device: str) -> NoReturn:
    """Replace this process by torchrun with the same command."""
    import torch

    from multipack.launch.allocation import Allocation
    from multipack.launch.launcher import LaunchRequest, become, launch_command

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus and processes > gpus:
        raise ValueError(
            f"-n {processes}: each process needs one of {gpus} GPUs; use -n {gpus} or --device cpu"
        )
    # One thread per process is enough for collectives; more would compete for cores.
    request = LaunchRequest(sys.argv[1:], processes=processes or gpus or 2, launcher="torchrun", cores=1)
    become(launch_command(request, Allocation()))


def _cells(row: Bandwidth) -> list[str]:
    speeds = [f"{value / 1e9:.3g}" for value in (row.algorithm_bytes_per_second, row.bus_bytes_per_second)]
    result = f"WRONG on rank {', '.join(map(str, row.wrong_ranks))}" if row.wrong_ranks else "correct"
    return [row.operation, f"{row.bytes:,}", f"{row.seconds * 1e6:,.1f}", *speeds, result]


def _bytes(word: str) -> int:
    """Return the number of bytes of a size such as `4096`, `64KiB`, `16MiB` or `1GiB`."""
    from multipack.words import byte_count

    size = int(word) if word.isdecimal() else int(byte_count(word))
    if size < 1:
        raise ValueError(
            f"--sizes {word!r} is not a size: write 4096, 64KiB, 16MiB or 1GiB, separated by commas"
        )
    return size
