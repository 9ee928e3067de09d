"""Memory-centric tiling: a layer whose intermediates do not fit runs as k tiles, with the same result.

    up ┌───────┐ tile 0      down ┌──┬──┬──┐      out = Σ over tiles of  act(x · up[tile]ᵀ) · down[:, tile]ᵀ
       ├───────┤ tile 1           │0 │1 │2 │
       ├───────┤ tile 2           └──┴──┴──┘      (T, f / k) at a time instead of (T, f), forward and backward
       └───────┘

The feed-forward of a block is by far the widest of what it computes: T × f numbers, in four tensors where it is gated.
Each tile is computed from x again in the backward pass, so that only x is kept between the passes, and of the wide
tensors a k-th exists at a time. Logits are wider still: ops/loss.py computes them for so many slices of the
vocabulary as there are tiles. The idea is that of DeepSpeed's TiledLinear (Rajbhandari et al. 2021, arXiv:2104.07857,
section 5.1.3); here tiles are views, so that parameters keep their names, shapes, gradients and optimizer state.

What this costs: the two first products of the feed-forward are computed twice, and logits too. What it does not change:
shards (FSDP) gather the whole block's weights for its turn; tiles bound what is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multipack.models.decoder import Decoder, FeedForward, cast_once
from multipack.ops.vocabulary import add_product, exact_dtype, slices

LOSSES = ("loss_function", "training_loss", "log_probabilities")
"""Attributes of decoders that project onto the vocabulary (ops/loss.py)."""


def tile_layers(model: Decoder, tiles: int) -> None:
    """Let every feed-forward, and the last projection with its loss, run as `tiles` tiles, in place.

    Names and shapes of parameters stay as they are. To be called before blocks are recomputed, compiled or wrapped.

    Args:
        model: as built; a part of a pipeline too.
        tiles: slices of the feed-forward's width and of the vocabulary, as even as may be; 1 leaves the model as it is.

    Raises:
        ValueError: fewer tiles than 1, or more than the feed-forward is wide.
    """
    if tiles < 1:
        raise ValueError(f"train.tiles must be at least 1, got {tiles}")
    if tiles > model.shape.d_ff:
        raise ValueError(
            f"train.tiles={tiles} is more than model.d_ff={model.shape.d_ff} can be cut into: use at most"
            f" {model.shape.d_ff}"
        )
    if tiles == 1:
        return
    block: Any
    for block in model.blocks:
        block.feed_forward = TiledFeedForward(block.feed_forward, tiles)
    for name in LOSSES:
        if hasattr(model, name):
            setattr(model, name, partial(getattr(model, name), vocabulary_tiles=tiles))


class TiledFeedForward(nn.Module):
    """A feed-forward that computes a slice of its width at a time, and each again in the backward pass.

    Args:
        whole: whose layers it takes over, under their names.
        tiles: slices of d_ff.
    """

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def __init__(self, whole: FeedForward, tiles: int) -> None:
        super().__init__()
        self.gated, self.tiles = whole.gated, tiles
        for name, layer in whole.named_children():  # in its order, which optimizers number parameters by
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, d)."""
        first = [self.up, self.gate] if self.gated else [self.up]
        weights = [layer.weight for layer in first]
        biases = [layer.bias for layer in first if layer.bias is not None]
        out: Tensor = tiled_feed_forward(cast_once(x), self.down.weight, weights, biases, self.tiles)
        return out if self.down.bias is None else out + self.down.bias.to(out.dtype)


