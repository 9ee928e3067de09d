"""Commands that measure this machine: bench collectives."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

from multipack.cli.command_options import Json, fail

if TYPE_CHECKING:
    from multipack.launch.bandwidth import Bandwidth, Operation
    from multipack.parallel.parallel_config import Device

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

COLUMNS = ("operation", "bytes", "microseconds", "algorithm GB/s", "bus GB/s", "result")
TIMEOUT_SECONDS = 300.0
"""How long a collective may take: the largest message over the slowest wire."""


@app.command()
def collectives(
    processes: Annotated[
        int, typer.Option("-n", help="Processes to start; 0 = one for each GPU, 2 without.")
    ] = 0,
    sizes: Annotated[str, typer.Option(help="Bytes of the whole message.")] = "1KiB,64KiB,1MiB,16MiB",
    operations: Annotated[str, typer.Option(help="Which collectives: all, or names.")] = "all",
    dtype: Annotated[str, typer.Option(help="fp32, fp64, bf16, fp16 or int64.")] = "fp32",
    repeats: Annotated[int, typer.Option(min=1, help="Calls that are timed together.")] = 20,
    device: Annotated[str, typer.Option(help="auto (GPUs where there are some), cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Time every collective between processes, and check what it gives.

    [bold]Examples[/bold]

      multipack bench collectives
      multipack bench collectives -n 4 --sizes 4KiB,4MiB --dtype bf16
      multipack bench collectives --operations all_reduce,all_gather --json
      torchrun --nproc-per-node 8 -m multipack bench collectives --sizes 256MiB

    Starts the processes on this host; under a launcher it runs in those that are
    there. Algorithm bandwidth is size by time; bus bandwidth, as nccl-tests
    defines it, is comparable with what the wire can do.
    """
    from multipack.launch.bandwidth import DTYPES, OPERATIONS
    from multipack.parallel.ranks import find_ranks

    asked = [_bytes(word.strip()) for word in sizes.split(",")]
    chosen = OPERATIONS if operations == "all" else [word.strip() for word in operations.split(",")]
    for name in chosen:
        _choose("--operations", name, OPERATIONS)
    _choose("--dtype", dtype, DTYPES)
    _choose("--device", device, ("auto", "cpu", "cuda"))
    ranks = find_ranks(os.environ)
    if ranks.launcher == "none":
        words = ["--sizes", sizes, "--operations", operations, "--dtype", dtype, "--repeats", str(repeats)]
        words += ["--device", device, *(["--json"] if as_json else [])]
        _start(["bench", "collectives", *words], processes, device)
    if processes not in (0, ranks.size):
        raise ValueError(f"-n {processes}, but {ranks.launcher} started {ranks.size} processes: leave -n out")
    _measure(chosen, asked, dtype, repeats, device, as_json)


def _start(words: list[str], processes: int, device: str) -> NoReturn:
    """Become torchrun with this command, on this host.

    Raises:
        ValueError: there are not as many GPUs.
    """
    import torch

    from multipack.launch.allocation import Allocation
    from multipack.launch.launcher import LaunchRequest, become, launch_command

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus and processes > gpus:
        raise ValueError(f"-n {processes}: each process needs a GPU, and there are {gpus}; take --device cpu")
    # Its threads would only wait for each other: the collectives do their work in one.
    request = LaunchRequest(words, processes=processes or gpus or 2, launcher="torchrun", cores=1)
    become(launch_command(request, Allocation()))


def _measure(
    operations: Sequence[str], sizes: Sequence[int], dtype: str, repeats: int, device: str, as_json: bool
) -> None:
    """Measure in this process and the others; the first one prints."""
    from multipack.launch.bandwidth import measure
    from multipack.parallel.world import connected
    from multipack.reports.console import Console

    with connected(cast("Device", device), TIMEOUT_SECONDS) as world:
        found = [
            measure(world, cast("Operation", operation), size, dtype, repeats)
            for operation in operations
            for size in sizes
        ]
    wrong = [row for row in found if row.wrong_ranks]
    if world.is_main and as_json:
        print(json.dumps([asdict(row) for row in found], indent=1))
    elif world.is_main:
        processes = f"{world.size} process{'es' * (world.size > 1)}"
        title = f"collectives of {processes}, {world.backend} on {world.device.type}, {dtype}"
        Console().table(title, COLUMNS, [_row(row) for row in found])
    if wrong:
        first = wrong[0]
        ranks = ", ".join(map(str, first.wrong_ranks))
        told = f"{first.operation} of {first.bytes:,} bytes gives wrong results on rank {ranks}"
        fail(f"{told} ({len(wrong)} of {len(found)} measurements are wrong)" if world.is_main else told, 3)


def _row(row: Bandwidth) -> list[str]:
    giga = [f"{value / 1e9:.3g}" for value in (row.algorithm_bytes_per_second, row.bus_bytes_per_second)]
    right = "right" if not row.wrong_ranks else f"WRONG on rank {', '.join(map(str, row.wrong_ranks))}"
    return [row.operation, f"{row.bytes:,}", f"{row.seconds * 1e6:,.1f}", *giga, right]


def _bytes(word: str) -> int:
    """`4096`, `64KiB`, `16MiB`, `1GiB` → bytes."""
    match = re.fullmatch(r"(\d+) ?(B|KiB|MiB|GiB)?", word)
    if match is None or int(match[1]) < 1:
        raise ValueError(
            f"--sizes: {word!r} is no size; write 4096, 64KiB, 16MiB or 1GiB, with commas between"
        )
    return int(match[1]) << {"KiB": 10, "MiB": 20, "GiB": 30}.get(match[2] or "B", 0)


def _choose(option: str, word: str, choices: Collection[str]) -> None:
    if word not in choices:
        near = difflib.get_close_matches(word, choices, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{option} {word} is none of {', '.join(choices)}{hint}")
