"""Environments as the launchers' own manuals, and runs of MPICH 5.0 and Open MPI 5.0, give them."""

import pytest

from multipack.parallel.ranks import Ranks, find_ranks, port_of, rendezvous

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "node001",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_NODEID": "1",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
}
BATCH = {  # what a script of sbatch sees: a task of no step
    "SLURM_JOB_ID": "200505",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gnode[10,20]",
}
SRUN = {
    **BATCH,
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gnode[10,20]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


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


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "8"}, "RANK=0 and OMPI_COMM_WORLD_RANK=5"),
        ({**MPICH, "WORLD_SIZE": "4"}, "WORLD_SIZE=4 and PMI_SIZE=8"),
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "8"}, "PMI_RANK=2 and SLURM_PROCID=5"),
        ({**SRUN, "RANK": "5", "WORLD_SIZE": "1"}, "WORLD_SIZE=1 and SLURM_STEP_NUM_TASKS=8"),
        ({"WORLD_SIZE": "4"}, r"RANK is not.*multipack launch -n 4"),
        ({"RANK": "1"}, r"RANK=1 is set.*WORLD_SIZE"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"RANK=4 is no rank of WORLD_SIZE=4.*0 … 3"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, r"RANK='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, r"WORLD_SIZE=0 is no number of processes"),
    ],
)
def test_incomplete_variables_and_launchers_that_disagree_are_refused(environment, named):
    with pytest.raises(ValueError, match=named):
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


def test_ports_are_those_that_linux_does_not_hand_out():
    ports = {port_of(str(job)) for job in range(2000)}
    assert min(ports) >= 16_384
    assert max(ports) < 32_768
    assert len(ports) > 1700
