"""One decoder for dense models: a `ModelShape` selects the variant, a `PackedBatch` holds the documents' bounds.

    input_ids ─ embedding (+ positions) ─▶ blocks ─▶ norm ─▶ hidden (T, d) ─ head ─▶ Σ loss
                                          │ x + output(attention(query, key, value)) of norm(x)
                                          │ x + down(silu(gate) · up), or down(gelu(up)), of norm(x)

Switches of the shape add biases, norms of queries and keys, norms after attention and feed-forward, windows and layers
without positions, scaled frequencies, and factors of embeddings, residual branches and logits. shapes/families.py has
the switches of each family.

There is no batch dimension: T tokens of many documents are one row, and only attention and positions depend on where
documents begin. Names of parameters, on which checkpoints and other modules rely:

    embedding.weight                  (V, d)     positions.weight                   (context, d) learned
    blocks.N.attention_norm.weight    (d,)       blocks.N.feed_forward_norm.weight  (d,)
    blocks.N.attention.query.weight   (H·D, d)   blocks.N.feed_forward.gate.weight  (f, d) gated
    blocks.N.attention.key.weight     (K·D, d)   blocks.N.feed_forward.up.weight    (f, d)
    blocks.N.attention.value.weight   (K·D, d)   blocks.N.feed_forward.down.weight  (d, f)
    blocks.N.attention.output.weight  (d, H·D)   norm.weight (d,)   head.weight     (V, d) not tied
                                                 score.weight (scores, d), in place of the head
    blocks.N.attention_out_norm.weight           (d,)    norms after (or around) a branch
    blocks.N.feed_forward_out_norm.weight        (d,)
    blocks.N.attention.query_norm.weight         (D,)    norms of each head; (H·D,) of all heads together
    blocks.N.attention.key_norm.weight           (D,)    (K·D,)

and `.bias` beside `.weight` where the shape has biases. Query, key and value (and gate and up) are separate matrices:
each splits into equal row blocks for tensor parallelism, even with fewer key heads than query heads, where a fused
matrix would need interleaved rows; fusing them would save 0.3 % of a step on the CPU. Rows have the order of Llama's
weights on Hugging Face (a head's two halves rotate). There are no buffers: rotary tables are computed from
position_ids, so that `.to(bfloat16)`, meta-device initialization and sharding do not affect them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multipack.data.packs.batch import PackedBatch, check_tokens
from multipack.models.layers import BLOCK_PLAN, Attend, Block, draw_initial, make_norm
from multipack.models.rotary import Rotation, rotary_tables
from multipack.ops.allocate import allocate
from multipack.ops.attention.table import find_backend
from multipack.ops.autocast import at_least_float32
from multipack.ops.logits import LossOptions, soft_capped
from multipack.ops.loss import linear_cross_entropy
from multipack.shapes import ModelShape

if TYPE_CHECKING:
    from multipack.models.kv_cache import KeyValueCache

PARALLEL_PLAN = {
    "embedding": "vocabulary",
    "positions": "positions",
    **{f"blocks.*.{name}": kind for name, kind in BLOCK_PLAN.items()},
    "norm": "norm",
    "head": "vocabulary",
}
"""Pattern of a module's name → how tensor parallelism divides it, see `BLOCK_PLAN`; embeddings and head by rows of the
vocabulary (`vocabulary`)."""


@dataclass(frozen=True)
class DecoderPart:
    """Consecutive blocks of a decoder: a pipeline stage.

    Attributes:
        first: index of the first block.
        stop: index after the last block.
        layers: number of blocks of the whole decoder.
    """

    first: int
    stop: int
    layers: int

    @property
    def is_first(self) -> bool:
        """Whether this part embeds tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether this part computes the loss."""
        return self.stop == self.layers


class Decoder(nn.Module):
    """A decoder-only transformer over packed documents.

    Args:
        shape: layers, widths and options; its vocabulary must be set.
        attention: name of a backend, or `"auto"` (ops/attention/table.py).
        loss_options: options of its loss function; `logit_cap` is the shape's.
        part: build only these blocks, under their names in the whole decoder; the first part has the embedding (and
            positions), the last one the final norm and the head (the embedding, if they are tied).

    Attributes:
        loss_function: (hidden, weight, targets, num_targets=…, **loss_options) → Σ loss, also called with `weights=` if
            a batch has weights, and `rows=` if its documents share tokens.
        loss_options: its options in training; in evaluation without z-loss and label smoothing.

    Initial weights follow from `torch.initial_seed()`, which `torch.manual_seed` sets; see `initial_parameters`.

    Raises:
        ValueError: the shape has no vocabulary or is for planning only (`ModelShape.check_computed`), or the
            attention backend is unknown or does not compute soft caps that the shape has.
    """

    def __init__(
        self,
        shape: ModelShape,
        attention: str = "auto",
        loss_options: LossOptions = LossOptions(),  # noqa: B008 - it is frozen
        part: DecoderPart | None = None,
    ) -> None:
        super().__init__()
        if not shape.vocabulary_size:
            raise ValueError(
                "model.vocabulary_size=0 takes the tokenizer's size, and no tokenizer set it: use"
                " shape.with_vocabulary(size)"
            )
        shape.check_computed()
        if attention != "auto" and not find_backend(attention).explicit and (field := shape.explicit_scores):
            raise ValueError(
                f"model.attention={attention} does not compute model.{field}={getattr(shape, field)}: use"
                " model.attention=auto"
            )
        self.shape = shape
        self.loss_function: Callable[..., Tensor] = linear_cross_entropy
        self.loss_options = replace(loss_options, logit_cap=shape.logit_cap)
        self.part = part or DecoderPart(0, shape.layers, shape.layers)
        with torch.device("meta"):  # only reset_parameters draws values
            self._make(shape, attention)
        allocate(self, torch.get_default_device())
        self.reset_parameters()

    def _make(self, shape: ModelShape, attention: str) -> None:
        """Create the modules of this part, without values."""
        part = self.part
        if shape.architecture:
            from multipack.models.foreign import build_body

            build_body(self, shape)
            return
        if part.is_first or (part.is_last and shape.tied):
            self.embedding = nn.Embedding(shape.vocabulary_size, shape.d_model)
        if part.is_first and shape.positions == "learned":
            self.positions = nn.Embedding(shape.context, shape.d_model)
        self.blocks = nn.ModuleList()
        for number in range(part.first, part.stop):
            self.blocks.add_module(str(number), Block(shape, attention, number))
        if part.is_last:
            self.norm = make_norm(shape)
        if part.is_last and shape.scores:
            self.score = nn.Linear(shape.d_model, shape.scores, bias=False)
        elif part.is_last and not shape.tied:
            self.head = nn.Linear(shape.d_model, shape.vocabulary_size, bias=False)

    def forward(self, batch: PackedBatch, x: Tensor | None = None) -> Tensor:
        """Compute the summed loss of a batch, not divided by the number of targets.

        Args:
            batch: the pack.
            x: (T, d) output of the previous part; None in the first part.

        Returns:
            0-d sum over the targets in float32 (float64 for float64 weights), weighted if the batch has weights; in a
            part that is not the last, its (T, d) output.

        Raises:
            ValueError: see `hidden` and, for targets, the loss function.
        """
        if not self.part.is_last:
            return self.hidden(batch, x=x)
        return self.head_loss(batch, self.hidden(batch, x=x))

    def logits(self, batch: PackedBatch) -> Tensor:
        """(T, V) logits of the whole batch at once, or (T, scores) scores: for tests and small batches."""
        found = F.linear(self.hidden(batch), self.output_weight)
        return found if self.shape.scores else soft_capped(found, self.shape.logit_cap)

    def head_loss(self, batch: PackedBatch, hidden: Tensor) -> Tensor:
        """The result of `loss_function` for (T, d) inputs of the head."""
        options = self.loss_options
        if not self.training:
            options = replace(options, z_loss=0.0, label_smoothing=0.0)
        given: dict[str, Any] = {"num_targets": batch.num_target_tokens, **vars(options)}
        if batch.weights is not None:
            given["weights"] = batch.weights
        if batch.tree is not None:
            given["rows"] = batch.tree.target_slots
        return self.loss_function(hidden, self.output_weight, batch.targets, **given)

    def hidden(
        self, batch: PackedBatch, cache: KeyValueCache | None = None, x: Tensor | None = None
    ) -> Tensor:
        """(T, d) inputs of the head: outputs of the final norm, over `logit_divisor`.

        In a part that is not the last they are the outputs of its last block.

        Args:
            batch: the pack.
            cache: keys and values of earlier tokens, for generation; its `admit` or `advance` was called for the pack.
            x: (T, d) output of the previous part; None = start from the tokens.

        Raises:
            ValueError: a document is longer than the table of learned positions; on the CPU also: a token is outside
                the vocabulary.
        """
        if self.shape.architecture:
            if cache is not None:
                raise ValueError(
                    "a model of transformers (model=hf:…) generates no text here: export it, and use transformers"
                )
            from multipack.models.foreign import body_hidden

            return body_hidden(self, batch)
        x = self.embed(batch) if x is None else x
        rotations = self._rotations(batch, x.dtype)
        functions: Sequence[Attend | None] = [None] * len(self.blocks) if cache is None else cache.attention
        for block, rotation, attend in zip(self.blocks, rotations, functions, strict=True):
            x = block(x, batch, rotation, attend)
        if not self.part.is_last:
            return x
        out: Tensor = self.norm(x)
        return out if self.shape.logit_divisor == 1.0 else out / self.shape.logit_divisor

    def embed(self, batch: PackedBatch) -> Tensor:
        """(T, d) embeddings of the tokens, plus learned positions."""
        if batch.input_ids.device.type == "cpu":  # on a GPU the check would wait for the device
            check_tokens(batch.input_ids, self.shape.vocabulary_size)
        x: Tensor = self.embedding(batch.input_ids)
        if self.shape.embedding_scale != 1.0:
            x = x * self.shape.embedding_scale
        if self.shape.positions == "learned":
            x = x + self.positions(self._table_rows(batch))
        return F.dropout(x, self.shape.dropout, self.training)

    def rotation(
        self, batch: PackedBatch, dtype: torch.dtype = torch.float32, windowed: bool = False
    ) -> Rotation | None:
        """Cosines and sines shared by layers; None with learned positions.

        Args:
            batch: the pack.
            dtype: dtype of the hidden states; the tables are float64 for float64, else float32.
            windowed: whether for layers with a window.

        Raises:
            ValueError: a document is longer than `ModelShape.rotation_limit`, and shares tokens or is divided
                over ranks.
        """
        shape, positions, slots = self.shape, batch.position_ids, None
        if shape.positions == "learned":
            return None
        if (limit := shape.rotation_limit) and batch.longest > limit.tokens:
            reason = ""
            if batch.tree is not None:
                reason = "and documents that share tokens have several: use data.share_prefixes=off"
            elif sum(batch.lengths) != len(positions):
                reason = "which parallel.context divides: use parallel.context=1"
            if reason:
                raise ValueError(
                    f"a document has {batch.longest:,} tokens, and model.{limit}, {reason}, or another model.rope_type"
                )
            bounds = batch.cu_seqlens.long()
            # Length = last position + 1, also where only the newest token of a text is computed.
            slots = (positions[bounds[1:] - 1] + 1).repeat_interleave(
                bounds.diff(), output_size=len(positions)
            )
        return rotary_tables(batch.position_ids, shape, at_least_float32(dtype), windowed, slots)

    def _rotations(self, batch: PackedBatch, dtype: torch.dtype) -> list[Rotation | None]:
        """The rotation of each block; None = without positions."""
        shape, layers = self.shape, range(self.part.first, self.part.stop)
        kinds = [shape.window_theta > 0 and shape.window_of(layer) > 0 for layer in layers]
        tables = {kind: self.rotation(batch, dtype, kind) for kind in set(kinds)}
        return [
            tables[kind] if shape.rotates(layer) else None for layer, kind in zip(layers, kinds, strict=True)
        ]

    @property
    def output_weight(self) -> Tensor:
        """(V, d) output embedding, the input embedding if they are tied; with `scores` their (scores, d) weights.

        Where a model of transformers has a bias, it is the last column of (V, d + 1).
        """
        if self.shape.scores:
            return self.score.weight
        if not hasattr(self, "head"):
            return self.embedding.weight
        weight, bias = self.head.weight, self.head.bias
        return weight if bias is None else torch.cat([weight, bias[:, None]], 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all weights: normal with standard deviation 1/√d_model, biases 0, factors of norms 1.

        The two projections per block that write to the residual stream use 1/√(2 · layers · d_model), so that the
        stream's variance does not grow with depth. GPT-2's 0.02 is too small for narrow models: learning rates move
        such weights by a tenth a step, and norms of the small residual stream multiply its gradients. With 0.02,
        model=tiny at lr 3e-3 amplifies differences of rounding 1,000 times in 41 steps; with 1/√d_model they stay.
        """
        for module_name, module in self.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                draw_initial(f"{module_name}.{name}", parameter, module, self.shape, torch.initial_seed())

    def _table_rows(self, batch: PackedBatch) -> Tensor:
        """(T,) rows of the table of learned positions."""
        context = self.shape.context
        if batch.longest > context:
            raise ValueError(
                f"a document of {batch.longest:,} tokens is longer than the table of learned positions,"
                f" model.context={context:,}: raise it, shorten documents, or use model.positions=rope"
            )
        if max(batch.lengths) > context:  # padding only, whose outputs are not used
            return batch.position_ids.clamp(max=context - 1)
        return batch.position_ids


def initial_parameters(shape: ModelShape, seed: int) -> Callable[[str, torch.device], Tensor]:
    """A function that draws one parameter of a decoder: (name, device) → its whole initial value.

    Each parameter has its own generator, seeded by `seed` and the parameter's name, on the parameter's device. Values
    equal the weights of `Decoder(shape)` after `torch.manual_seed(seed)` on a device of the same type, and do not
    depend on the rank or the order of calls: ranks need not communicate.
    """
    with torch.device("meta"):
        whole = Decoder(shape)

    @torch.no_grad()
    def value(name: str, device: torch.device) -> Tensor:
        empty = whole.get_parameter(name)
        made = torch.empty(empty.shape, dtype=empty.dtype, device=device)
        draw_initial(name, made, whole.get_submodule(name.rpartition(".")[0]), shape, seed)
        return made

    return value
