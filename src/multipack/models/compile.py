"""torch.compile, block by block: one compilation serves every layer, and every pack.

    embedding ─▶ [ block ] ─▶ [ block ] ─▶ … ─▶ norm ─▶ head, loss
                  compiled     the same code again

A transformer's blocks are the same code with other weights. Compiled one at a time, they are compiled once, whatever
their number, and what surrounds them (which reads a pack's numbers on the host) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn


class Layered(Protocol):
    """A model that has its layers in `blocks`."""

    blocks: nn.ModuleList


def compile_blocks(
    model: Layered, backend: str | Callable[..., Any] = "inductor", dynamic: bool | None = None
) -> None:
    """Compile every block of the model, in place, when it first runs.

    Names of parameters, state dictionaries and hooks stay as they are. Packs of one shape (`pad_to`) are compiled
    for once; packs whose numbers of slots differ, twice: for the first number, then for all. Running with and
    without gradients, or in another autocast dtype, counts anew.

    Args:
        model: has `blocks`, as `Decoder` does; what is done to the blocks before (checkpointing) is compiled with
            them, so this comes last of what changes a model and before what wraps it for several ranks.
        backend: torch.compile's; `"inductor"` needs a C++ compiler on a CPU, and Triton on a GPU.
        dynamic: torch.compile's; True = for all numbers of slots at once.
    """
    for block in model.blocks:
        block.compile(backend=backend, dynamic=dynamic)
