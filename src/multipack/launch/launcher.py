"""One command that starts the processes of a run, whatever starts processes here.

    multipack launch -n 8 --ppn 4 -- train model=gpt2
      alone      →  python -m multipack.launch.torchrun --standalone --nproc-per-node 8 -m multipack train model=gpt2
      Slurm      →  srun --nodes=2 --ntasks=8 … env MASTER_ADDR=… MASTER_PORT=… WORLD_SIZE=8 python -m multipack train …
      PBS        →  mpiexec -n 8 --ppn 4 --hosts … env … python -m multipack train …
      restarts   →  the same, but one `multipack launch --launcher torchrun` on each host, which becomes torchrun

`launch_command` is a pure function of what was asked for and what there is. What every process must know travels as
words of `env`, not as options for variables, which every launcher has its own of: the printed command says all.
The command then takes this process's place, so that signals, output and exit code are its own.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from multipack.launch.allocation import Allocation, find_allocation, find_launchers
from multipack.parallel.hostnames import compress_hostlist
from multipack.parallel.ranks import find_ranks, port_of

LauncherName = Literal["auto", "torchrun", "srun", "mpiexec", "mpirun"]


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be started. Numbers that are 0 follow from the others, or from what the scheduler says."""

    words: Sequence[str]
    """A command of multipack and its words: train model=gpt2 …."""
    processes: int = 0
    """Processes in all."""
    nodes: int = 0
    """Hosts to run on."""
    processes_per_node: int = 0
    """Processes on each host."""
    launcher: LauncherName = "auto"
    """What starts processes: srun in Slurm, mpiexec in PBS, torchrun elsewhere and where restarts are wanted."""
    cores: int = 0
    """CPU cores of each process: srun and mpiexec bind it, torchrun sets OMP_NUM_THREADS; 0 = all may use all."""
    max_restarts: int = 0
    """How often torchrun may start the processes again after one has died."""
    address: str = ""
    """Where the processes meet, if not on the first host."""
    port: int = 0
    """Port to meet at; 0 = one that follows from the job's name."""
    node_rank: int = -1
    """This host's number, 0 … nodes − 1, where nothing but torchrun can reach the other hosts."""
    flags: Sequence[str] = ()
    """More options, for the launcher itself."""
    python: str = sys.executable
    """The interpreter, at the same path on every host."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not self.words:
            raise ValueError(
                "nothing to launch: write the command behind --, as in `multipack launch -n 2 -- train`"
            )
        for name, value in (
            ("-n", self.processes),
            ("--nodes", self.nodes),
            ("--ppn", self.processes_per_node),
            ("--cores", self.cores),
            ("--max-restarts", self.max_restarts),
        ):
            if value < 0:
                raise ValueError(f"{name} {value}: it cannot be negative; leave it out, or give at least 1")
        if not 0 <= self.port < 65_536:
            raise ValueError(f"--port {self.port} is no port: give 1 … 65535, or leave it out")


def check_restarts(words: Sequence[str], max_restarts: int) -> None:
    """Refuse to start again what would not go on where it was.

    A command is started again with the same words, so these must say "go on, if there is something to go on with".

    Raises:
        ValueError: restarts are wanted of a command other than train, or of a run that would begin anew each time.
    """
    if not max_restarts:
        return
    if words[0] != "train":
        raise ValueError(
            f"--max-restarts {max_restarts}: `multipack {words[0]}` would start from its beginning each time; only"
            " train goes on where it was: leave --max-restarts out"
        )
    said = {key: value for key, _, value in (word.partition("=") for word in words[1:])}
    resume, out = said.get("train.resume", "false"), said.get("out", "")
    add = []
    if resume.lower() in ("false", "") or Path(resume).parent.name == "checkpoints":
        add.append("train.resume=auto")
    if not out and (add or resume.lower() in ("auto", "true")):
        add.append("out=RUN_DIR")
    if add:
        raise ValueError(
            f"--max-restarts {max_restarts}: started again with the same words, this run would not go on where it was;"
            f" add {' '.join(add)} (train.resume=auto begins the run in out= and, when started again, continues it)"
        )


@dataclass(frozen=True)
class Layout:
    """Which hosts run how many processes.

    Attributes:
        hosts: their names, rank 0's first; empty = this host, or hosts that only the user knows.
        nodes: how many hosts.
        per_node: processes on each.
    """

    hosts: tuple[str, ...]
    nodes: int
    per_node: int

    @property
    def processes(self) -> int:
        """Processes in all."""
        return self.nodes * self.per_node


def launch_command(request: LaunchRequest, allocation: Allocation) -> list[str]:
    """The command that starts the processes.

    Raises:
        ValueError: numbers that do not go together or are not there, more hosts than there are, or a launcher that is
            not here or cannot do what is asked; the message says what would do.
    """
    layout = lay_out(request, allocation)
    launcher = choose_launcher(request, allocation, layout)
    request = replace(request, cores=request.cores or allocation.cores)
    if launcher == "torchrun":
        return _torchrun(request, allocation, layout)
    if request.launcher == "torchrun" or request.max_restarts:
        # One process a host, each of which learns from its launcher which host it is, and becomes torchrun.
        one_a_node, bound = (
            replace(layout, per_node=1),
            replace(request, cores=request.cores * layout.per_node),
        )
        return [*_start(launcher, bound, allocation, one_a_node), *_launch_again(request, allocation, layout)]
    settings = {
        "MASTER_ADDR": _address(request, layout),
        "MASTER_PORT": _port(request, allocation),
        "WORLD_SIZE": layout.processes,
    }
    program = [
        "env",
        *(f"{name}={value}" for name, value in settings.items()),
        request.python,
        "-m",
        "multipack",
    ]
    return [*_start(launcher, request, allocation, layout), *program, *request.words]


def lay_out(request: LaunchRequest, allocation: Allocation) -> Layout:
    """How many processes run on which hosts: equally many on each.

    Raises:
        ValueError: numbers that do not multiply to each other, or that nobody gave.
    """
    total, nodes, per_node = request.processes, request.nodes, request.processes_per_node
    hosts = list(allocation.hosts)
    slots = set(allocation.hosts.values())
    each = slots.pop() if len(slots) == 1 else 0
    if not (total or per_node or (nodes and each)):
        total = 0 if nodes else allocation.processes
        if not total:
            raise ValueError(
                "nobody says how many processes to start: give -n PROCESSES, or --nodes and --ppn"
            )
    if not nodes:
        if per_node:
            nodes = -(-total // per_node) if total else max(len(hosts), 1)
        elif each and (total % each == 0 or total < each):
            nodes = min(-(-total // each), len(hosts))  # as many hosts as the processes fill
        else:
            nodes = max(len(hosts), 1)
    if not per_node:
        per_node = -(-total // nodes) if total else each
    if total and total != nodes * per_node:
        raise ValueError(
            f"{total} processes cannot run as {per_node} on each of {nodes} hosts ({nodes} × {per_node} ="
            f" {nodes * per_node}): all hosts run equally many; change -n, --nodes or --ppn"
        )
    if hosts and nodes > len(hosts):
        raise ValueError(
            f"{nodes} hosts are asked for, but there are {len(hosts)}: {compress_hostlist(hosts)}"
        )
    return Layout(tuple(hosts[:nodes]), nodes, per_node)


def choose_launcher(request: LaunchRequest, allocation: Allocation, layout: Layout) -> str:
    """What the command begins with: the launcher that was asked for, or the one for this place.

    Where torchrun is wanted on other hosts, it is what starts a process on each of them.

    Raises:
        ValueError: it is not here, cannot restart processes, or none reaches all hosts.
    """
    wanted, here = request.launcher, allocation.launchers
    if request.max_restarts and wanted not in ("auto", "torchrun"):
        raise ValueError(
            f"--max-restarts needs torchrun, and --launcher {wanted} cannot restart processes: leave one out"
        )
    if wanted not in ("auto", "torchrun", *here):
        raise ValueError(
            f"--launcher {wanted} is not here, or does not say whose it is (`{wanted} --version`);"
            f" here: {', '.join(['torchrun', *here])}"
        )
    if wanted not in ("auto", "torchrun"):
        return wanted
    if request.node_rank >= 0:
        return "torchrun"
    local = layout.nodes == 1 and (not layout.hosts or _is_here(layout.hosts[0], allocation))
    if local and (wanted == "torchrun" or request.max_restarts):
        return "torchrun"
    reaching = ("srun", "mpiexec", "mpirun") if allocation.scheduler == "slurm" else ("mpiexec", "mpirun")
    found = [name for name in reaching if name in here and layout.hosts]
    if local and (not found or allocation.scheduler == "none"):
        return "torchrun"  # needs nothing but Python
    if not found:
        raise ValueError(
            f"nothing here starts processes on {', '.join(layout.hosts[:3]) or f'{layout.nodes} hosts'}: put"
            f" {' or '.join(reaching)} on the PATH and name the hosts (--hostfile FILE), or run the same command on"
            " each host with --node-rank 0, 1, … and --address HOST, where rank 0 is"
        )
    return found[0]


def _is_here(host: str, allocation: Allocation) -> bool:
    """Whether this is that host, as far as is known: names with and without their domain are the same."""
    here = allocation.here
    return host in ("localhost", "127.0.0.1") or not here or host.split(".")[0] == here.split(".")[0]


def _torchrun(request: LaunchRequest, allocation: Allocation, layout: Layout) -> list[str]:
    """The command for this host's processes."""
    words = [request.python, "-m", "multipack.launch.torchrun"]
    if layout.nodes == 1:
        words += ["--standalone"]
    else:
        if not 0 <= request.node_rank < layout.nodes:
            raise ValueError(f"--node-rank {request.node_rank}: hosts are numbered 0 … {layout.nodes - 1}")
        words += ["--nnodes", str(layout.nodes), "--node-rank", str(request.node_rank)]
        words += [
            "--master-addr",
            _address(request, layout),
            "--master-port",
            str(_port(request, allocation)),
        ]
    words += ["--nproc-per-node", str(layout.per_node)]
    if request.max_restarts:
        words += ["--max-restarts", str(request.max_restarts)]
    threads = ["env", f"OMP_NUM_THREADS={request.cores}"] if request.cores else []
    return [*threads, *words, *request.flags, "-m", "multipack", *request.words]


