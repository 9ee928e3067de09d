"""Activation checkpointing and tiling: less memory for activations, at the cost of recomputation.

    none        every intermediate of the forward pass is kept
    selective   ■ attention   ■ matrix products      kept        norms, rotations, activations, dropout   recomputed
    full        the block's input                    kept        the whole block                          recomputed

A block of width d, feed-forward width f, and key (and value) width k·d keeps about this many numbers per token, of 4
bytes each, or of 2 in bf16, besides attention's log-sum-exp per head (RMSNorms of bf16 rows on a CPU add 2 d):

    none        (6 + 2k) d + 4 f gated, or 2 f
    selective   (4 + 2k) d + 2 f gated, or f
    full        d

An element of a norm, a rotation or an activation takes a few operations to recompute. An element of a matrix product
or of attention takes two operations per number that is summed: hundreds to thousands. So `selective` keeps the outputs
of matrix products and attention, and recomputes the others. All matrix products cost about the same operations per
saved byte, so a finer choice among them gains nothing; `full` costs one more forward pass (Chen et al. 2016,
arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198). The backward pass does not read the output of a block's
last product, unless dropout follows, so it is neither kept nor recomputed.

**Tiles** bound the widest tensors, for blocks whose intermediates do not fit into memory even one block at a time: the
feed-forward runs on chunks of the tokens, each recomputed in the backward pass, and logits exist for a slice of the
vocabulary at a time (ops/loss.py). The products of the feed-forward and of the head are computed twice.

Losses and gradients of recomputed blocks are bit for bit the same: the same operations run on the same numbers, with
dropout's generator state and autocast restored. Tiles change the order of sums only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from multipack.models.decoder import Decoder
from multipack.models.layers import Block
from multipack.ops.attention import table
from multipack.ops.experts import QuantizedExperts

Recompute = Literal["none", "full", "selective"]

PRODUCTS = ("aten::mm", "aten::addmm")
"""torch's operators of matrix products, without and with a bias."""


def recompute_blocks(model: Decoder, kind: Recompute) -> None:
    """Checkpoint every block's activations in training, in place; evaluation is unchanged.

    Names of parameters and modules stay. Call it before blocks are compiled or sharded: FSDP then gathers a block's
    parameters once for the forward pass and once for the backward pass, in which the block is recomputed.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in ("none", "full", "selective"):
        raise ValueError(f"train.recompute={kind} is unknown; choose none, full or selective")
    attention = tuple(name for row in table.BACKENDS for name in row.operators)
    block: Any
    for block in model.blocks:
        # Without dropout nothing is drawn, and saving the generators' states costs time in every block.
        is_own = isinstance(block, Block)
        draws = not is_own or any(getattr(module, "dropout", 0) > 0 for module in block.modules())
        options: dict[str, Any] = {"preserve_rng_state": draws}
        if kind == "selective":
            policy = partial(_policy, attention, block.unsaved_matrices() if is_own else set())
            options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        if is_own:
            block.around = None if kind == "none" else partial(_checkpointed, options)
        elif kind != "none":
            for module in block.modules():
                if isinstance(module, QuantizedExperts):
                    module.recomputed = True
            block.forward = partial(_in_training, block, options, block.forward)


def tile_layers(model: Decoder, tiles: int) -> None:
    """Run every feed-forward on `tiles` chunks of the tokens, and losses on as many slices of the vocabulary.

    In place; names and shapes of parameters stay. Call it after tensors are divided, before `recompute_blocks`.

    Raises:
        ValueError: fewer than 1 tile.
    """
    if tiles < 1:
        raise ValueError(f"train.tiles must be at least 1, got {tiles}")
    if tiles == 1:
        return
    block: Any
    for block in model.blocks:
        block.tiles = tiles
    model.loss_options = replace(model.loss_options, vocabulary_tiles=tiles)


def _in_training(
    block: nn.Module, options: dict[str, Any], compute: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """The forward pass of a block of transformers, checkpointed in training."""
    if not block.training:
        return compute(*arguments, **named)
    return checkpoint(compute, *arguments, use_reentrant=False, **options, **named)


def _checkpointed(options: dict[str, Any], compute: Callable[..., Tensor], *arguments: Any) -> Tensor:
    out: Tensor = checkpoint(compute, *arguments, use_reentrant=False, **options)
    return out


def _policy(
    attention: tuple[str, ...],
    unsaved: set[tuple[int, int]],
    _: Any,
    operator: Any,
    *arguments: Any,
    **__: Any,
) -> CheckpointPolicy:
    """Whether to keep an operator's output: of attention, and of products with all but the `unsaved` matrices.

    The matrix, of shape (inputs, outputs), is the last argument of `PRODUCTS`.
    """
    name = operator.name()
    if name in PRODUCTS:
        keep = tuple(arguments[-1].shape) not in unsaved
    else:
        keep = name.startswith(attention)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
