"""The commands that start runs and check the machine: launch, submit, doctor."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from multipack.cli.command_options import Json, argument, nearest, option, print_json

Command = Annotated[list[str] | None, argument("-- COMMAND …", "A multipack command: train model=gpt2 …")]


def _check_command(context: typer.Context, words: Sequence[str]) -> None:
    """Check the name of the command."""
    commands: Any = context.find_root().command
    if words and words[0] not in commands.commands:
        raise ValueError(f"`multipack {words[0]}` is not a command{nearest(words[0], commands.commands)}")


def _check_run(words: Sequence[str], processes: int) -> None:
    """Check the settings of `train` for this number of processes, before any of them starts."""
    from multipack.training.checks import check
    from multipack.training.run_config import compose_run

    if words and words[0] == "train" and not any(word.startswith("-") for word in words):
        check(compose_run(words[1:]), processes)


def launch(
    context: typer.Context,
    words: Command = None,
    processes: Annotated[int, option("Total number of processes.", "-n")] = 0,
    nodes: Annotated[int, option("Hosts.", "--nodes", "-N")] = 0,
    processes_per_node: Annotated[int, option("Processes per host.", "--ppn")] = 0,
    hostfile: Annotated[str, option("File of hosts: HOST, or HOST slots=N, one per line.")] = "",
    launcher: Annotated[str, typer.Option(help="auto, torchrun, srun, mpiexec or mpirun.")] = "auto",
    cores: Annotated[int, option("CPU cores per process.")] = 0,
    address: Annotated[str, option("Address of rank 0; default: the first host.")] = "",
    port: Annotated[int, option("Rendezvous port.")] = 0,
    node_rank: Annotated[int, option("Index of this host, if launch runs on each host.")] = -1,
    flags: Annotated[str, option("Additional options of the launcher, as one string.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:
    """Start a run in processes, by srun, mpiexec or torchrun.

    Examples:
      multipack launch -n 4 -- train model=small
      multipack launch -n 8 --ppn 4 --dry-run -- train plan.packs_per_step=16
      multipack launch -n 8 -- train parallel.data=zero3 parallel.tensor=2
      multipack launch -n 4 --flags "--max-restarts 3" -- train train.resume=auto out=runs/a
      multipack launch --launcher mpiexec -n 8 --cores 16 -- train plan.micro_batches=2

    By srun in Slurm, mpiexec in PBS, torchrun elsewhere. The hosts come from the
    job or from --hostfile, signals and exit code from the launcher.
    """
    from multipack.launch.launcher import LaunchRequest
    from multipack.launch.launcher import launch as start

    _check_command(context, words or [])
    if "--max-restarts" in flags and not {"train.resume=auto", "train.resume=true"} & {*(words or [])}:
        raise ValueError(
            f"--flags {flags!r}: restarted with the same words, this run would begin again; add train.resume=auto"
            " out=RUN_DIR"
        )
    # The options have the names of the request's fields.
    options = context.params | {"words": words or [], "flags": shlex.split(flags)}
    for name in ("hostfile", "dry_run"):
        del options[name]
    request = LaunchRequest(**options)
    start(request, hostfile, dry_run, lambda processes: _check_run(request.words, processes))


def submit(
    context: typer.Context,
    words: Command = None,
    scheduler: Annotated[str, option("slurm or pbs.")] = "",
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="Hosts.")] = 1,
    processes_per_node: Annotated[int, typer.Option("--ppn", help="Processes per host.")] = 1,
    time: Annotated[str, typer.Option(help="Time limit, HOURS:MINUTES:SECONDS.")] = "01:00:00",
    queue: Annotated[str, option("PBS queue or Slurm partition.")] = "",
    account: Annotated[str, option("Account to charge.")] = "",
    name: Annotated[str, typer.Option(help="Name of the job.")] = "multipack",
    gpus: Annotated[int, option("GPUs per host.")] = 0,
    cores: Annotated[int, option("CPU cores per process.")] = 0,
    directives: Annotated[
        list[str] | None, option("Additional scheduler option; repeatable.", "--directive")
    ] = None,
    out: Annotated[Path | None, option("File to write; default: print.", "-o")] = None,
) -> None:
    """Write a Slurm or PBS script that starts `multipack launch`.

    Examples:
      multipack submit --scheduler slurm -N 2 --ppn 4 --gpus 4 -o job.sh -- train plan.micro_batches=4
      sbatch job.sh
      multipack submit --scheduler pbs -N 2 --ppn 4 --queue debug -- train parallel.tensor=4 | qsub
    """
    from multipack.launch.submit import SubmitRequest, batch_script, write_script

    _check_command(context, words or [])
    _check_run(words or [], nodes * processes_per_node)
    # The options have the names of the request's fields.
    options = context.params | {"words": words or [], "directives": directives or []}
    del options["out"]
    request = SubmitRequest(**options)
    if out is None:
        typer.echo(batch_script(request), nl=False)
    else:
        write_script(request, out)
        typer.echo(f"wrote {out}; submit it with: {'sbatch' if scheduler == 'slurm' else 'qsub'} {out}")


def doctor(
    path: Annotated[Path | None, argument("[RUN]", "Check this run directory instead.")] = None,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip checks that start processes.")] = False,
) -> None:
    """Check whether this machine can train, or a run can resume.

    Exit code 1 = it cannot. With RUN, all checksums are verified.

    Examples:
      multipack doctor
      multipack doctor --quick --json
      multipack doctor runs/first
    """
    from collections import Counter
    from dataclasses import asdict
    from itertools import groupby

    from multipack.data.text.skipped import counted
    from multipack.launch.doctor import examine
    from multipack.reports.console import Console

    console = Console(stream=sys.stderr if as_json else None)
    with console.progress("checking") as advance:
        if path is None:
            found = examine(os.environ, quick, lambda area: advance(0, note=area))
        else:
            from multipack.training.run_doctor import examine_run

            found = examine_run(path, lambda area: advance(0, note=area))
    counts = Counter(finding.status for finding in found)
    if as_json:
        print_json({"findings": [asdict(one) for one in found], "counts": counts})
    else:
        for area, findings in groupby(found, lambda one: one.area):
            rows = [
                (f"{one.status:<4}  {one.name}", one.detail + (f"\n→ {one.remedy}" if one.remedy else ""))
                for one in findings
            ]
            console.section(area, rows)
        console.line(f"\n{counts['ok']} ok, {counted(counts['warn'], 'warnings')}, {counts['fail']} failed")
    if counts["fail"]:
        raise typer.Exit(1)