def _launch_again(request: LaunchRequest, allocation: Allocation, layout: Layout) -> list[str]:
    """The words by which `multipack launch`, started on every host, starts that host's processes."""
    words = [request.python, "-m", "multipack", "launch", "--launcher", "torchrun"]
    words += ["--nodes", str(layout.nodes), "--ppn", str(layout.per_node)]
    words += ["--address", _address(request, layout), "--port", str(_port(request, allocation))]
    for option, value in (("--cores", request.cores), ("--max-restarts", request.max_restarts)):
        words += [option, str(value)] if value else []
    return [*words, "--", *request.words]


def _start(launcher: str, request: LaunchRequest, allocation: Allocation, layout: Layout) -> list[str]:
    """A launcher and its options: `per_node` processes on each host, bound to so many cores or to none."""
    total, each, cores = str(layout.processes), str(layout.per_node), request.cores
    hosts = ",".join(layout.hosts)
    match allocation.launchers[launcher]:
        case "slurm":
            options = [f"--nodes={layout.nodes}", f"--ntasks={total}", f"--ntasks-per-node={each}"]
            options += [f"--nodelist={compress_hostlist(layout.hosts)}"] if layout.hosts else []
            # One process that fails ends all: the others would wait for it in a collective.
            options += ["--kill-on-bad-exit=1", f"--cpus-per-task={cores}" if cores else "--cpu-bind=none"]
            options += ["--overlap"] if allocation.in_step else []
        case "pals":
            options = ["-n", total, "--ppn", each, *(["--hosts", hosts] if hosts else []), "--envall"]
            options += ["--cpu-bind", "depth", "--depth", str(cores)] if cores else ["--cpu-bind", "none"]
        case "mpich":
            options = ["-n", total, "-ppn", each, *(["-hosts", hosts] if hosts else [])]
            options += ["-bind-to", f"core:{cores}"] if cores else []
        case "openmpi":
            slots = ",".join(f"{host}:{each}" for host in layout.hosts)
            # Its own idea of how many processes a host takes counts cores, or lines of PBS's file.
            mapping = f"ppr:{each}:node:PE={cores}" if cores else f"ppr:{each}:node:OVERSUBSCRIBE"
            options = ["-n", total, *(["--host", slots] if slots else []), "--map-by", mapping]
            options += [] if cores else ["--bind-to", "none"]
    return [launcher, *options, *request.flags]


