import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from multipack.parallel import joining
from multipack.parallel.joining import choose_device, connected
from multipack.parallel.ranks import Ranks
from multipack.parallel.stores import is_loopback, loopback_socket
from multipack.parallel.world import World, hosts


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
    error = r"rank 0 of 2, on .* within parallel\.timeout_seconds=1: .*MASTER_ADDR"
    with pytest.raises(ValueError, match=error), connected("cpu", timeout_seconds=1):
        pass


def test_a_missing_gpu_is_refused():
    assert choose_device("cpu", 0) == torch.device("cpu")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"train\.device=cpu"):
        choose_device("cuda", 0)


def test_a_process_that_sees_one_gpu_takes_it(monkeypatch):
    """Slurm's --gpus-per-task=1 and wrapper scripts name it by index or UUID, or show it without a variable."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto", 2) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda", 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="local rank 2"):
        choose_device("auto", 2)


@pytest.mark.parametrize(
    ("visible", "gpus", "refused"),
    [
        (["3", "2"], ["a", "b"], False),
        (["GPU-a", "GPU-a"], ["a", "a"], True),
        (["", ""], ["a", "a"], True),
        (["MIG-1", "MIG-2"], ["a", "a"], False),
        (["0", "1"], [None, None], False),
    ],
)
def test_two_ranks_of_a_host_do_not_share_a_gpu(monkeypatch, visible, gpus, refused):
    store = torch.distributed.HashStore()
    with pytest.raises(ValueError, match="ranks 0 and 1 use the same GPU") if refused else nullcontext():
        for rank, (variable, uuid) in enumerate(zip(visible, gpus, strict=True)):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
            properties = SimpleNamespace(uuid=uuid)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
            joining._check_own_gpu(store, Ranks(rank, 2), torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("variable", "times"), [("", 1), ("PYTORCH_CUDA_ALLOC_CONF", 0), ("PYTORCH_ALLOC_CONF", 0)]
)
def test_gpu_memory_grows_in_segments_unless_the_user_chose(monkeypatch, variable, times):
    found = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.setattr(joining, "choose_device", lambda *_: torch.device("cuda", 0))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "expandable_segments:False")
    with connected():
        assert found == ["expandable_segments:True"] * times


def test_ranks_that_do_not_connect_are_one_line(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)

    def fails(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed\nwith forty lines")

    monkeypatch.setattr(torch.distributed, "init_process_group", fails)
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME.*connectFullMesh failed\)$"):
        joining._start_group(None, "gloo", Ranks(0, 1), 5.0, torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "new_group", fails)
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME.*connectFullMesh failed\)$"):
        World().cpu_group()


ENDS = """
import sys, threading, time
import torch
from multipack.cli.command_options import fail
from multipack.parallel import joining
from multipack.parallel.failures import Watch

def waits(*_):
    time.sleep(60)

watch = Watch(torch.distributed.HashStore(), 0, 2, 60.0, blocks=False)
joining.choose_device = lambda *_: torch.device("cuda", 0)
joining._meet = lambda *_: (None, watch)
joining._start_group = lambda *_: None
torch.cuda.set_device = lambda _: None
joining.use_expandable_segments = lambda: None
torch.distributed.destroy_process_group = torch.distributed.barrier = waits
threading.Thread(target=waits).start()  # as a thread that writes a checkpoint
try:
    with joining.connected():
        {error}
except BaseException as error:
    fail(error, 2, one_line=isinstance(error, ValueError))
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("raise ValueError('document 17 is damaged')", "error: document 17 is damaged"),
        pytest.param("raise KeyboardInterrupt", "KeyboardInterrupt", marks=pytest.mark.slow),
        pytest.param("raise MemoryError('no more')", "MemoryError: no more", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_an_nccl_rank_is_printed_and_ends_the_process(error, message):
    """Leaving the process group waits for ranks that are in a collective, and so do threads."""
    place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-c", ENDS.format(error=error)]
    done = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == message


SUM = """
from multipack.parallel.joining import connected
with connected("cpu", 30) as world:
    print(world.rank, world.launcher, world.sum([world.rank + 1.0])[0])
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
    assert [out.strip() for out, _ in ended] == [f"{rank} {named} 3.0" for rank in (0, 1)], ended


@pytest.mark.parametrize(("host", "here"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_the_store_listens_where_the_ranks_are(host, here):
    """A host's own name is none of these: other hosts know it by another address than /etc/hosts does."""
    descriptor = loopback_socket(host, 0)
    assert (descriptor is not None) == here == is_loopback(host)
    if descriptor is not None:
        with socket.socket(fileno=descriptor) as listener:
            assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    assert not is_loopback(socket.gethostname()) or socket.gethostname() == "localhost"
