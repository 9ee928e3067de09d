import signal
import subprocess
import sys

import pytest

from multipack.launch.allocation import Allocation
from multipack.launch.launcher import LaunchRequest, free_port, launch, launch_command, lay_out
from multipack.parallel.ranks import port_of

NODES = ["node001", "node002"]


def slurm(**more):
    given = {"hosts": dict.fromkeys(NODES, 4), "processes": 8, "job": "77", "launchers": {"srun": "slurm"}}
    return Allocation("slurm", **{**given, **more})


def pbs(flavor, **more):
    given = {
        "hosts": {"x1.cm": 1, "x2.cm": 1},
        "processes": 2,
        "job": "12.pbs",
        "launchers": {"mpiexec": flavor},
    }
    return Allocation("pbs", **{**given, **more})


def command(allocation, *words, **request):
    asked = LaunchRequest(words or ("train", "model=gpt2"), python="python", **request)
    return " ".join(launch_command(asked, allocation))


TRAIN = "python -m multipack train model=gpt2"
META = "env MASTER_ADDR={} MASTER_PORT={} WORLD_SIZE={} " + TRAIN


def test_alone_it_is_torchrun():
    torchrun = "python -m multipack.launch.torchrun --standalone --nproc-per-node 4"
    assert command(Allocation(), processes=4) == f"{torchrun} -m multipack train model=gpt2"
    more = command(Allocation(), processes=4, max_restarts=3, cores=8, flags=("--log-dir", "logs"))
    assert more == (
        f"env OMP_NUM_THREADS=8 {torchrun} --max-restarts 3 --log-dir logs -m multipack train model=gpt2"
    )


def test_in_slurm_it_is_srun():
    meta = META.format("node001", port_of("77"), 8)
    start = "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --nodelist=node[001-002] --kill-on-bad-exit=1"
    assert command(slurm()) == f"{start} --cpu-bind=none {meta}"
    assert command(slurm(cores=16)) == f"{start} --cpus-per-task=16 {meta}"
    assert (
        command(slurm(in_step=True), flags=("--label",))
        == f"{start} --cpu-bind=none --overlap --label {meta}"
    )
    assert "--nodelist=node001 " in command(slurm(), processes=4)


@pytest.mark.parametrize(
    ("flavor", "start"),
    [
        ("pals", "mpiexec -n 8 --ppn 4 --hosts x1.cm,x2.cm --envall --cpu-bind none"),
        ("mpich", "mpiexec -n 8 -ppn 4 -hosts x1.cm,x2.cm"),
        ("openmpi", "mpiexec -n 8 --host x1.cm:4,x2.cm:4 --map-by ppr:4:node:OVERSUBSCRIBE --bind-to none"),
    ],
)
def test_in_pbs_it_is_mpiexec(flavor, start):
    expected = f"{start} {META.format('x1.cm', port_of('12.pbs'), 8)}"
    assert command(pbs(flavor), processes=8) == expected
    assert command(pbs(flavor), nodes=2, processes_per_node=4) == expected


@pytest.mark.parametrize(
    ("flavor", "binding"),
    [
        ("pals", "--cpu-bind depth --depth 16"),
        ("mpich", "-bind-to core:16"),
        ("openmpi", "--map-by ppr:4:node:PE=16"),
    ],
)
def test_cores_bind_processes(flavor, binding):
    assert f" {binding} env MASTER_ADDR" in command(pbs(flavor), processes=8, cores=16)


def test_restarts_are_torchruns_one_on_each_host():
    again = "python -m multipack launch --launcher torchrun --nodes 2 --ppn 4 --address {} --port {}"
    found = command(slurm(cores=2), max_restarts=3)
    start = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=node[001-002] --kill-on-bad-exit=1"
    meeting = again.format("node001", port_of("77"))
    assert found == f"{start} --cpus-per-task=8 {meeting} --cores 2 --max-restarts 3 -- train model=gpt2"
    found = command(pbs("pals"), processes=8, launcher="torchrun")
    start = "mpiexec -n 2 --ppn 1 --hosts x1.cm,x2.cm --envall --cpu-bind none"
    assert found == f"{start} {again.format('x1.cm', port_of('12.pbs'))} -- train model=gpt2"


def test_the_command_on_each_host_is_torchrun_with_its_number():
    found = command(Allocation(), nodes=2, processes_per_node=4, node_rank=1, address="a", port=29500)
    assert found == (
        "python -m multipack.launch.torchrun --nnodes 2 --node-rank 1 --master-addr a --master-port 29500"
        " --nproc-per-node 4 -m multipack train model=gpt2"
    )
    with pytest.raises(ValueError, match=r"--node-rank 2: hosts are numbered 0 … 1"):
        command(Allocation(), nodes=2, processes_per_node=4, node_rank=2, address="a")
    with pytest.raises(ValueError, match="--address HOST"):
        command(Allocation(), nodes=2, processes_per_node=4, node_rank=1)


