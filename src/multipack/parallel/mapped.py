"""Optimizer state and parameters in memory-mapped files of a local drive: `parallel.offload=disk`.

    file      tensor A ▐████▌  B ▐██████▌  C ▐███▌        shared mappings: the kernel writes and drops their pages
    memory             ▐    ▌    ▐██████▌    ▐   ▌        while B is stepped
    step      for every tensor: state read ▸ optimizer ▸ state written ▸ pages released

This is ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857) in its simplest form: nothing is read ahead. Any
optimizer can be offloaded, because it sees one tensor at a time, on the device of the parameter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from multipack.atomic import with_advice
from multipack.parallel.state import local


class MappedFiles:
    """Tensors of one rank in files, one each.

    Files are allocated in full, so that a full disk is an error and not a signal later, and removed from their folder
    as soon as they are mapped: their space is free when the process ends, however it ends.

    Raises:
        ValueError: there is no such folder, or it cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._sizes: dict[int, int] = {}
        if not self._folder.is_dir():
            raise ValueError(f"parallel.offload_folder={folder} is not a folder: create it, on a local drive")
        try:  # now, before the run has a directory
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(
                f"parallel.offload_folder={folder} cannot be written ({error.strerror}): choose another folder"
            ) from error

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, dtype and division in a file, in contiguous order; its values are zeros.

        Raises:
            OSError: the file could not be allocated; the message has the size.
        """
        if isinstance(tensor, DTensor):
            own = self.empty_like(tensor._local_tensor)
            return DTensor(own, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
                flat = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
        except OSError as error:
            raise with_advice(error, self._folder) from error
        self._sizes[flat.data_ptr()] = tensor.nbytes
        return flat.view(tensor.dtype).view(tensor.shape)

    def release(self, tensor: Tensor) -> None:
        """Drop the pages of a tensor from this process; the kernel writes changed pages. Values stay."""
        address = local(tensor).untyped_storage().data_ptr()
        if address in self._sizes:
            size = ctypes.c_size_t(self._sizes[address])
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), size, mmap.MADV_DONTNEED)


class MappedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer whose state is in files: it steps one tensor after the other.

    `param_groups` and `state` belong to the wrapped optimizer; tensors of `state` are on the CPU between steps.
    Counters of steps stay in memory. The wrapped optimizer has no state yet.
    """

    def __init__(self, wrapped: torch.optim.Optimizer, files: MappedFiles) -> None:
        self._wrapped, self._files = wrapped, files
        self._kept: dict[Tensor, dict[str, Tensor]] = {}
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.state = wrapped.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        groups = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, _ in groups:
                group["params"] = []
            for group, parameters in groups:
                for parameter in parameters:
                    if parameter.grad is not None:
                        group["params"] = [parameter]
                        self._read(parameter)
                        self._wrapped.step()
                        self._write(parameter)
                group["params"] = []
        finally:
            for group, parameters in groups:
                group["params"] = parameters

    def _read(self, parameter: Tensor) -> None:
        """Move a parameter's state to its device; on a CPU it is used where it is."""
        for slot, kept in self._kept.get(parameter, {}).items():
            local(self.state[parameter][slot]).data = kept.to(local(parameter).device)

    def _write(self, parameter: Tensor) -> None:
        """Move a parameter's state to its files, which are made at the first step, and release its pages."""
        kept = self._kept.setdefault(parameter, {})
        for slot, value in self.state[parameter].items():
            own = local(value)
            if own.dim():
                if slot not in kept:
                    kept[slot] = self._files.empty_like(own)
                if own.data_ptr() != kept[slot].data_ptr():
                    kept[slot].copy_(own)
                    own.data = kept[slot]
                self._files.release(own)
        self._files.release(parameter)
