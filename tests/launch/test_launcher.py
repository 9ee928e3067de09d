import subprocess
import sys

import pytest

from multipack.launch.allocation import Allocation
from multipack.launch.launcher import LaunchRequest, launch, launch_command, lay_out
from multipack.parallel.ranks import port_of

TRAIN = "python -m multipack train model=gpt2"
TORCHRUN = "python -m multipack.launch.torchrun"
ENV = "env MASTER_ADDR={} MASTER_PORT={} WORLD_SIZE={} " + TRAIN


def slurm(**more):
    hosts = dict.fromkeys(["node001", "node002"], 4)
    given = {"hosts": hosts, "processes": 8, "job": "77", "launchers": {"srun": "slurm"}}
    return Allocation("slurm", **{**given, **more})


def pbs(flavor, **more):
    given = {"hosts": {"x1.cm": 1, "x2.cm": 1}, "processes": 2, "job": "12.pbs"}
    return Allocation("pbs", **{**given, "launchers": {"mpiexec": flavor}, **more})


def command(allocation, *words, **request):
    asked = LaunchRequest(words or ("train", "model=gpt2"), python="python", **request)
    return " ".join(launch_command(asked, allocation))


def test_one_host_uses_torchrun():
    torchrun = f"{TORCHRUN} --rdzv-backend loopback --nproc-per-node 4"
    assert command(Allocation(), processes=4) == f"{torchrun} -m multipack train model=gpt2"
    assert "--rdzv-endpoint 127.0.0.1:29500 " in command(Allocation(), processes=4, port=29500)
    assert "--rdzv-endpoint" not in command(slurm(), processes=4, nodes=1, launcher="torchrun", node_rank=0)
    more = command(Allocation(), processes=4, cores=8, flags=("--max-restarts", "3"))
    assert more == f"env OMP_NUM_THREADS=8 {torchrun} --max-restarts 3 -m multipack train model=gpt2"


def test_slurm_uses_srun():
    env = ENV.format("node001", port_of("77"), 8)
    start = "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --nodelist=node001,node002 --kill-on-bad-exit=1"
    assert command(slurm()) == f"{start} --cpu-bind=none {env}"
    assert command(slurm(cores=16)) == f"{start} --cpus-per-task=16 {env}"
    assert " --overlap --label env" in command(slurm(in_step=True), flags=("--label",))
    assert "--nodelist=node001 " in command(slurm(), processes=4)


@pytest.mark.parametrize(
    ("flavor", "start", "binding"),
    [
        ("pals", "-n 8 --ppn 4 --hosts x1.cm,x2.cm --envall --cpu-bind none", "--cpu-bind depth --depth 16"),
        ("mpich", "-n 8 -ppn 4 -hosts x1.cm,x2.cm", "-bind-to core:16"),
        (
            "openmpi",
            "-n 8 --host x1.cm:4,x2.cm:4 --map-by ppr:4:node:OVERSUBSCRIBE --bind-to none",
            "--map-by ppr:4:node:PE=16",
        ),
    ],
)
def test_pbs_uses_mpiexec(flavor, start, binding):
    expected = f"mpiexec {start} {ENV.format('x1.cm', port_of('12.pbs'), 8)}"
    assert command(pbs(flavor), processes=8) == expected
    assert command(pbs(flavor), nodes=2, processes_per_node=4) == expected
    assert f" {binding} env MASTER_ADDR" in command(pbs(flavor), processes=8, cores=16)


def test_torchrun_of_one_of_several_hosts():
    hosts = {"nodes": 2, "processes_per_node": 4}
    assert command(Allocation(), **hosts, node_rank=1, address="a", port=29500) == (
        f"{TORCHRUN} --nnodes 2 --node-rank 1 --master-addr a --master-port 29500"
        " --nproc-per-node 4 -m multipack train model=gpt2"
    )


def test_hostfiles_without_a_scheduler():
    hosts = {"hosts": {"a": 2, "b": 2}, "processes": 4}
    mpirun = command(Allocation(launchers={"mpirun": "mpich"}, **hosts))
    assert mpirun.startswith("mpirun -n 4 -ppn 2 -hosts a,b env")
    one = {"hosts": {"a.site": 2}, "processes": 2, "here": "a"}
    for launchers in ({}, {"mpiexec": "mpich"}):
        assert command(Allocation(**one, launchers=launchers)).startswith(
            f"{TORCHRUN} --rdzv-backend loopback"
        )
    here = Allocation(launchers={"mpiexec": "mpich"})
    found = command(here, processes=2, launcher="mpiexec", port=5)
    assert found.startswith("mpiexec -n 2 -ppn 2 env MASTER_ADDR=127.")


