"""Joining and leaving a run: the ranks, device, store, watch and process group of its processes.

This process's rank comes from the launcher's variables (ranks.py). Without a launcher the world is a single process and
no process group exists.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from multipack.parallel.failures import NotConnected, Watch, first_line
from multipack.parallel.parallel_config import Device
from multipack.parallel.ranks import Ranks, find_ranks, rendezvous
from multipack.parallel.stores import keep_gloo_here, loopback_socket
from multipack.parallel.world import World

PR_SET_PDEATHSIG = 1
"""Number of an option of prctl, from Linux's header prctl.h."""


def choose_device(requested: Device, local_rank: int) -> torch.device:
    """The device of this process; raises a ValueError if it has none of the requested kind."""
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device=cuda, but torch sees no GPU here; use train.device=cpu")
    count = torch.cuda.device_count()
    if count == 1:
        # Schedulers and wrapper scripts may show each process its own GPU only; see `_check_own_gpu`.
        local_rank = 0
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: there are {count};"
            " start fewer processes or use train.device=cpu"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def connected(
    device: Device = "auto", timeout_seconds: float = 600.0, group_of_one: bool = False
) -> Iterator[World]:
    """Join the processes that a launcher started; leave them on exit.

    A clean exit ends with a barrier: without it gloo sometimes aborts, because a rank that leaves early closes
    connections that others still use. After an error there is no barrier, because the others may be in another
    collective; the launcher ends them.

    Args:
        device: `auto` uses a GPU if there is one.
        timeout_seconds: how long a collective waits for a missing rank before it raises.
        group_of_one: whether a single process has a process group too, as FSDP needs it.

    Yields:
        The world, with its process group initialized if there is more than one process, or `group_of_one`.

    Raises:
        ValueError: the launcher's variables are incomplete or contradictory, or the device is not available.
    """
    ranks = find_ranks(os.environ)
    is_alone = ranks.size == 1
    address = ("127.0.0.1", 0) if is_alone else rendezvous(os.environ, ranks)
    own = choose_device(device, 0 if is_alone else ranks.local_rank)
    if own.type == "cuda":
        use_expandable_segments()
    program = Path(sys.argv[0]).name
    command = " ".join(["python -m multipack" if program == "__main__.py" else program, *sys.argv[1:]])
    place: dict[str, Any] = {"rank": ranks.rank, "size": ranks.size, "device": own}
    place |= {"launcher": ranks.launcher, "command": command}
    if is_alone and not group_of_one:
        yield World(**place)
        return
    if ranks.launcher == "torchrun":
        _end_with_parent()
    backend = "gloo"
    if own.type == "cuda":
        torch.cuda.set_device(own)
        backend = "nccl"
    keep_gloo_here(address[0])
    store, watch = _meet(os.environ, backend, ranks, address, timeout_seconds)
    try:
        _start_group(store, backend, ranks, timeout_seconds, own)
        yield World(**place, backend=backend, timeout_seconds=timeout_seconds, watch=watch)
        dist.barrier()
    except BaseException as error:
        failure = watch.report(error)
        watch.close()
        # nccl would wait here for ranks that are in a collective.
        if backend != "nccl" and dist.is_initialized():
            dist.destroy_process_group()
        if failure is not error:
            raise failure from None
        raise
    watch.close()
    dist.destroy_process_group()


def use_expandable_segments() -> None:
    """Use expandable segments of GPU memory, which packs of different sizes fragment less, unless the user chose."""
    chosen = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys()
    if not chosen and torch.version.hip is None:
        # Newer versions of torch warn in torch.cuda.memory._set_allocator_settings.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _meet(
    environment: Mapping[str, str],
    backend: str,
    ranks: Ranks,
    address: tuple[str, int],
    timeout_seconds: float,
) -> tuple[PrefixStore, Watch]:
    """Connect to the store of the run; under torchrun each restart has its own prefix of keys.

    A restarted worker would otherwise read the addresses that its predecessor left in the store, which torchrun's agent
    keeps. Without such an agent rank 0 opens the store.
    """
    restart = environment.get("TORCHELASTIC_RESTART_COUNT")
    kept = ranks.size > 1 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix, timeout = f"attempt-{restart}" if kept else "run", timedelta(seconds=timeout_seconds)
    try:
        serves = not kept and ranks.rank == 0
        listener = loopback_socket(*address) if serves else None
        opened = TCPStore(*address, ranks.size, serves, timeout, master_listen_fd=listener)
        own = TCPStore(address[0], opened.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = PrefixStore(prefix, opened)
        watch = Watch(PrefixStore(prefix, own), ranks.rank, ranks.size, timeout_seconds, backend == "nccl")
    except (dist.DistError, OSError) as error:
        raise ValueError(
            f"rank {ranks.rank} of {ranks.size}, on {socket.gethostname()}, did not meet the others at"
            f" {address[0]}:{address[1]} within parallel.timeout_seconds={timeout_seconds:g}: check that all of them"
            f" have started, MASTER_ADDR, MASTER_PORT and firewalls ({first_line(error)})"
        ) from error
    return store, watch


def _start_group(
    store: Store, backend: str, ranks: Ranks, timeout_seconds: float, device: torch.device
) -> None:
    """Initialize the process group."""
    if device.type == "cuda":
        _check_own_gpu(store, ranks, device)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise NotConnected(backend, timeout_seconds, error) from error


def _check_own_gpu(store: Store, ranks: Ranks, device: torch.device) -> None:
    """Refuse a GPU that another rank uses; indices do not show it if each process sees one GPU.

    Raises:
        ValueError: on one of the ranks.
    """
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if uuid is None or "MIG" in visible:  # instances of one GPU may have its UUID
        return
    host = socket.gethostname()
    first = store.compare_set(f"gpu/{host}/{uuid}", "", str(ranks.rank)).decode()
    if first != str(ranks.rank):
        raise ValueError(
            f"ranks {first} and {ranks.rank} use the same GPU of {host}, {uuid}: start one process for each GPU, or"
            " show each its own (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1)"
        )


def _end_with_parent() -> None:
    """Ask Linux to send SIGTERM, which saves and stops a run, when this process's parent, torchrun, dies."""
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
