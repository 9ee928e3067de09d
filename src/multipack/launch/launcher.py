"""Start the processes of a run with torchrun, srun or mpiexec.

    multipack launch -n 8 --ppn 4 -- train model=gpt2
      one host   →  python -m multipack.launch.torchrun --rdzv-backend loopback --nproc-per-node 8 -m …
      Slurm      →  srun --nodes=2 --ntasks=8 … env MASTER_ADDR=… MASTER_PORT=… WORLD_SIZE=8 python -m multipack train …
      PBS        →  mpiexec -n 8 --ppn 4 --hosts … env … python -m multipack train …

`launch_command` is a pure function of the request and the allocation. Variables of all processes are set by `env`,
which works with every launcher. The command replaces this process, so signals, output and exit code are its own.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, NoReturn

from multipack.data.text.skipped import counted
from multipack.launch.allocation import Allocation, find_allocation, find_launchers
from multipack.parallel.ranks import find_ranks, port_of

LauncherName = Literal["auto", "torchrun", "srun", "mpiexec", "mpirun"]


@dataclass(frozen=True)
class LaunchRequest:
    """A command and its processes: the options of `multipack launch`.

    Numbers of 0 and an empty address follow from the other fields or from the scheduler, a port of 0 from the job
    identifier. Without `cores` processes are not bound; torchrun does not bind, and sets OMP_NUM_THREADS.
    """

    words: Sequence[str]
    """A multipack command and its words, such as train, model=gpt2."""
    processes: int = 0
    nodes: int = 0
    processes_per_node: int = 0
    launcher: LauncherName = "auto"
    """auto = srun in Slurm, mpiexec in PBS, torchrun elsewhere."""
    cores: int = 0
    address: str = ""
    port: int = 0
    node_rank: int = -1
    """Index of this host, 0 … nodes − 1, where launch runs on each host; −1 = it runs once."""
    flags: Sequence[str] = ()
    python: str = sys.executable
    """The interpreter, at the same path on every host."""

    def __post_init__(self) -> None:
        """Check the fields that do not depend on the allocation."""
        if not self.words:
            raise ValueError(
                "nothing to launch: write the command after --, as in `multipack launch -n 2 -- train`"
            )
        numbers = {"-n": self.processes, "--nodes": self.nodes, "--ppn": self.processes_per_node}
        for name, value in (numbers | {"--cores": self.cores}).items():
            if value < 0:
                raise ValueError(f"{name} {value}: must be at least 1, or left out")
        if not 0 <= self.port < 65_536:
            raise ValueError(f"--port {self.port} is not a port: use 1 … 65535, or leave it out")


class Layout(NamedTuple):
    """Hosts and their processes."""

    hosts: tuple[str, ...]
    """Names of hosts, rank 0's first; empty = this host, or unknown."""
    nodes: int
    """Number of hosts."""
    per_node: int
    """Number of processes on each host."""


def launch_command(request: LaunchRequest, allocation: Allocation) -> list[str]:
    """Return the command that starts the processes.

    Raises:
        ValueError: numbers are inconsistent, there are too few hosts, or the launcher is missing or unsuitable.
    """
    layout = lay_out(request, allocation)
    launcher = choose_launcher(request, allocation, layout)
    # On one host torchrun's store takes a free port by itself: two launches never choose the same.
    port = request.port or (0 if launcher == "torchrun" and layout.nodes == 1 else port_of(allocation.job))
    request = replace(request, cores=request.cores or allocation.cores, port=port)
    if launcher == "torchrun":
        return _torchrun(request, layout)
    variables = {"MASTER_ADDR": _address(request, layout), "MASTER_PORT": request.port}
    variables["WORLD_SIZE"] = layout.nodes * layout.per_node
    words = [f"{name}={value}" for name, value in variables.items()]
    start = _start(launcher, request, allocation, layout)
    return [*start, "env", *words, request.python, "-m", "multipack", *request.words]


