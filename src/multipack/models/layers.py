"""Layers of the decoder: blocks, attention, feed-forward.

    x ─┬─ norm ─ attention ─ norm ─ + ─┬─ norm ─ feed-forward ─ norm ─ + ─▶      `norms` of a shape says which of the
       └────────────────────────────┘  └───────────────────────────────┘         norms a block has

Tensors have no batch dimension: their first dimension is the T tokens of a pack. A new module states here how tensor
parallelism divides it (`BLOCK_PLAN`) and how it begins (`draw_initial`). What other modules replace on a built decoder:

    Block.around, Block.tiles              models/recompute.py     activation checkpointing, tiles
    Attention.attend                       parallel/context.py     ranks that divide documents
    Attention.rotate, FeedForward.swiglu   models/kernels.py       Liger's kernels
    RMSNorm.function                       models/kernels.py       Liger's kernel
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multipack.data.packs.batch import PackedBatch
from multipack.models.rotary import Rotation, rotate_both
from multipack.ops.attention import attention
from multipack.ops.autocast import in_autocast_dtype
from multipack.ops.norm import JointRMSNorm, OffsetRMSNorm, RMSNorm
from multipack.shapes import ModelShape

Attend = Callable[..., Tensor]
"""A function with the signature of `attention`."""


BLOCK_PLAN = {
    "attention_norm": "norm",
    "attention": "gathers",
    "attention.query": "column",
    "attention.query_norm": "norm",
    "attention.key": "heads",
    "attention.key_norm": "norm",
    "attention.value": "heads",
    "attention.output": "row",
    "attention_out_norm": "norm",
    "feed_forward_norm": "norm",
    "feed_forward_out_norm": "norm",
    "feed_forward": "gathers",
    "feed_forward.gate": "column",
    "feed_forward.up": "column",
    "feed_forward.down": "row",
}
"""Name of a module of a block → how tensor parallelism divides it: matrices by outputs (`column`) or by inputs (`row`),
matrices of keys and values by whole heads, of which several ranks may have the same (`heads`). Modules of `norm`
process a part of the tokens or heads; the input of `gathers` is gathered to all tokens. Not every shape has all
modules."""


class Block(nn.Module):
    """Attention and feed-forward, each applied to the normalized residual stream and added to it.

    Attributes:
        around: if set, training calls around(compute, x, batch, rotation) instead of compute(x, batch, rotation): the
            hook for activation checkpointing, inside the block so that wrappers (FSDP, torch.compile) stay outside.
        tiles: chunks of the tokens on which the feed-forward runs, each recomputed in the backward pass; 1 = no
            chunks.
    """

    def __init__(self, shape: ModelShape, attention: str, layer: int) -> None:
        super().__init__()
        self.dropout, self.scale = shape.dropout, shape.residual_scale
        before, after = shape.norms != "after", shape.norms != "before"
        self.attention_norm = make_norm(shape) if before else None
        self.attention = Attention(shape, attention, layer)
        self.attention_out_norm = make_norm(shape) if after else None
        self.feed_forward_norm = make_norm(shape) if before else None
        self.feed_forward = FeedForward(shape)
        self.feed_forward_out_norm = make_norm(shape) if after else None
        self.around: Callable[..., Tensor] | None = None
        self.tiles = 1

    def forward(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, attend: Attend | None = None
    ) -> Tensor:
        """(T, d) → (T, d); `attend` as in `Attention.forward`."""
        if self.around is not None and self.training and attend is None:
            return self.around(self.compute, x, batch, rotation)
        return self.compute(x, batch, rotation, attend)

    def compute(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, attend: Attend | None = None
    ) -> Tensor:
        """`forward` without `around`."""
        branch = self.attention(_normed(self.attention_norm, x), batch, rotation, attend)
        x = self._add(x, _normed(self.attention_out_norm, branch))
        branch = self._feed_forward(_normed(self.feed_forward_norm, x))
        return self._add(x, _normed(self.feed_forward_out_norm, branch))

    def unsaved_matrices(self) -> set[tuple[int, int]]:
        """(inputs, outputs) of the matrices whose products selective checkpointing does not keep.

        These are the block's last product, which the backward pass does not read unless dropout or a norm follows;
        with tiles, all products of the feed-forward, whose chunks are recomputed; and updates of adapters, which cost
        little and are as large as the products that they are added to.
        """
        updates = {_transposed(each) for name, each in self.named_parameters() if name.endswith("lora_b")}
        matrices = self.feed_forward.matrices()
        if self.tiles > 1:
            return {*matrices, *updates}
        last = self.dropout or self.feed_forward_out_norm is not None
        return updates if last else {*matrices[-1:], *updates}

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """The residual stream with the result of a branch."""
        branch = F.dropout(branch, self.dropout, self.training)
        return x + branch if self.scale == 1.0 else torch.add(x, branch, alpha=self.scale)

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.tiles == 1:
            return cast(Tensor, self.feed_forward(x))
        parts = [part for part in x.tensor_split(self.tiles) if len(part)]
        return torch.cat([checkpoint(self.feed_forward, part, use_reentrant=False) for part in parts])


class Attention(nn.Module):
    """Query, key and value projections, attention, and the output projection.

    The number of heads follows from the weights, which are a part of the whole under tensor parallelism.

    Attributes:
        attend: the attention function.
        rotate: (query, key, rotation) → both, rotated.
    """

    def __init__(self, shape: ModelShape, backend: str, layer: int) -> None:
        super().__init__()
        width = shape.head_width
        self.head_width, self.backend, self.window = width, backend, shape.window_of(layer) or None
        bias = shape.bias or shape.qkv_bias
        self.query = nn.Linear(shape.d_model, shape.heads * width, bias=bias)
        self.key = HeadLinear(shape.d_model, shape.kv_heads, width, bias)
        self.value = HeadLinear(shape.d_model, shape.kv_heads, width, bias)
        self.output = nn.Linear(shape.heads * width, shape.d_model, bias=shape.bias)
        if shape.head_norm == "head":
            self.query_norm, self.key_norm = make_norm(shape, width), make_norm(shape, width)
        elif shape.head_norm == "all":
            self.query_norm = JointRMSNorm(shape.heads * width, eps=shape.norm_eps)
            self.key_norm = JointRMSNorm(shape.kv_heads * width, eps=shape.norm_eps)
        self.head_norm = shape.head_norm
        # Kernels multiply by 1 / √D: queries are multiplied by the rest of the factor.
        self.scale = shape.attention_scale * width**0.5 if shape.attention_scale else 1.0
        self.growth, self.trained_context = shape.attention_growth, shape.rope_context
        self.cap = shape.attention_cap or None
        self.attend: Attend = attention
        self.rotate: Callable[..., tuple[Tensor, Tensor]] = rotate_both

    def forward(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, attend: Attend | None = None
    ) -> Tensor:
        """(T, d) → (T, d); `attend`, a key-value cache's function, replaces `self.attend` in this call."""
        x = in_autocast_dtype(x)  # once: otherwise each projection makes its own copy
        heads = (-1, self.head_width)
        query, key = self.query(x), self.key(x)
        if self.head_norm == "all":
            query, key = _normed(self.query_norm, query), _normed(self.key_norm, key)
        query, key = query.unflatten(-1, heads), key.unflatten(-1, heads)
        if self.head_norm == "head":
            query, key = _normed(self.query_norm, query), _normed(self.key_norm, key)
        value = self.value(x).unflatten(-1, heads)
        if self.scale != 1.0:
            query = query * self.scale
        if self.growth:
            factor = 1.0 + self.growth * torch.log1p(batch.position_ids // self.trained_context)
            query = query * factor.to(query.dtype)[:, None, None]
        if rotation is not None:
            query, key = self.rotate(query, key, rotation)
        attend = attend or self.attend
        values = attend(query, key, value, batch, self.backend, window=self.window, cap=self.cap)
        out: Tensor = self.output(values.flatten(1))
        return out


class HeadLinear(nn.Linear):
    """The projection to keys or values of `heads` heads; tensor parallelism needs their number.

    A rank has whole heads. Where there are fewer heads than ranks, several have the same one.
    """

    def __init__(self, inputs: int, heads: int, width: int, bias: bool) -> None:
        super().__init__(inputs, heads * width, bias=bias)
        self.heads = heads


class FeedForward(nn.Module):
    """Feed-forward with GELU (GPT-2's tanh approximation), SwiGLU or GeGLU (Shazeer 2020, arXiv:2002.05202).

    A class that replaces it must define `forward` and `matrices`.

    Attributes:
        swiglu: (gate, up) → their product after SiLU.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.activation = shape.activation
        self.swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
        if shape.gated:
            self.gate = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, d)."""
        x = in_autocast_dtype(x)  # once: otherwise each projection makes its own copy
        if self.activation == "swiglu":
            inner = self.swiglu(self.gate(x), self.up(x))
        elif self.activation == "geglu":
            inner = F.gelu(self.gate(x), approximate="tanh") * self.up(x)
        else:
            inner = F.gelu(self.up(x), approximate="tanh")
        out: Tensor = self.down(inner)
        return out

    def matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each matrix (of this rank's part of it), in the order of their use."""
        layers: list[Any] = list(self.children())
        return [_inputs_outputs(layer) for layer in layers]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) · up."""
    return F.silu(gate) * up


def make_norm(shape: ModelShape, width: int = 0) -> nn.Module:
    """The normalization layer of a shape, over `width` elements; 0 = d_model."""
    if shape.norm == "layernorm":
        return nn.LayerNorm(width or shape.d_model, eps=shape.norm_eps, bias=shape.bias)
    kind = OffsetRMSNorm if shape.norm == "rmsnorm+1" else RMSNorm
    return kind(width or shape.d_model, eps=shape.norm_eps)


def _inputs_outputs(layer: Any) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer's matrix, or of this rank's part of it."""
    if layer.weight is not None:
        return _transposed(layer.weight)
    columns, rows = _transposed(layer.weight_codes)
    return layer.format.facts.per_byte * columns, rows


def _transposed(matrix: Any) -> tuple[int, int]:
    """(columns, rows) of a matrix, or of this rank's part of it."""
    rows, columns = (matrix.to_local() if hasattr(matrix, "to_local") else matrix).shape
    return columns, rows


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    """A norm over the last dimension of (T, …), computed in the dtype of its weight; x without a norm."""
    if norm is None:
        return x
    rows: Tensor = norm(x.reshape(-1, x.shape[-1]).to(cast(Tensor, norm.weight).dtype))
    return rows.view(x.shape).to(x.dtype)


def draw_initial(name: str, parameter: Tensor, module: nn.Module, shape: ModelShape, seed: int) -> None:
    """Initialize a parameter of `module`: see `Decoder.reset_parameters`. One without a rule is an error.

    Parameters of a model of transformers are zeros, until they are read (models/foreign.py).
    """
    if shape.architecture:
        parameter.zero_()
        return
    path, _, own = name.rpartition(".")
    if isinstance(module, nn.Linear | nn.Embedding) and own == "weight":
        if parameter.is_meta:
            return
        writes_residual = path.endswith((".attention.output", ".feed_forward.down"))
        std = (shape.d_model * (2 * shape.layers if writes_residual else 1)) ** -0.5
        # Fake tensors use a generator of the CPU.
        is_cuda = parameter.device.type == "cuda" and torch.cuda.is_available()
        generator = torch.Generator(parameter.device if is_cuda else "cpu")
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        parameter.normal_(std=std, generator=generator.manual_seed(int.from_bytes(digest[:4], "little")))
    elif isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm):
        parameter.fill_(0.0 if own == "bias" or isinstance(module, OffsetRMSNorm) else 1.0)
    else:
        raise ValueError(
            f"{path} ({type(module).__name__}) has a parameter without a rule for initial values, {own}:"
            " add one to models/layers.py"
        )