@torch.library.custom_op("multipack::tiled_feed_forward", mutates_args=())
def tiled_feed_forward(
    x: Tensor, down: Tensor, first: Sequence[Tensor], biases: Sequence[Tensor], tiles: int
) -> Tensor:
    """down(silu(gate x) · up x), or down(gelu(up x)) without a gate, a slice of the width at a time.

    One operator: torch.compile, activation checkpointing and whatever else looks at operators see one node, which keeps
    nothing but its inputs. Products run in x's dtype, whatever that of the weights, sums over tiles in float32 or
    wider.

    Args:
        x: (T, d).
        down: (d, f).
        first: (f, d) each: up or, with a gate, up and gate.
        biases: (f,) for each of these, or none.
        tiles: slices of f.

    Returns:
        (T, d) in x's dtype, without the bias of down.
    """
    out = _zeros_wide(x)
    for tile in slices(down.shape[1], tiles):
        inner = _activated(_lifted(x, first, biases, tile))
        add_product(out, inner, down[:, tile].to(x.dtype).t())
    return out.to(x.dtype)


@tiled_feed_forward.register_fake
def _(x: Tensor, down: Tensor, first: Sequence[Tensor], biases: Sequence[Tensor], tiles: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("multipack::tiled_feed_forward_backward", mutates_args=())
def _backward(
    upstream: Tensor,
    x: Tensor,
    down: Tensor,
    first: Sequence[Tensor],
    biases: Sequence[Tensor],
    tiles: int,
) -> list[Tensor]:
    """Gradients of x, down, every one of `first` and every bias."""
    x_grad = _zeros_wide(x)
    grads = [torch.empty_like(each) for each in (down, *first, *biases)]
    for tile in slices(down.shape[1], tiles):
        lifted = _lifted(x, first, biases, tile)
        above = upstream @ down[:, tile].to(x.dtype)
        grads[0][:, tile] = upstream.t() @ _activated(lifted)
        for number, flowing in enumerate(_activated_backward(above, lifted)):
            add_product(x_grad, flowing, first[number][tile].to(x.dtype))
            grads[1 + number][tile] = flowing.t() @ x
            if biases:
                grads[1 + len(first) + number][tile] = flowing.sum(0, dtype=x_grad.dtype)
    return [x_grad.to(x.dtype), *grads]


@_backward.register_fake
def _(
    upstream: Tensor,
    x: Tensor,
    down: Tensor,
    first: Sequence[Tensor],
    biases: Sequence[Tensor],
    tiles: int,
) -> list[Tensor]:
    return [torch.empty_like(each) for each in (x, down, *first, *biases)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, down, first, biases, ctx.tiles = inputs
    ctx.counts = len(first), len(biases)
    ctx.save_for_backward(x, down, *first, *biases)


def _back(ctx: Any, upstream: Tensor) -> tuple[Tensor | list[Tensor] | None, ...]:
    x, down, *rest = ctx.saved_tensors
    count = ctx.counts[0]
    x_grad, down_grad, *grads = _backward(upstream, x, down, rest[:count], rest[count:], ctx.tiles)
    return x_grad, down_grad, grads[:count], grads[count:], None


tiled_feed_forward.register_autograd(_back, setup_context=_remember)


def _lifted(x: Tensor, first: Sequence[Tensor], biases: Sequence[Tensor], tile: slice) -> list[Tensor]:
    """(T, f of the tile) each: a slice of the first products."""
    given: Sequence[Tensor | None] = biases or [None] * len(first)
    return [
        F.linear(x, weight[tile].to(x.dtype), None if bias is None else bias[tile].to(x.dtype))
        for weight, bias in zip(first, given, strict=True)
    ]


def _activated(lifted: list[Tensor]) -> Tensor:
    if len(lifted) == 1:
        return F.gelu(lifted[0], approximate="tanh")
    up, gate = lifted
    return F.silu(gate).mul_(up)


def _activated_backward(above: Tensor, lifted: list[Tensor]) -> list[Tensor]:
    """Gradients of what was lifted, from that of what was activated."""
    if len(lifted) == 1:
        return [torch.ops.aten.gelu_backward(above, lifted[0], approximate="tanh")]
    up, gate = lifted
    return [F.silu(gate).mul_(above), torch.ops.aten.silu_backward(above.mul_(up), gate)]


def _zeros_wide(x: Tensor) -> Tensor:
    """Zeros in which tiles are summed."""
    return torch.zeros_like(x, dtype=exact_dtype(x))