def test_launchers_that_cannot_start_the_request_are_refused():
    here, nodes = Allocation(launchers={"mpiexec": "mpich"}), {"nodes": 2, "processes_per_node": 4}
    for allocation, asked, named in (
        (Allocation(), {**nodes, "node_rank": 2, "address": "a"}, r"--node-rank 2.*0 … 1"),
        (Allocation(), {**nodes, "node_rank": 1}, "--address HOST"),
        (Allocation(hosts={"a": 2, "b": 2}, processes=4), {}, r"a, b: put mpiexec or mpirun.*--node-rank"),
        (Allocation(hosts={"a.site": 2}, processes=2, here="b"), {"launcher": "torchrun"}, "--node-rank"),
        (here, {"processes": 2, "launcher": "srun"}, r"--launcher srun .*torchrun, mpiexec"),
    ):
        with pytest.raises(ValueError, match=named):
            command(allocation, **asked)


@pytest.mark.parametrize(
    ("hosts", "asked", "expected"),
    [
        ({"a": 4, "b": 4}, {}, (2, 4)),
        ({"a": 4, "b": 4}, {"processes": 4}, (1, 4)),
        ({"a": 4, "b": 4}, {"processes": 2}, (1, 2)),
        ({"a": 4, "b": 4}, {"processes": 16}, (2, 8)),
        ({"a": 4, "b": 4}, {"nodes": 1}, (1, 4)),
        ({"a": 4, "b": 4}, {"processes_per_node": 3}, (2, 3)),
        ({"a": 1, "b": 1}, {"processes": 8}, (2, 4)),
        ({"a": 0, "b": 0}, {"processes": 6}, (2, 3)),
        ({"a": 4, "b": 2}, {"processes": 4, "nodes": 2}, (2, 2)),
        ({}, {"processes": 3}, (1, 3)),
        ({}, {"processes": 8, "processes_per_node": 4}, (2, 4)),
    ],
)
def test_missing_numbers_follow_from_the_others(hosts, asked, expected):
    allocation = Allocation(hosts=hosts, processes=sum(hosts.values()))
    layout = lay_out(LaunchRequest(["train"], **asked), allocation)
    assert (layout.nodes, layout.per_node) == expected
    assert layout.hosts == tuple(hosts)[: expected[0]]


def test_bad_numbers_are_refused():
    for hosts, asked, message in (
        ({}, {}, "give -n PROCESSES"),
        ({"a": 0}, {"nodes": 1}, "give -n PROCESSES"),
        ({"a": 2, "b": 2}, {"processes": 5}, r"-n 5 .* = 6"),
        ({"a": 2}, {"processes": 4, "nodes": 2, "processes_per_node": 4}, r"-n 4 .* = 8"),
        ({"n1": 2, "n2": 2}, {"processes": 12, "nodes": 3}, r"--nodes 3: there are 2 hosts \(n1, n2\)"),
        ({}, {"processes": -1}, "-n -1"),
        ({}, {"port": 99999}, "--port 99999"),
    ):
        with pytest.raises(ValueError, match=message):
            lay_out(LaunchRequest(["train"], **asked), Allocation(hosts=hosts))
    with pytest.raises(ValueError, match="after --"):
        LaunchRequest([])


def test_launch_inside_launched_processes(monkeypatch, capsys):
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes \(started by MPICH\)"):
        launch(LaunchRequest(["train"], processes=2), dry_run=True)
    once = LaunchRequest(["train"], nodes=2, processes_per_node=3, launcher="torchrun", address="a", port=7)
    launch(once, dry_run=True)
    expected = "--nnodes 2 --node-rank 1 --master-addr a --master-port 7 --nproc-per-node 3"
    assert expected in capsys.readouterr().out


def test_the_command_replaces_launch_and_its_exit_code_is_that_of_launch():
    become = "import sys; from multipack.launch.launcher import become; become(sys.argv[1:])"
    words = [sys.executable, "-c", become, "sh", "-c", "exit 7"]
    assert subprocess.run(words, check=False).returncode == 7
