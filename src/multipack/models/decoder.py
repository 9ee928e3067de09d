"""One decoder for GPT-2 and Llama: a `ModelShape` says which; a `PackedBatch` says where documents begin.

    input_ids ─ embedding (+ positions) ─▶ blocks ─▶ norm ─▶ hidden (T, d) ─ head ─▶ Σ loss
                                          │ x + output(attention(query, key, value)) of norm(x)
                                          │ x + down(silu(gate) · up), or down(gelu(up)), of norm(x)

There is no batch dimension: T tokens of many documents are one row, and only attention and positions know
documents apart. Names of parameters, which checkpoints and other rooms rely on:

    embedding.weight                  (V, d)     positions.weight                   (context, d) learned
    blocks.N.attention_norm.weight    (d,)       blocks.N.feed_forward_norm.weight  (d,)
    blocks.N.attention.query.weight   (H·D, d)   blocks.N.feed_forward.gate.weight  (f, d) gated
    blocks.N.attention.key.weight     (K·D, d)   blocks.N.feed_forward.up.weight    (f, d)
    blocks.N.attention.value.weight   (K·D, d)   blocks.N.feed_forward.down.weight  (d, f)
    blocks.N.attention.output.weight  (d, H·D)   norm.weight (d,)   head.weight     (V, d) not tied

and `.bias` beside `.weight` where the shape has biases. Query, key and value (and gate and up) are separate
matrices: each splits into equal row blocks for tensor parallelism, also when key heads are fewer than query
heads, where a fused one would need its rows interleaved; Llama's weights on Hugging Face are separate too, in
the same order of rows (a head's two halves rotate), and GPT-2's fused one is three slices. Fusing would win
0.3 % of a step on the CPU. There are no buffers: rotary tables come from position_ids, so that
`.to(bfloat16)`, meta-device initialization and sharding have nothing to spoil.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multipack.data.batch import PackedBatch
from multipack.models.cache import KeyValueCache, LayerCache
from multipack.ops.attention import attention, find_backend
from multipack.ops.loss import linear_cross_entropy
from multipack.shapes import ModelShape

INITIAL_STD = 0.02
"""Standard deviation of the initial weights (GPT-2's)."""

Rotation = tuple[Tensor, Tensor]

PARALLEL_PLAN = {
    "embedding": "vocabulary",
    "positions": "positions",
    "blocks.*.attention_norm": "norm",
    "blocks.*.attention": "gathers",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.output": "row",
    "blocks.*.feed_forward_norm": "norm",
    "blocks.*.feed_forward": "gathers",
    "blocks.*.feed_forward.gate": "column",
    "blocks.*.feed_forward.up": "column",
    "blocks.*.feed_forward.down": "row",
    "norm": "norm",
    "head": "vocabulary",
}
"""What tensor parallelism may know of a decoder: which matrices split by their rows (`column`: their outputs are
divided) or their columns (`row`), what is divided over the vocabulary, what works on a share of the tokens (`norm`),
and which modules need all tokens of what they are given (`gathers`). Names are patterns; some shapes lack some."""


@dataclass(frozen=True)
class Part:
    """Consecutive blocks of a decoder, as a stage of a pipeline holds them.

    Attributes:
        first: number of the first block.
        stop: number behind the last one.
        layers: blocks of the whole decoder.
    """

    first: int
    stop: int
    layers: int

    @property
    def begins(self) -> bool:
        """Whether tokens are embedded here."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether the loss is computed here."""
        return self.stop == self.layers


class Decoder(nn.Module):
    """A decoder-only transformer over packed documents.

    Args:
        shape: layers, widths and switches; its vocabulary must be set.
        attention: a backend's name, or `"auto"` (ops/attention/table.py).
        loss_function: (hidden, weight, targets, num_targets=…) → Σ loss, with `weights=` too where a batch has
            some; tensor parallelism hands in its own.
        training_loss: the same with the terms that only training adds (ops/loss.py); None = the same.

        part: build these blocks only, under the names that they have in the whole: with the embedding (and positions)
            if it begins there, with the last norm and the head if it ends there, where tied weights need the embedding
            too. A part is filled by `initial_parameters` or from a checkpoint.

    Weights are drawn from torch's global generator: call `torch.manual_seed` before.

    Raises:
        ValueError: a shape without a vocabulary, one that serves planning only (experts, latent attention, a
            sliding window in some layers but not in all), or an unknown attention backend.
    """

    def __init__(
        self,
        shape: ModelShape,
        attention: str = "auto",
        loss_function: Callable[..., Tensor] = linear_cross_entropy,
        training_loss: Callable[..., Tensor] | None = None,
        part: Part | None = None,
    ) -> None:
        super().__init__()
        if not shape.vocabulary_size:
            raise ValueError(
                "model.vocabulary_size=0 means the tokenizer's own size, but no tokenizer set it:"
                " use shape.with_vocabulary(size)"
            )
        for name in ("experts", "kv_rank"):
            if getattr(shape, name):
                raise ValueError(
                    f"model.{name}={getattr(shape, name)}: this shape serves planning only (cost and FLOPs). The"
                    " decoder builds dense layers without a latent; choose such a model, or set model.experts and"
                    " model.kv_rank to 0"
                )
        if shape.sliding_layers not in (0, shape.layers):
            raise ValueError(
                f"model.window_layers={shape.window_layers} of model.layers={shape.layers} slide, and the shape does"
                " not say which: it serves planning only. Set model.window_layers=0, and all layers slide, or"
                " model.window=0, and none does"
            )
        if attention != "auto":
            find_backend(attention)
        self.shape = shape
        self.loss_function = loss_function
        self.training_loss = training_loss or loss_function
        self.part = part or Part(0, shape.layers, shape.layers)
        with torch.device("meta"):  # so that nothing is drawn but by reset_parameters
            self._make(shape, attention)
        self.to_empty(device=torch.get_default_device())
        self.reset_parameters()

    def _make(self, shape: ModelShape, attention: str) -> None:
        """Modules of this part, without values."""
        part = self.part
        if part.begins or (part.ends and shape.tied):
            self.embedding = nn.Embedding(shape.vocabulary_size, shape.d_model)
        if part.begins and shape.positions == "learned":
            self.positions = nn.Embedding(shape.context, shape.d_model)
        self.blocks = nn.ModuleList()
        for number in range(part.first, part.stop):
            self.blocks.add_module(str(number), Block(shape, attention))
        if part.ends:
            self.norm = _norm(shape)
        if part.ends and not shape.tied:
            self.head = nn.Linear(shape.d_model, shape.vocabulary_size, bias=False)

    def forward(self, batch: PackedBatch, x: Tensor | None = None) -> Tensor:
        """The summed loss over the batch's targets, weighted where it has weights: 0-d float32; nothing is divided.

        Args:
            batch: the pack.
            x: (T, d) what the part before this one gave; a part that is not the last gives the same.

        Raises:
            ValueError: as `hidden` does, and as the loss does for targets.
        """
        if not self.part.ends:
            return self.hidden(batch, x=x)
        weighted = {} if batch.weights is None else {"weights": batch.weights}
        loss_function = self.training_loss if self.training else self.loss_function
        return loss_function(
            self.hidden(batch, x=x),
            self.output_weight,
            batch.targets,
            num_targets=batch.num_target_tokens,
            **weighted,
        )

    def logits(self, batch: PackedBatch) -> Tensor:
        """(T, V) logits, all of them at once: for tests and small batches."""
        return F.linear(self.hidden(batch), self.output_weight)

    def hidden(
        self, batch: PackedBatch, cache: KeyValueCache | None = None, x: Tensor | None = None
    ) -> Tensor:
        """(T, d) what the last norm gives (or, in a part without it, the last block).

        Args:
            batch: the pack.
            cache: keeps keys and values for generation; the pack was announced to it.
            x: (T, d) what the part before this one gave; None = this one begins with the tokens.

        Raises:
            ValueError: a document longer than a learned position table; on the CPU a token outside the
                vocabulary.
        """
        x = self.embed(batch) if x is None else x
        rotation = self.rotation(batch, x.dtype)
        layers = [None] * len(self.blocks) if cache is None else cache.layers
        for block, layer in zip(self.blocks, layers, strict=True):
            x = block(x, batch, rotation, layer)
        out: Tensor = self.norm(x) if self.part.ends else x
        return out

    def embed(self, batch: PackedBatch) -> Tensor:
        """(T, d) embeddings of tokens, and of positions where they are learned."""
        _check_tokens(batch.input_ids, self.shape.vocabulary_size)
        x: Tensor = self.embedding(batch.input_ids)
        if self.shape.positions == "learned":
            x = x + self.positions(self._table_rows(batch))
        return F.dropout(x, self.shape.dropout, self.training)

    def rotation(self, batch: PackedBatch, dtype: torch.dtype = torch.float32) -> Rotation | None:
        """Cosines and sines that all layers share, or None where positions are learned.

        Args:
            batch: the pack.
            dtype: of what is turned; tables are float32 or wider.
        """
        if self.shape.positions == "learned":
            return None
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return rotary_tables(batch.position_ids, self.shape.head_width, self.shape.rope_theta, dtype)

    @property
    def output_weight(self) -> Tensor:
        """(V, d) the last projection: the embedding itself where they are tied."""
        return self.embedding.weight if self.shape.tied else self.head.weight

    def parameter_count(self, positions: bool = True) -> int:
        """Number of parameters; shared ones count once. `positions=False` leaves the position table out."""
        left_out = 0 if positions or self.shape.positions != "learned" else self.positions.weight.numel()
        return sum(parameter.numel() for parameter in self.parameters()) - left_out

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight anew (GPT-2's scheme): N(0, 0.02), biases 0, norms 1.

        The two projections of each block that write into the residual stream are drawn with
        0.02 / √(2 · layers), so that the stream's variance does not grow with depth.
        """
        for name, module in self.named_modules():
            _draw(name, module, self.shape)

    def _table_rows(self, batch: PackedBatch) -> Tensor:
        context = self.shape.context
        if batch.longest > context:
            raise ValueError(
                f"a document of {batch.longest:,} tokens is longer than the table of learned positions,"
                f" model.context={context:,}: raise it, shorten documents, or use model.positions=rope"
            )
        if max(batch.lengths) > context:  # padding only, and nothing reads what it computes
            return batch.position_ids.clamp(max=context - 1)
        return batch.position_ids


@torch.no_grad()
def initial_parameters(shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Names and values of a new decoder's parameters, one layer at a time, on the CPU.

    They are those of `Decoder(shape)` after the same `torch.manual_seed`, without the memory of the whole: for models
    that are larger than one rank.
    """
    with torch.device("meta"):
        whole = Decoder(shape)
    for name, module in whole.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        module.to_empty(device="cpu", recurse=False)
        _draw(name, module, shape)
        for own, parameter in module.named_parameters(recurse=False):
            yield f"{name}.{own}", parameter.detach()
        module.to_empty(device="meta", recurse=False)


def _draw(name: str, module: nn.Module, shape: ModelShape) -> None:
    """Initial values of a module's own parameters."""
    if isinstance(module, nn.Linear | nn.Embedding):
        writes_residual = name.endswith((".attention.output", ".feed_forward.down"))
        std = INITIAL_STD / (2 * shape.layers) ** 0.5 if writes_residual else INITIAL_STD
        nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.reset_parameters()


class Block(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the residual stream and added to it.

    Attributes:
        around: where it is set, training calls around(compute, x, batch, rotation) in the place of
            compute(x, batch, rotation): the hook for activation checkpointing. It stands inside the block, so that what
            wraps the block (shards, torch.compile) stays outside.
    """

    def __init__(self, shape: ModelShape, attention: str) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape, attention)
        self.feed_forward_norm = _norm(shape)
        self.feed_forward = FeedForward(shape)
        self.around: Callable[..., Tensor] | None = None

    def forward(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, cache: LayerCache | None = None
    ) -> Tensor:
        """(T, d) → (T, d)."""
        if self.around is not None and self.training and cache is None:
            return self.around(self.compute, x, batch, rotation)
        return self.compute(x, batch, rotation, cache)

    def compute(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, cache: LayerCache | None = None
    ) -> Tensor:
        """What `forward` gives."""
        branch = self.attention(self.attention_norm(x), batch, rotation, cache)
        x = x + F.dropout(branch, self.dropout, self.training)
        branch = self.feed_forward(self.feed_forward_norm(x))
        return x + F.dropout(branch, self.dropout, self.training)


class Attention(nn.Module):
    """Projections around `attention`. Heads are counted from the tensors: a shard of them works too.

    Attributes:
        attend: (query, key, value, batch, backend, window) → (T, H, D); context parallelism hands in its own, which
            sees the tokens of other ranks too.
    """

    def __init__(self, shape: ModelShape, backend: str) -> None:
        super().__init__()
        width = shape.head_width
        self.head_width, self.backend, self.window = width, backend, shape.window or None
        self.query = nn.Linear(shape.d_model, shape.heads * width, bias=shape.bias)
        self.key = nn.Linear(shape.d_model, shape.kv_heads * width, bias=shape.bias)
        self.value = nn.Linear(shape.d_model, shape.kv_heads * width, bias=shape.bias)
        self.output = nn.Linear(shape.heads * width, shape.d_model, bias=shape.bias)
        self.attend: Callable[..., Tensor] = attention

    def forward(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation | None, cache: LayerCache | None = None
    ) -> Tensor:
        """(T, d) → (T, d)."""
        x = cast_once(x)
        heads = (-1, self.head_width)
        query = self.query(x).unflatten(-1, heads)
        key = self.key(x).unflatten(-1, heads)
        value = self.value(x).unflatten(-1, heads)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        if cache is None:
            mixed = self.attend(query, key, value, batch, self.backend, self.window)
        else:
            mixed = cache.attend(query, key, value, batch, self.backend, self.window)
        out: Tensor = self.output(mixed.flatten(1))
        return out


class FeedForward(nn.Module):
    """GELU (GPT-2's tanh form) or SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gated = shape.gated
        if shape.gated:
            self.gate = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(T, d) → (T, d)."""
        x = cast_once(x)
        if self.gated:
            inner = F.silu(self.gate(x)) * self.up(x)
        else:
            inner = F.gelu(self.up(x), approximate="tanh")
        out: Tensor = self.down(inner)
        return out


def rotary_tables(position_ids: Tensor, width: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of position · θ^(−2i/D) for i < D/2 (RoPE: Su et al. 2021, arXiv:2104.09864).

    Args:
        position_ids: (T,) positions, which restart at every document.
        width: D, of one head; even.
        theta: base of the frequencies.
        dtype: float32 or wider. Angles in bfloat16 would merge neighbors: it has 8 bits, positions need more.

    Returns:
        Two (T, 1, D/2) tensors of `dtype`, ready to broadcast over heads.
    """
    exponents = torch.arange(0, width, 2, dtype=dtype, device=position_ids.device) / width
    frequencies = 1.0 / theta**exponents
    angles = position_ids.to(dtype)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle.

    Args:
        x: (T, heads, D).
        cosine: (T, 1, D/2) float32 or wider.
        sine: likewise.

    Returns:
        (T, heads, D) in x's dtype: computed in that of the tables, rounded once.
    """
    if torch.compiler.is_compiling():  # which fuses arithmetic, and cannot follow what is written into views
        first, second = x.to(cosine.dtype).chunk(2, dim=-1)
        turned = first * cosine - second * sine, second * cosine + first * sine
        return torch.cat(turned, dim=-1).to(x.dtype)
    rotated: Tensor = _Rotate.apply(x, cosine, sine)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """By hand, because the gradient is the rotation back: only the tables are saved, which layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        first, second = x.to(cosine.dtype).chunk(2, dim=-1)
        out = torch.empty(x.shape, dtype=cosine.dtype, device=x.device)
        out_first, out_second = out.chunk(2, dim=-1)
        torch.mul(first, cosine, out=out_first).addcmul_(second, sine, value=-1)
        torch.mul(second, cosine, out=out_second).addcmul_(first, sine)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return rotate(upstream, cosine, -sine), None, None


def _norm(shape: ModelShape) -> nn.Module:
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.d_model, eps=shape.norm_eps, bias=shape.bias)
    return nn.RMSNorm(shape.d_model, eps=shape.norm_eps)


def cast_once(x: Tensor) -> Tensor:
    """The same in autocast's dtype where it is on: else every projection would cast a copy of its own."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


def _check_tokens(input_ids: Tensor, vocabulary_size: int) -> None:
    # On other devices looking would stall; there the embedding's own check speaks.
    if input_ids.device.type != "cpu" or not input_ids.numel():
        return
    low, high = (int(x) for x in torch.aminmax(input_ids))
    if low < 0 or high >= vocabulary_size:
        worst = low if low < 0 else high
        raise ValueError(
            f"token {worst} is outside the vocabulary of {vocabulary_size:,}:"
            " the documents and the model must come from one tokenizer"
        )
