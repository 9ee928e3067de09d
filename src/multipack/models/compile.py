"""torch.compile, block by block: one compilation serves every layer and every pack.

    embedding ─▶ [ block ] ─▶ [ block ] ─▶ … ─▶ norm ─▶ head, loss
                  compiled     the same code

Blocks run the same code with different weights, so they are compiled once, whatever their number. The code before and
after them, which reads integers of a pack on the host, is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from multipack.models.decoder import Decoder
from multipack.ops.loss import linear_cross_entropy


def compile_blocks(model: Decoder, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let every block of the model, and on a GPU the function of its logits, be compiled when it first runs; in place.

    Names of parameters, state dictionaries and hooks stay. Packs of one size (`PackedCollator.pad_to`) need one
    compilation, packs of varying sizes two: for the first size, then for all. The number and the length of documents
    are symbolic from the first compilation on. Each combination of gradient mode and autocast dtype is compiled
    separately. In DDP a block stays one graph: gradients of a block are complete together anyway.

    Args:
        model: already tiled, checkpointed and divided, but not yet sharded or replicated.
        backend: torch.compile's; `"inductor"` needs a C++ compiler on a CPU, Triton on a GPU.
    """
    for block in model.blocks:
        block.compile(backend=backend)
        block._compiled_call_impl = _configured(block._compiled_call_impl)
    for name in ("loss_function", "training_loss"):
        function: Any = getattr(model, name, None)
        if getattr(function, "func", function) is linear_cross_entropy:
            setattr(model, name, partial(function, compiled=True))


def _configured(compiled: Any) -> Callable[..., Any]:
    """A compiled block, called with settings that torch has globally only; they are read while it compiles."""
    import torch._dynamo  # takes a second

    bounds = torch.compiler.config.patch(dynamic_sources=r".*\.cu_seqlens,.*\.max_seqlen")  # type: ignore[attr-defined]
    whole = torch._dynamo.config.patch(optimize_ddp=False)

    def call(*arguments: Any, **named: Any) -> Any:
        with bounds, whole:
            return compiled(*arguments, **named)

    return call