def test_a_hostfile_alone_wants_mpiexec_unless_it_is_this_host():
    hosts = {"hosts": {"a": 2, "b": 2}, "processes": 4}
    assert command(Allocation(launchers={"mpirun": "mpich"}, **hosts)).startswith(
        "mpirun -n 4 -ppn 2 -hosts a,b env"
    )
    with pytest.raises(ValueError, match=r"starts processes on a, b: put mpiexec or mpirun.*--node-rank"):
        command(Allocation(**hosts))
    one = {"hosts": {"a.site": 2}, "processes": 2, "here": "a"}
    assert command(Allocation(**one)).startswith("python -m multipack.launch.torchrun --standalone")
    assert command(Allocation(**one, launchers={"mpiexec": "mpich"})).startswith(
        "python -m multipack.launch.torchrun"
    )
    with pytest.raises(ValueError, match=r"starts processes on a\.site"):
        command(Allocation(**{**one, "here": "other"}), launcher="torchrun")


def test_a_launcher_can_be_asked_for():
    here = Allocation(launchers={"mpiexec": "mpich"})
    assert command(here, processes=2, launcher="mpiexec", port=5).startswith(
        "mpiexec -n 2 -ppn 2 env MASTER_ADDR=127."
    )
    with pytest.raises(ValueError, match=r"--launcher srun is not here.*torchrun, mpiexec"):
        command(here, processes=2, launcher="srun")
    with pytest.raises(ValueError, match=r"--max-restarts needs torchrun.*--launcher mpiexec"):
        command(here, processes=2, launcher="mpiexec", max_restarts=1)


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
def test_numbers_follow_from_each_other(hosts, asked, expected):
    allocation = Allocation(hosts=hosts, processes=sum(hosts.values()))
    layout = lay_out(LaunchRequest(["train"], **asked), allocation)
    assert (layout.nodes, layout.per_node) == expected
    assert layout.hosts == tuple(hosts)[: expected[0]]


@pytest.mark.parametrize(
    ("hosts", "asked", "message"),
    [
        ({}, {}, "give -n PROCESSES"),
        ({"a": 0}, {"nodes": 1}, "give -n PROCESSES"),
        ({"a": 2, "b": 2}, {"processes": 5}, r"5 processes cannot run.*2 × 3 = 6"),
        ({"a": 2}, {"processes": 4, "nodes": 2, "processes_per_node": 4}, r"2 × 4 = 8"),
        (
            {"n1": 2, "n2": 2},
            {"processes": 12, "nodes": 3},
            r"3 hosts are asked for, but there are 2: n\[1-2\]",
        ),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(hosts, asked, message):
    with pytest.raises(ValueError, match=message):
        lay_out(LaunchRequest(["train"], **asked), Allocation(hosts=hosts))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"words": ()}, "behind --"),
        ({"words": ("train",), "processes": -1}, "-n -1"),
        ({"words": ("train",), "port": 99999}, "--port 99999"),
    ],
)
def test_bad_requests_are_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        LaunchRequest(**request_)


def test_launch_among_launched_processes_is_refused_or_takes_its_number(monkeypatch, capsys):
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ValueError, match=r"itself started 2 times \(by MPICH\)"):
        launch(LaunchRequest(["train"], processes=2), dry_run=True)
    once = LaunchRequest(["train"], nodes=2, processes_per_node=3, launcher="torchrun", address="a", port=7)
    launch(once, dry_run=True)
    assert (
        "--nnodes 2 --node-rank 1 --master-addr a --master-port 7 --nproc-per-node 3"
        in capsys.readouterr().out
    )


BECOME = "import sys; from multipack.launch.launcher import become; become(sys.argv[1:])"


def test_the_command_takes_the_place_of_launch_with_its_exit_code_and_signals():
    assert subprocess.run([sys.executable, "-c", BECOME, "sh", "-c", "exit 7"], check=False).returncode == 7
    waiting = subprocess.Popen(
        [
            sys.executable,
            "-c",
            BECOME,
            "sh",
            "-c",
            "trap 'kill $!; exit 9' TERM; sleep 60 & echo ready; wait",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout.readline() == "ready\n"
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(timeout=30) == 9
    waiting.stdout.close()


def test_a_free_port_is_one():
    assert 1024 < free_port() < 65_536


def test_launching_needs_no_torch():
    code = "import sys, multipack.launch.launcher, multipack.launch.submit, multipack.cli.launching as _;"
    code += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
