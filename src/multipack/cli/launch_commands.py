"""Commands that come before a run: launch, submit, doctor."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from multipack.cli.command_options import COMMANDS, Json

Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND …",
        help="A command of multipack and its words: train model=gpt2 …",
        show_default=False,
    ),
]


def _check_words(words: list[str], max_restarts: int) -> None:
    """Find a mistake here, once, and not in every process, or after hours in a queue.

    Args:
        words: of a command of multipack.
        max_restarts: how often it may be started again.

    Raises:
        ValueError: an unknown command, or restarts of what cannot go on.
    """
    from multipack.launch.launcher import check_restarts

    if words and words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, 1) or ["train"]
        raise ValueError(f"there is no command `multipack {words[0]}`; write -- {near[0]} …")
    if words:
        check_restarts(words, max_restarts)


def _check_run(words: Sequence[str], processes: int) -> None:
    """Refuse settings of `train` that cannot be, or that so many processes cannot run.

    Raises:
        ValueError: they are named, and the nearest choice.
    """
    from multipack.training.run_config import compose_run

    if words and words[0] == "train" and not any(word.startswith("-") for word in words):
        compose_run(words[1:]).check(processes)


Restarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", help="Start again so often after a process died: train.resume=auto out=RUN_DIR."
    ),
]


def launch(
    words: Command = None,
    processes: Annotated[int, typer.Option("-n", help="Processes in all.", show_default=False)] = 0,
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="Hosts.", show_default=False)] = 0,
    per_node: Annotated[int, typer.Option("--ppn", help="Processes on each host.", show_default=False)] = 0,
    hostfile: Annotated[
        str, typer.Option(help="File of hosts: HOST, or HOST slots=NUMBER, one a line.")
    ] = "",
    launcher: Annotated[str, typer.Option(help="auto, torchrun, srun, mpiexec or mpirun.")] = "auto",
    cores: Annotated[int, typer.Option(help="CPU cores of each process.", show_default=False)] = 0,
    max_restarts: Restarts = 0,
    address: Annotated[str, typer.Option(help="Where the processes meet, if not on the first host.")] = "",
    port: Annotated[int, typer.Option(help="Port to meet at.", show_default=False)] = 0,
    node_rank: Annotated[
        int, typer.Option(help="This host's number, where launch runs on each.", show_default=False)
    ] = -1,
    flags: Annotated[str, typer.Option(help="More options for the launcher, as one text.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing.")] = False,
) -> None:
    """Start a run on many processes: by srun in Slurm, mpiexec in PBS, torchrun elsewhere.

    [bold]Examples[/bold]

      multipack launch -n 4 -- train model=small
      multipack launch -n 8 --ppn 4 --dry-run -- train plan.packs_per_step=16
      multipack launch -n 8 -- train parallel.data=zero3 parallel.tensor=2
      multipack launch -n 4 --max-restarts 3 -- train train.resume=auto out=runs/a
      multipack launch --launcher mpiexec -n 8 --cores 16 -- train plan.micro_batches=2

    Hosts and their number come from the job, or from --hostfile. Signals and exit
    code are the launcher's own.
    """
    from multipack.launch.launcher import LaunchRequest
    from multipack.launch.launcher import launch as start

    _check_words(words or [], max_restarts)
    request = LaunchRequest(
        words=words or [],
        processes=processes,
        nodes=nodes,
        processes_per_node=per_node,
        launcher=launcher,  # type: ignore[arg-type]  # checked there
        cores=cores,
        max_restarts=max_restarts,
        address=address,
        port=port,
        node_rank=node_rank,
        flags=shlex.split(flags),
    )
    start(request, hostfile, dry_run, lambda processes: _check_run(request.words, processes))


def submit(
    words: Command = None,
    scheduler: Annotated[str, typer.Option(help="slurm or pbs.", show_default=False)] = "",
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="Hosts.")] = 1,
    per_node: Annotated[int, typer.Option("--ppn", help="Processes on each host.")] = 1,
    time: Annotated[str, typer.Option(help="Longest time, HOURS:MINUTES:SECONDS.")] = "01:00:00",
    queue: Annotated[str, typer.Option(help="Queue, or Slurm's partition.")] = "",
    account: Annotated[str, typer.Option(help="Who pays.")] = "",
    name: Annotated[str, typer.Option(help="Name of the job.")] = "multipack",
    gpus: Annotated[int, typer.Option(help="GPUs of each host.", show_default=False)] = 0,
    cores: Annotated[int, typer.Option(help="CPU cores of each process.", show_default=False)] = 0,
    max_restarts: Restarts = 0,
    directive: Annotated[
        list[str] | None, typer.Option(help="Another line for the scheduler; any number.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", help="File to write; default: print.", show_default=False)
    ] = None,
) -> None:
    """Write a job's script for Slurm or PBS, which starts the run by `multipack launch`.

    [bold]Examples[/bold]

      multipack submit --scheduler slurm -N 2 --ppn 4 --gpus 4 -o job.sh -- train plan.micro_batches=4
      sbatch job.sh
      multipack submit --scheduler pbs -N 2 --ppn 4 --queue debug -- train parallel.tensor=4 | qsub
    """
    from multipack.launch.submit import SubmitRequest, batch_script, write_script

    _check_words(words or [], max_restarts)
    _check_run(words or [], nodes * per_node)
    request = SubmitRequest(
        scheduler=scheduler,  # type: ignore[arg-type]  # checked there
        words=words or [],
        nodes=nodes,
        processes_per_node=per_node,
        time=time,
        queue=queue,
        account=account,
        name=name,
        gpus=gpus,
        cores=cores,
        max_restarts=max_restarts,
        directives=directive or [],
    )
    if out is None:
        typer.echo(batch_script(request), nl=False)
    else:
        write_script(request, out)
        typer.echo(f"{out} is written; submit it: {'sbatch' if scheduler == 'slurm' else 'qsub'} {out}")


def doctor(
    as_json: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Start no processes: no collective, no step.")
    ] = False,
) -> None:
    """Look whether this machine is fit to train on; say what to do where it is not. Exit code 1: it is not.

    [bold]Examples[/bold]

      multipack doctor
      multipack doctor --quick --json
    """
    from collections import Counter
    from dataclasses import asdict

    from multipack.launch.doctor import examine
    from multipack.reports.console import Console

    console = Console(stream=sys.stderr if as_json else None)
    with console.progress("examining") as advance:
        found = examine(os.environ, quick, lambda area: advance(0, note=area))
    counts = Counter(finding.status for finding in found)
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(one) for one in found], "counts": counts}, indent=1))
    else:
        for area in dict.fromkeys(one.area for one in found):
            rows = [one for one in found if one.area == area]
            console.section(
                area,
                [
                    (f"{one.status:<4}  {one.name}", one.detail + (f"\n→ {one.remedy}" if one.remedy else ""))
                    for one in rows
                ],
            )
        console.line(f"\n{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")
    if counts["fail"]:
        raise typer.Exit(1)