def lay_out(request: LaunchRequest, allocation: Allocation) -> Layout:
    """Distribute processes evenly over hosts; see `launch_command`."""
    total, nodes, per_node = request.processes, request.nodes, request.processes_per_node
    hosts = list(allocation.hosts)
    sizes = set(allocation.hosts.values())
    each = sizes.pop() if len(sizes) == 1 else 0  # processes of every host; 0 = unknown, or they differ
    if not (total or per_node or (nodes and each)):
        total = 0 if nodes else allocation.processes
        if not total:
            raise ValueError("the number of processes is unknown: give -n PROCESSES, or --nodes and --ppn")
    if not nodes:
        nodes = max(len(hosts), 1)
        if per_node and total:
            nodes = -(-total // per_node)
        elif not per_node and each and (total % each == 0 or total < each):
            nodes = min(-(-total // each), nodes)
    if not per_node:
        per_node = -(-total // nodes) if total else each
    if total and total != nodes * per_node:
        raise ValueError(
            f"-n {total} is not {nodes} hosts × {per_node} processes = {nodes * per_node}: change -n, --nodes or --ppn"
        )
    if hosts and nodes > len(hosts):
        raise ValueError(f"--nodes {nodes}: there are {len(hosts)} hosts ({', '.join(hosts[:8])})")
    return Layout(tuple(hosts[:nodes]), nodes, per_node)


def choose_launcher(request: LaunchRequest, allocation: Allocation, layout: Layout) -> str:
    """The program that starts processes."""
    wanted, available = request.launcher, allocation.launchers
    if wanted not in ("auto", "torchrun"):
        if wanted not in available:
            raise ValueError(
                f"--launcher {wanted} is not on the PATH, or `{wanted} --version` is unknown;"
                f" available: {', '.join(['torchrun', *available])}"
            )
        return wanted
    first, name = layout.hosts[0] if layout.hosts else "", allocation.here.split(".")[0]
    is_here = not (first and name) or first.split(".")[0] in ("localhost", "127", name)
    local = layout.nodes == 1 and is_here
    if request.node_rank >= 0 or (local and (wanted == "torchrun" or allocation.scheduler == "none")):
        return "torchrun"
    reaching = ("srun", "mpiexec", "mpirun") if allocation.scheduler == "slurm" else ("mpiexec", "mpirun")
    found = [name for name in reaching if wanted == "auto" and name in available and layout.hosts]
    if wanted == "torchrun" and not local:
        raise ValueError(
            "--launcher torchrun starts the processes of one host: run the same command on each host with --node-rank"
            " 0, 1, … and --address HOST of rank 0, or leave --launcher out"
        )
    if not found and not local:
        raise ValueError(
            f"no launcher reaches {', '.join(layout.hosts[:3]) or f'{layout.nodes} hosts'}: put"
            f" {' or '.join(reaching)} on the PATH and name the hosts (--hostfile FILE), or run the same command on"
            " each host with --launcher torchrun, --node-rank 0, 1, … and --address HOST of rank 0"
        )
    return found[0] if found else "torchrun"


def _torchrun(request: LaunchRequest, layout: Layout) -> list[str]:
    """Return the torchrun command of this host."""
    words = [request.python, "-m", "multipack.launch.torchrun"]
    if layout.nodes == 1:
        words += ["--rdzv-backend", "loopback"]
        words += ["--rdzv-endpoint", f"127.0.0.1:{request.port}"] if request.port else []
    else:
        if not 0 <= request.node_rank < layout.nodes:
            raise ValueError(f"--node-rank {request.node_rank}: must be 0 … {layout.nodes - 1}")
        words += ["--nnodes", str(layout.nodes), "--node-rank", str(request.node_rank)]
        words += ["--master-addr", _address(request, layout), "--master-port", str(request.port)]
    words += ["--nproc-per-node", str(layout.per_node)]
    threads = ["env", f"OMP_NUM_THREADS={request.cores}"] if request.cores else []
    return [*threads, *words, *request.flags, "-m", "multipack", *request.words]


def _start(launcher: str, request: LaunchRequest, allocation: Allocation, layout: Layout) -> list[str]:
    """Return a launcher and its options; without cores per process there is no binding."""
    total, each, cores = str(layout.nodes * layout.per_node), str(layout.per_node), request.cores
    hosts = ",".join(layout.hosts)
    match allocation.launchers[launcher]:
        case "slurm":
            options = [f"--nodes={layout.nodes}", f"--ntasks={total}", f"--ntasks-per-node={each}"]
            options += [f"--nodelist={hosts}"] if hosts else []
            # If one process fails, srun ends all: the others would wait for it in a collective.
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
            # By default Open MPI limits processes to the number of cores, or of lines in the PBS nodefile.
            mapping = f"ppr:{each}:node:PE={cores}" if cores else f"ppr:{each}:node:OVERSUBSCRIBE"
            options = ["-n", total, *(["--host", slots] if slots else []), "--map-by", mapping]
            options += [] if cores else ["--bind-to", "none"]
    return [launcher, *options, *request.flags]


def _address(request: LaunchRequest, layout: Layout) -> str:
    if request.address or layout.hosts:
        return request.address or layout.hosts[0]
    if layout.nodes > 1:
        raise ValueError(f"{layout.nodes} unnamed hosts: give --address HOST of rank 0, or --hostfile FILE")
    return "127.0.0.1"


def launch(
    request: LaunchRequest,
    hostfile: str = "",
    dry_run: bool = False,
    check: Callable[[int], None] = lambda processes: None,
) -> None:
    """Execute the command in place of this process, or only print it.

    Without a hostfile the hosts are the job's. `check` is called with the number of processes, and raises a ValueError
    if the words do not suit it.

    Raises:
        ValueError: see `launch_command`; or this process is itself one of several launched processes.
    """
    ranks = find_ranks(os.environ)
    if ranks.size > 1:
        if request.launcher != "torchrun" or request.nodes != ranks.size or request.node_rank >= 0:
            raise ValueError(
                f"multipack launch itself runs in {ranks.size} processes (started by {ranks.launcher}): start it once,"
                f" or start `multipack {request.words[0]}` instead"
            )
        request = replace(request, node_rank=ranks.rank)
    # With a node rank, the job's variables were read on its first host.
    allocation = find_allocation({} if request.node_rank >= 0 else os.environ, hostfile)
    if request.node_rank < 0:
        found = find_launchers(os.environ)
        allocation = replace(allocation, launchers=found, here=socket.gethostname())
    layout = lay_out(request, allocation)
    launcher = choose_launcher(request, allocation, layout)
    if not (request.port or allocation.job or len(allocation.hosts) > 1 or launcher == "torchrun"):
        with socket.socket() as listener:  # runs on one host need different ports
            listener.bind(("", 0))
            request = replace(request, port=listener.getsockname()[1])
    command, processes = launch_command(request, allocation), layout.nodes * layout.per_node
    check(processes)
    if dry_run:
        print(shlex.join(command))
        return
    started = f"{counted(processes, 'processes')} on {counted(layout.nodes, 'hosts')} with {launcher}"
    print(f"starting {started}; --dry-run prints the command", file=sys.stderr, flush=True)
    become(command)


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process by a command."""
    sys.stdout.flush()
    os.execvp(command[0], list(command))
