"""Environments as the launchers' own manuals, and runs of MPICH 5.0 and Open MPI 5.0, give them."""

import pytest

from multipack.parallel.ranks import Ranks, expand_hostlist, find_ranks, port_of, rendezvous


def named(prefix="", **values):
    return {f"{prefix}{name}": str(value) for name, value in values.items()}


TORCHRUN = named(RANK=5, LOCAL_RANK=1, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
TORCHRUN |= named(TORCHELASTIC_RUN_ID="none", MASTER_ADDR="node001", MASTER_PORT=29500)
OPEN_MPI = named("OMPI_COMM_WORLD_", RANK=5, SIZE=8, LOCAL_RANK=1, LOCAL_SIZE=4) | named(PMIX_RANK=5)
MPICH = named(PMI_RANK=5, PMI_SIZE=8, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=4)
PALS = named("PALS_", RANKID=5, LOCAL_RANKID=1, LOCAL_SIZE=4, NODEID=1)
PALS |= named("PMI_", RANK=5, SIZE=8, LOCAL_RANK=1, LOCAL_SIZE=4)
BATCH = named("SLURM_", JOB_ID=200505, PROCID=0, LOCALID=0, NTASKS=8, NPROCS=8, TASKS_PER_NODE="4(x2)")
BATCH |= {"SLURM_JOB_NODELIST": "gnode[10,20]"}  # what a script of sbatch sees: a task of no step
STEP = named("SLURM_STEP_", ID=0, NUM_TASKS=8, NODELIST="gnode[10,20]", TASKS_PER_NODE="4(x2)")
SRUN = BATCH | named("SLURM_", PROCID=5, LOCALID=1) | STEP


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [(TORCHRUN, "torchrun"), (OPEN_MPI, "Open MPI"), (MPICH, "MPICH"), (PALS, "PALS"), (SRUN, "srun")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_launcher_is_recognized(environment, launcher):
    found = find_ranks(environment)
    assert (found.rank, found.size, found.local_rank, found.launcher) == (5, 8, 1, launcher)
    assert found.local_size == (0 if launcher == "srun" else 4)


def test_without_a_launcher_there_is_one_process():
    assert find_ranks({}) == Ranks()
    assert find_ranks({"RANK": "0", "WORLD_SIZE": ""}) == Ranks()
    assert find_ranks(BATCH).size == 1


def test_a_step_of_srun_that_holds_other_launchers_does_not_count():
    """A shell of srun, one torchrun a host, the helpers of mpiexec; and processes of srun that have PMI too."""
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert find_ranks(shell).size == 1
    assert find_ranks({**shell, **MPICH}).rank == 5
    tasks = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    one_a_node = {**SRUN, **tasks}
    assert find_ranks({**one_a_node, **TORCHRUN}).rank == 5
    assert find_ranks({**one_a_node, **OPEN_MPI}).rank == 5
    assert find_ranks({**one_a_node, **MPICH}).launcher == "MPICH"
    both = {**one_a_node, "PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_LOCALID": "0"}
    assert find_ranks(both).local_rank == 0


def test_incomplete_variables_and_launchers_that_disagree_are_refused():
    for environment, message in (
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "8"}, "RANK=0 and OMPI_COMM_WORLD_RANK=5"),
        ({**MPICH, "WORLD_SIZE": "4"}, "WORLD_SIZE=4 and PMI_SIZE=8"),
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "8"}, "PMI_RANK=2 and SLURM_PROCID=5"),
        ({"WORLD_SIZE": "4"}, r"RANK is not.*multipack launch -n 4"),
        ({"RANK": "1"}, r"RANK=1 is set.*WORLD_SIZE"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"RANK=4 is no rank of WORLD_SIZE=4.*0 … 3"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, r"RANK='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, r"WORLD_SIZE=0 is no number of processes"),
    ):
        with pytest.raises(ValueError, match=message):
            find_ranks(environment)


def test_the_parts_that_agree_are_put_together():
    """`multipack launch` exports WORLD_SIZE; scripts that show each process one GPU set LOCAL_RANK=0."""
    alone = {name: value for name, value in PALS.items() if not name.startswith("PMI")}
    assert find_ranks({**alone, "WORLD_SIZE": "8"}).rank == 5
    assert find_ranks({**SRUN, "LOCAL_RANK": "0", "RANK": "5", "WORLD_SIZE": "8"}).local_rank == 0


def test_the_address_is_given_or_that_of_the_first_host():
    assert rendezvous(TORCHRUN, find_ranks(TORCHRUN)) == ("node001", 29500)
    assert rendezvous(SRUN, find_ranks(SRUN)) == ("gnode10", port_of("200505.0"))
    here = {**MPICH, "MPI_LOCALNRANKS": "8"}
    assert rendezvous(here, find_ranks(here))[0] == "127.0.0.1"
    with pytest.raises(ValueError, match=r"MASTER_ADDR.*multipack launch -n 8"):
        rendezvous(MPICH, find_ranks(MPICH))


def test_ports_are_below_the_ephemeral_ones_of_linux():
    ports = {port_of(str(job)) for job in range(2000)}
    assert 16_384 <= min(ports) <= max(ports) < 32_768
    assert len(ports) > 1700


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("node[001-003,007],gpu2", ["node001", "node002", "node003", "node007", "gpu2"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("b, a ,a", ["b", "a", "a"]),
        ("x3101c0s13b0n0.hsn.cm", ["x3101c0s13b0n0.hsn.cm"]),
        ("", []),
    ],
)
def test_host_lists_expand(expression, names):
    assert expand_hostlist(expression) == names


def test_invalid_and_oversized_host_lists_are_refused():
    wrong = ("n[1-3", "n1]", "n[[1]]", "n[3-1]", "n[a]", "n[]", "n[1-]", "a b", "n[0-6:2]", "n[0-999999999]")
    for expression in wrong:
        with pytest.raises(ValueError, match="host list"):
            expand_hostlist(expression)
