import pytest

from multipack.launch.allocation import find_allocation, find_launchers, flavor_of, parse_hostfile

SLURM = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gnode[10,20,25]",
    "SLURM_NTASKS": "10",
    "SLURM_TASKS_PER_NODE": "4(x2),2",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_PROCID": "0",
}


@pytest.fixture
def pbs(tmp_path):
    nodefile = tmp_path / "2024084.polaris-pbs-01"
    nodefile.write_text("x1.cm\nx1.cm\nx2.cm\nx2.cm\n")
    return {"PBS_JOBID": "2024084.polaris-pbs-01", "PBS_NODEFILE": str(nodefile)}


def test_slurm_variables():
    found = find_allocation(SLURM)
    assert (found.scheduler, found.job, found.processes, found.cores) == ("slurm", "200505", 10, 8)
    assert found.hosts == {"gnode10": 4, "gnode20": 4, "gnode25": 2}
    assert not found.in_step
    step = find_allocation({**SLURM, "SLURM_STEP_ID": "3"})
    assert step.in_step
    assert step.job == "200505.3"
    without_tasks = {name: value for name, value in SLURM.items() if name != "SLURM_NTASKS"}
    assert find_allocation(without_tasks).hosts == {"gnode10": 0, "gnode20": 0, "gnode25": 0}
    assert find_allocation({}).hosts == {}


def test_pbs_variables_and_hostfiles_within_a_job(pbs, tmp_path):
    found = find_allocation(pbs)
    assert (found.scheduler, found.job, found.processes) == ("pbs", "2024084.polaris-pbs-01", 4)
    assert found.hosts == {"x1.cm": 2, "x2.cm": 2}
    hostfile = tmp_path / "hosts"
    hostfile.write_text("x2.cm slots=1\n")
    assert find_allocation(pbs, str(hostfile)).hosts == {"x2.cm": 1}
    assert find_allocation({}, str(hostfile)).processes == 1
    hostfile.write_text("x3.cm\n")
    with pytest.raises(ValueError, match=r"x3\.cm.*x1\.cm, x2\.cm"):
        find_allocation(pbs, str(hostfile))
    with pytest.raises(FileNotFoundError):
        find_allocation({}, str(tmp_path / "none"))


def test_hostfiles_of_pbs_and_mpi():
    assert parse_hostfile("a.site\na.site\nb.site\n", "f") == {"a.site": 2, "b.site": 1}
    text = "# all\n\nfast slots=4 max_slots=8  # new\n  slow:2\nother\n"
    assert parse_hostfile(text, "f") == {"fast": 4, "slow": 2, "other": 1}
    for line in ("a slots=x", "a slots=0", "a:b", "a cores=4", "a,b", ":4"):
        with pytest.raises(ValueError, match="hosts, line 2"):
            parse_hostfile(f"good\n{line}\n", "hosts")
    with pytest.raises(ValueError, match="hosts names no host"):
        parse_hostfile("# nothing\n", "hosts")


def test_flavors_of_launchers():
    for name, path, version, flavor in (
        ("srun", "/usr/bin/srun", "", "slurm"),
        ("mpiexec", "/opt/cray/pals/1.8/bin/mpiexec", "mpiexec version 1.8.0", "pals"),
        ("mpiexec", "/usr/bin/mpiexec.hydra", "HYDRA build details:\n Version: 5.0.2", "mpich"),
        ("mpirun", "/opt/intel/mpirun", "Intel(R) MPI Library for Linux* OS, Version 2021.12", "mpich"),
        ("mpirun", "/usr/bin/prterun", "mpirun (Open MPI) 5.0.11", "openmpi"),
        ("mpiexec", "/usr/bin/mpiexec", "something else", None),
    ):
        assert flavor_of(name, f"{path} {version}") == flavor


def test_launchers_on_the_path(tmp_path):
    for name, says in (
        ("mpiexec", "mpiexec (Open MPI) 4.1.6"),
        ("mpirun", "unknown"),
        ("srun", "never asked"),
    ):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(0o755)
    assert find_launchers({"PATH": str(tmp_path)}) == {"srun": "slurm", "mpiexec": "openmpi"}
    assert find_launchers({"PATH": str(tmp_path / "none")}) == {}