def _address(request: LaunchRequest, layout: Layout) -> str:
    if request.address or layout.hosts:
        return request.address or layout.hosts[0]
    if layout.nodes > 1:
        raise ValueError(
            f"{layout.nodes} hosts, but nobody names one: give --address HOST of rank 0, or --hostfile FILE"
        )
    return "127.0.0.1"


def _port(request: LaunchRequest, allocation: Allocation) -> int:
    return request.port or port_of(allocation.job)


def launch(
    request: LaunchRequest,
    hostfile: str = "",
    dry_run: bool = False,
    check: Callable[[int], None] = lambda processes: None,
) -> None:
    """Print the command and become it; with `dry_run`, print it only.

    Args:
        request: what is to be started.
        hostfile: of the hosts; empty = those of the job.
        dry_run: start nothing.
        check: raises a ValueError where so many processes cannot run these words.

    Raises:
        ValueError: see `launch_command`; or launch itself runs as one of several processes.
    """
    ranks = find_ranks(os.environ)
    if ranks.size > 1:
        if request.launcher != "torchrun" or request.nodes != ranks.size or request.node_rank >= 0:
            raise ValueError(
                f"multipack launch was itself started {ranks.size} times (by {ranks.launcher}): start it once, or start"
                f" `multipack {request.words[0]}` in its place"
            )
        request = replace(request, node_rank=ranks.rank)  # once on every host
    if request.node_rank >= 0:  # this host's part only: the job's variables were read where its first host is
        allocation = find_allocation({}, hostfile)
    else:
        found = find_launchers(os.environ)
        allocation = find_allocation(os.environ, hostfile, found, socket.gethostname())
    if not request.port and not allocation.job and len(allocation.hosts) <= 1 and request.node_rank < 0:
        request = replace(request, port=free_port())  # two runs on one host must not meet each other
    command = launch_command(request, allocation)
    check(lay_out(request, allocation).processes)
    if dry_run:
        print(shlex.join(command))
        return
    print(shlex.join(command), file=sys.stderr, flush=True)
    become(command)


def become(command: Sequence[str]) -> NoReturn:
    """Put a command into this process's place."""
    sys.stdout.flush()
    os.execvp(command[0], list(command))


def free_port() -> int:
    """A port of this host that nobody listens to now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
