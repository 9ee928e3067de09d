"""torch.compile, block by block: one compilation serves every layer and every pack.

    embedding ─▶ [ block ] ─▶ [ block ] ─▶ … ─▶ norm ─▶ head, loss
                  compiled     the same code

Blocks run the same code with different weights, so they are compiled once, whatever their number. The code before and
after them, which reads integers of a pack on the host, is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multipack.models.decoder import Decoder


def compile_blocks(model: Decoder, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let every block of the model be compiled when it first runs; in place.

    Names of parameters, state dictionaries and hooks stay. Packs of one size (`PackedCollator.pad_to`) need one
    compilation, packs of varying sizes two: for the first size, then for all. Each combination of gradient mode and
    autocast dtype is compiled separately.

    Args:
        model: already tiled, checkpointed and divided, but not yet sharded or replicated.
        backend: torch.compile's; `"inductor"` needs a C++ compiler on a CPU, Triton on a GPU.
    """
    for block in model.blocks:
        block.compile(backend=backend)
