import os
import subprocess
import sys

import pytest
import torch

from multipack.parallel import world as world_module
from multipack.parallel.world import choose_device, connected, hosts


def test_without_a_launcher_the_world_is_one_process():
    with connected("cpu") as world:
        assert (world.rank, world.size, world.backend, world.is_main) == (0, 1, "none", True)
        assert world.sum([1.5, 2.0]) == [1.5, 2.0]
        assert world.gather("a") == ["a"]
        assert world.from_main("b") == "b"
        assert len(hosts(world)) == 1
        world.barrier()


def test_a_missing_rank_is_an_error_after_the_timeout(monkeypatch):
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    with pytest.raises(Exception, match=r"(?i)time|clients"), connected("cpu", timeout_seconds=1):
        pass


def test_a_missing_gpu_is_refused():
    assert choose_device("cpu", 0) == torch.device("cpu")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"train\.device=cpu"):
        choose_device("cuda", 0)


def test_a_process_that_sees_one_gpu_of_its_own_takes_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert choose_device("auto", 2) == torch.device("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match="local rank 2"):
        choose_device("auto", 2)


@pytest.mark.parametrize(("kind", "destroyed"), [("cpu", 1), ("cuda", 0)])
def test_an_error_leaves_nccl_without_waiting_for_other_ranks(monkeypatch, kind, destroyed):
    """destroy_process_group of nccl waits for ranks that are in a collective, and the error would not be printed."""
    calls = []
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world_module, "choose_device", lambda *_: torch.device(kind, 0))
    monkeypatch.setattr(world_module, "_join", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append(1))
    with pytest.raises(KeyError), connected():
        raise KeyError
    assert len(calls) == destroyed


SUM = """
from multipack.parallel.world import connected
with connected("cpu", 30) as world:
    print(world.rank, world.local_rank, world.launcher, world.sum([world.rank + 1.0])[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_processes_of_srun_and_mpiexec_join_without_torchrun(launcher, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    job |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    started = []
    for rank in ("0", "1"):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        mpi = {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2"}
        given = {**job, **own} if launcher == "srun" else {**mpi, "PALS_APID": str(os.getpid())}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", SUM], env={**os.environ, **given}, **pipes))
    ended = [process.communicate(timeout=90) for process in started]
    named = {"srun": "srun", "mpiexec": "MPICH"}[launcher]
    assert [out.strip() for out, _ in ended] == [f"{rank} {rank} {named} 3.0" for rank in (0, 1)], ended
