"""Activation checkpointing: what a block's backward pass needs is kept, or computed again from the block's input.

    none        every intermediate of the forward pass is kept
    selective   ■ attention   ■ matrix products      kept        norms, rotations, activations, dropout   again
    full        the block's input                    kept        the whole block                          again

A block of width d, feed-forward width f and k·d of keys (and as much of values) keeps, for every token, about

    none        (6 + 2k) d + 4 f gated, or 2 f      so many numbers, each of 4 bytes, or of 2 in bf16, and the
    selective   (4 + 2k) d + 2 f gated, or f        log-sum-exp of attention, one for a head; RMSNorms that are no
    full        d                                   single kernel add 2 d to the first line

Where the line of `selective` runs follows from the work that brings a number back. An element of a norm, a rotation or
an activation costs a few operations; one of a matrix product costs twice the width that it sums over, and one of
attention twice the tokens that it sees: hundreds to thousands. So all of the first kind is dropped, for nearly nothing,
and all of the second is kept. Behind that line every byte costs as many operations as every other (2 d, for the
product of any width): a finer choice between products wins nothing, and who needs more memory takes `full`, whose price
is the forward pass once more (Chen et al. 2016, arXiv:1604.06174; what to keep: Korthikanti et al. 2022,
arXiv:2205.05198). The last product of a block is the exception: nothing in the backward pass reads its output, unless
dropout follows, so it is neither kept nor computed again.

Losses and gradients are bit for bit the same: the same operations run on the same numbers, dropout draws its numbers
again from the generator's state of then, and autocast is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "full", "selective"]

PRODUCTS = ("aten::mm", "aten::addmm")
"""Matrix products, without and with a bias, by the names of torch's operators."""

ATTENTION = ("attention", "attn", "flash")
"""What the names of all kernels of attention have one of: torch's own, ours, flash-attn's and xFormers'."""


class Layered(Protocol):
    """A model that has its layers in `blocks`, each with the hook `around` (models/decoder.py)."""

    blocks: nn.ModuleList


def recompute_blocks(model: Layered, kind: Recompute) -> None:
    """Let every block of the model keep less in training, in place; evaluation knows nothing of it.

    Names of parameters and modules stay as they are. To be called before blocks are compiled or wrapped: a wrapper that
    gathers a block's parameters does so outside, once for the forward pass and once for the backward pass, in which the
    block is computed again.

    Args:
        model: has `blocks`, as `Decoder` does.
        kind: `"full"`, `"selective"`, or `"none"`, which takes back what was there.

    Raises:
        ValueError: another kind.
    """
    if kind not in ("none", "full", "selective"):
        raise ValueError(f"train.recompute={kind} is unknown; there are none, full and selective")
    block: Any
    for block in model.blocks:
        block.around = None if kind == "none" else partial(_again, _options(block, kind))


def _again(options: dict[str, Any], compute: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """`compute` of the arguments; its intermediates are gone when it returns."""
    out: Tensor = checkpoint(compute, *arguments, use_reentrant=False, **options)
    return out


def _options(block: Any, kind: Recompute) -> dict[str, Any]:
    """What `checkpoint` is told."""
    # Without dropout nothing is drawn, and reading the generators' states for every block would be for nothing.
    options: dict[str, Any] = {"preserve_rng_state": block.dropout > 0}
    if kind == "selective":
        weight = block.feed_forward.down.weight
        weight = (
            weight.to_local() if hasattr(weight, "to_local") else weight
        )  # one rank's piece of a divided matrix
        last = None if block.dropout else tuple(reversed(weight.shape))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, last))
    return options


def _policy(
    last: tuple[int, ...] | None, _: Any, operator: Any, *arguments: Any, **__: Any
) -> CheckpointPolicy:
    """Whether an operator's output is kept.

    Args:
        last: (inputs, outputs) of the matrix product whose output nobody reads again; None = there is none.
        operator: torch's, ours or another package's.
        arguments: what it is called with; the last one of a matrix product is its (inputs, outputs) matrix.
    """
    name = operator.name()
    if name in PRODUCTS:
        keep = last is None or tuple(arguments[-1].shape) != last
    else:
        keep = any(word in name for word in ATTENTION)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
