"""torch.compile, block by block: one compilation serves every layer and every pack.

    embedding ─▶ [ block ] ─▶ [ block ] ─▶ … ─▶ norm ─▶ head, loss
                  compiled     the same code

Blocks run the same code with different weights, so they are compiled once, whatever their number. The code before and
after them, which reads integers of a pack on the host, is not compiled.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from multipack.atomic import own_folder
from multipack.models.decoder import Decoder
from multipack.ops.autocast import use_copies

LEAST_CAPABILITY = (7, 0)
"""Compute capability of the oldest NVIDIA GPUs for which torch's inductor makes Triton kernels."""


def compiler_problem(device: torch.device) -> str:
    """Why torch.compile cannot make kernels for a GPU; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and there is no gcc or clang (or set CC)"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        return f"the compute capability of this GPU is {found}, and torch.compile needs {least}"
    return ""


def keep_compiled_code_private() -> None:
    """Give torch.compile a private folder of this user in the temporary folder, unless the user chose another.

    Later runs load pickles and shared objects from it, and other users can guess the name of torch's default.

    Raises:
        ValueError: another user has taken the folder's name.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own_folder(Path(tempfile.gettempdir())) / "compiled")
    except (OSError, ValueError) as error:
        raise ValueError(f"train.compile: {error}: set TORCHINDUCTOR_CACHE_DIR or TMPDIR") from error


def compile_blocks(
    model: Decoder, backend: str | Callable[..., Any] = "inductor", one_size: bool = False
) -> None:
    """Let every block of the model, and on a GPU the function of its logits, be compiled when it first runs; in place.

    Names of parameters, state dictionaries and hooks stay. One compilation serves all packs: the number and the length
    of documents are symbolic, and so is the number of slots unless packs have one size. Each combination of gradient
    mode and autocast dtype is compiled separately. DDP does not split a block's graph: the gradients of one block are
    ready at the same time anyway.

    Args:
        model: already tiled, checkpointed and divided, but not yet sharded or replicated.
        backend: torch.compile's; `"inductor"` needs a C++ compiler on a CPU, Triton on a GPU.
        one_size: whether all packs have one number of slots (`PackedCollator.pad_to`).
    """
    for block in model.blocks:
        block.compile(backend=backend)
        block._compiled_call_impl = _configured(block, one_size)
    model.loss_options = replace(model.loss_options, compiled=True)


def _configured(block: nn.Module, one_size: bool) -> Callable[..., Any]:
    """Calls a compiled block with the step's copies of its weights, and with settings that torch has globally only."""
    import torch._dynamo  # takes a second
    from torch.distributed.fsdp import FSDPModule

    compiled: Any = block._compiled_call_impl
    bounds = torch.compiler.config.patch(dynamic_sources=r".*\.cu_seqlens,.*\.max_seqlen")  # type: ignore[attr-defined]
    whole = torch._dynamo.config.patch(optimize_ddp=False)

    def call(x: Any, batch: Any, *others: Any) -> Any:
        shared = [] if batch.tree is None else vars(batch.tree)
        for tensor in tree_leaves(shared if one_size else (x, vars(batch), shared, others)):
            if isinstance(tensor, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # the slots, and what nodes and targets there are
        if not isinstance(block, FSDPModule):  # which replaces a block's parameters itself
            use_copies(block)
        with bounds, whole:
            return compiled(x, batch, *others)

    return call
