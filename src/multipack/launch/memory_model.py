"""Bytes that a rank needs for training: predicted from a `ModelShape` and a `ParallelConfig`, without torch.

    at rest           parameters ▐▐▐▐  optimizer ▐▐▐▐▐▐▐▐
    forward pass      … and weights in the dtype of products (cast, or gathered), saved activations ▗▄▆█, the loss
    backward pass     … and gradients ▐▐▐▐, temporaries of one block, saved activations █▆▄▖

Parameters and gradients are float32, 4 bytes an element each, and AdamW keeps two float32 moments: 16 bytes an element
altogether, in every precision: bf16 and fp16 are those of products (autocast, or of gathered shards). A stage of ZeRO
divides these 4 + 4 + 8 bytes by the N ranks that share them (Rajbhandari et al. 2020, arXiv:1910.02054, §5):

    ddp 4 + 4 + 8      zero1 4 + 4 + 8/N      zero2, zero3 4/N + 4/N + 8/N      hsdp: N = ranks of one group

where zero1 deals whole tensors, so that no share is smaller than the largest of them.
zero2 and zero3 differ in what is gathered: all blocks throughout a step, or two blocks at a time, and in both what
stands outside of blocks. Pipelines keep stages gathered and their gradients whole throughout a step. Beside tensor and
pipeline parallelism `fully_shard` also does what ddp and zero1 ask for, with shards of one rank, of which it makes the
same copies, in float32.

Activations are counted tensor by tensor as the decoder saves them (`saved_by_block`); how tensor parallelism with
divided sequences, pipelines and recomputation change them follows Korthikanti et al. 2022 (arXiv:2205.05198, §4 and 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.stages import RankPart, parts_of_ranks
from multipack.shapes import ModelShape

Dtype = Literal["bf16", "fp16", "fp32"]
Recompute = Literal["none", "selective", "full"]
DeviceKind = Literal["gpu", "cpu"]

FLOAT32 = 4
"""Bytes of an element of parameters, gradients and moments, and of what is summed exactly."""
MOMENTS = 2 * FLOAT32
"""Bytes of AdamW's state for an element; its step counters, one a tensor, are left out."""
INTEGER = 8
"""Bytes of a token's number, its target and its position."""
LOSS_CHUNK_TOKENS = 1024
"""Rows whose logits exist at a time (ops/loss.py)."""
GATHERED_BLOCKS = 2
"""Blocks that zero3 holds whole at a time: one that computes, one that is gathered ahead."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that needs most.

    Attributes:
        parameters: float32, or this rank's shards of them.
        gradients: likewise.
        optimizer: AdamW's two moments.
        gathered: parameters that are whole beside their shards, for as long as products need them.
        copies: of parameters in the dtype of products, where autocast makes them.
        activations: saved by blocks, embedding and last norm for the backward pass, of all micro-batches in flight.
        loss: saved by the loss: the gradients of the hidden states and of the output matrix, which it computes at once.
        instants: all that the device holds, temporaries too, at the times at which it may hold most: the `loss`, the
            beginning of the `backward` pass, its `last block`, the `embedding`'s gradient, the optimizer's `step`.
        host: in host memory, where shards are offloaded.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    copies: int
    activations: int
    loss: int
    instants: dict[str, int]
    host: int = 0

    @property
    def weights(self) -> int:
        """Parameters in another form than the one in which they rest."""
        return self.gathered + self.copies

    @property
    def state(self) -> int:
        """What is sharded: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most that the device holds."""
        return max(self.instants.values())


def memory(
    shape: ModelShape,
    config: ParallelConfig,
    world_size: int,
    tokens: int,
    dtype: Dtype = "bf16",
    recompute: Recompute = "none",
    micro_batches: int = 1,
    device: DeviceKind = "gpu",
) -> Memory:
    """Bytes that a rank needs, of the rank that needs most (ranks of a pipeline differ).

    Args:
        shape: the decoder, with its vocabulary.
        config: how ranks share the work.
        world_size: ranks.
        tokens: slots of a pack.
        dtype: of products; parameters, gradients and moments are float32 in any case.
        recompute: which activations are computed again in the backward pass.
        micro_batches: packs of a rank in a step: a pipeline holds several at a time.
        device: where it runs: on a CPU some operations save more.

    Raises:
        ValueError: the ranks cannot be arranged so.
    """
    found = memory_of_stages(shape, config, world_size, tokens, dtype, recompute, micro_batches, device)
    return max(found, key=lambda each: each.peak)


def memory_of_stages(
    shape: ModelShape,
    config: ParallelConfig,
    world_size: int,
    tokens: int,
    dtype: Dtype = "bf16",
    recompute: Recompute = "none",
    micro_batches: int = 1,
    device: DeviceKind = "gpu",
) -> list[Memory]:
    """The same of a rank at each place along the pipeline; one without a pipeline."""
    return [
        _of_part(shape, config, world_size, part, tokens, dtype, recompute, micro_batches, device)
        for part in parts_of_ranks(shape, config, micro_batches)
    ]


def _of_part(
    shape: ModelShape,
    config: ParallelConfig,
    world_size: int,
    part: RankPart,
    tokens: int,
    dtype: Dtype,
    recompute: Recompute,
    micro_batches: int,
    device: DeviceKind,
) -> Memory:
    axes = config.axes(world_size)
    slots, tensor = tokens // axes["cp"], axes["tp"]
    shards = axes["dp_shard"] * axes["cp"] if config.shards_parameters else 1
    product, wrapped = product_bytes(dtype), is_wrapped(config)
    block, around = parameters_of_block(shape, tensor), parameters_around(shape, part, tensor)
    held = part.layers * block + around

    owners = axes["dp_replicate"] * axes["cp"] if config.data == "zero1" else shards
    owned = max(held // owners, _largest(shape, tensor)) if config.data == "zero1" else held // owners
    state = (FLOAT32 * held // shards, FLOAT32 * held // shards, MOMENTS * owned)
    host, state = (sum(state), (0, 0, 0)) if config.offload == "cpu" else (0, state)
    if config.pipeline > 1:  # gradients stay whole until the step's last backward pass
        state = (state[0], FLOAT32 * held, state[2])
    narrow = config.shards_parameters  # gathered, and so computed with, in the dtype of products
    saved = sum(saved_by_block(shape, config, slots, dtype, device).values())
    kept = sum(kept_by_block(shape, config, slots, dtype, recompute, device).values())
    ends = part.edge_in_flight * saved_around(shape, part, config, slots, dtype, device)
    loss = (
        part.edge_in_flight * sum(saved_by_loss(shape, slots, tensor, dtype).values()) if part.is_last else 0
    )
    gathered = _gathered(shape, config, part, dtype) if wrapped else 0
    copies = 0 if narrow or dtype == "fp32" else _copies(shape, config, part, product, recompute)
    weights = gathered + copies
    activations = round(part.in_flight * part.layers * kept) + ends

    resting, gradients = state[0] + state[2], state[1]
    matrix = FLOAT32 * (shape.vocabulary_size // tensor) * shape.d_model
    working = saved - kept + _block_temporaries(shape, slots, tensor, product)
    if wrapped:
        # A block's gradients as computed and as reduced; those outside of blocks wait for the last of them.
        computed = product if narrow else FLOAT32
        working += (computed + FLOAT32) * block + computed * around
    bucketed = not wrapped and axes["dp_replicate"] * axes["cp"] > 1
    if micro_batches > 1 or bucketed:
        # Gradients of other micro-batches, which these are added to, or DDP's buckets, are there all the time.
        before = first = last = gradients
    else:
        early = (
            matrix + FLOAT32 * _norm_elements(shape) if part.is_last else 0
        )  # of the loss and the last norm
        before, first = 0, matrix if part.is_last and not wrapped else 0
        last = max(0, gradients - (FLOAT32 * (block + around) - early) // shards)
    # Autocast forgets its copies after the forward pass, and makes those of a block anew where it is computed again.
    multiplied = gathered + (copies if recompute == "none" else copies // part.layers)
    instants = {
        "backward": resting + first + multiplied + activations + working,
        "last block": resting + last + multiplied + ends + kept + working,
        "embedding": resting + gradients + ends + (matrix if part.is_first else 0),
        "step": resting + gradients,
    }
    if part.is_last:
        needed = _loss_temporaries(shape, slots, tensor, dtype, narrow, device)
        instants["loss"] = resting + before + weights + activations + loss + needed
    return Memory(*state, gathered, copies, activations, loss, instants, host)


def _gathered(shape: ModelShape, config: ParallelConfig, part: RankPart, dtype: Dtype) -> int:
    """Bytes of parameters that `fully_shard` holds whole beside the shards, which may be of one rank."""
    keeps = config.data == "zero2" or config.pipeline > 1  # from a step's first pass to its last
    blocks = part.layers if keeps else min(GATHERED_BLOCKS, part.layers)
    elements = parameters_around(shape, part, config.tensor) + blocks * parameters_of_block(
        shape, config.tensor
    )
    return elements * (product_bytes(dtype) if config.shards_parameters else FLOAT32)


def _copies(
    shape: ModelShape, config: ParallelConfig, part: RankPart, product: int, recompute: Recompute
) -> int:
    """Bytes of autocast's copies of matrices and biases: every micro-batch saves its own, or forgets them."""
    copies = math.ceil(part.in_flight) if recompute == "none" else 1
    return (
        copies
        * product
        * part.layers
        * (parameters_of_block(shape, config.tensor) - 2 * _norm_elements(shape))
    )


def product_bytes(dtype: Dtype) -> int:
    """Bytes of an element of what is multiplied."""
    return FLOAT32 if dtype == "fp32" else 2


def is_wrapped(config: ParallelConfig) -> bool:
    """Whether torch's `fully_shard` does the data-parallel part: also beside tensors and stages, with shards of one."""
    return config.shards_parameters or config.tensor > 1 or config.pipeline > 1


def stream_bytes(config: ParallelConfig, dtype: Dtype) -> int:
    """Bytes of an element of the residual stream: float32 under autocast, that of gathered shards otherwise."""
    return product_bytes(dtype) if config.shards_parameters else FLOAT32


# --- parameters ---------------------------------------------------------------------------------------


def parameters_of_block(shape: ModelShape, tensor: int = 1) -> int:
    """Elements of one block on a rank: matrices and their biases divided over `tensor`, the rest whole.

    Biases of the two matrices whose columns are divided are added once, after their products are summed: whole.
    """
    d, f, width = shape.d_model, shape.d_ff, shape.head_width
    rows = (shape.heads + 2 * shape.kv_heads) * width + (2 if shape.gated else 1) * f
    divided = rows * (d + shape.bias) + d * (shape.heads * width + f)
    return divided // tensor + 2 * _norm_elements(shape) + (2 * d if shape.bias else 0)


def parameters_around(shape: ModelShape, part: RankPart | None = None, tensor: int = 1) -> int:
    """Elements outside of blocks on a rank: embedding, positions, last norm, head; None = all of them."""
    begins, ends = (True, True) if part is None else (part.is_first, part.is_last)
    vocabulary = shape.vocabulary_size // tensor * shape.d_model
    elements = vocabulary if begins or (ends and shape.tied) else 0
    elements += shape.context * shape.d_model if begins and shape.positions == "learned" else 0
    elements += _norm_elements(shape) if ends else 0
    return elements + (vocabulary if ends and not shape.tied else 0)


def parameters_of(shape: ModelShape) -> int:
    """Elements of the whole decoder, biases and norms among them: `Decoder(shape).parameter_count()`."""
    return shape.layers * parameters_of_block(shape) + parameters_around(shape)


def _largest(shape: ModelShape, tensor: int) -> int:
    """Elements of the largest tensor on a rank, which zero1 does not divide."""
    positions = shape.context if shape.positions == "learned" else 0
    heads = shape.heads * shape.head_width
    rows = max(positions, *(size // tensor for size in (shape.vocabulary_size, shape.d_ff, heads)))
    return rows * shape.d_model


def _norm_elements(shape: ModelShape) -> int:
    return shape.d_model * (2 if shape.norm == "layernorm" and shape.bias else 1)


# --- activations --------------------------------------------------------------------------------------


def saved_by_block(
    shape: ModelShape,
    config: ParallelConfig,
    slots: int,
    dtype: Dtype = "fp32",
    device: DeviceKind = "gpu",
) -> dict[str, int]:
    """Bytes that one block saves for its backward pass, by what they are.

    With T slots, width d, H query and K key heads of width e, f the feed-forward width, p bytes an element of
    products and s of the residual stream, on one rank without dropout:

        2·T·d·s  inputs of both norms          T·(H + 2K)·e·p  query, key, value      T·f·p·4  gate, silu(gate), up
        2·T·d·p  what they give to products    T·H·e·p + 4·T·H  attention and its       and their product (gelu: 2)
                                               log-sum-exp

    Dividing tensors by n divides what stands in the middle and on the right, and inputs of norms; what norms give is
    gathered before it is multiplied and saved whole.

    Args:
        shape: the decoder.
        config: how ranks share the work: tensor, context and the dtype of the residual stream are read.
        slots: T, of this rank's share of a pack: before tensor parallelism divides them again.
        dtype: of products.
        device: on a CPU, norms without a mean and attention in bf16 save float32 copies.
    """
    product, stream, tensor = product_bytes(dtype), stream_bytes(config, dtype), config.tensor
    here, d = slots // tensor, shape.d_model
    heads, width = shape.heads // tensor, shape.head_width
    key_heads = shape.kv_heads // tensor
    ulysses = config.context > 1 and config.context_method == "ulysses"
    if ulysses:  # ranks that outnumber key heads have copies of them
        key_heads = math.lcm(max(key_heads, 1), config.context)
    gives_wide = (
        device == "cpu" and product < FLOAT32
    )  # the loop attends in float32, and rounds what it gives
    widens = device == "cpu" and shape.norm == "rmsnorm"
    saved = {
        "residual": 2 * here * d * (FLOAT32 if widens else stream),
        "statistics": 2 * here * FLOAT32 * (2 if shape.norm == "layernorm" else 1),
        "normalized": 2 * here * d * FLOAT32 if widens else 0,
        "projected": 2 * slots * d * product,
        "heads": slots * (heads + 2 * key_heads) * width * product,
        "attention": slots * heads * width * (product + (FLOAT32 if gives_wide else 0)),
        "exchanged": slots * heads * width * product if ulysses else 0,
        "log-sum-exp": slots * heads * FLOAT32,
        "feed-forward": slots * (shape.d_ff // tensor) * product * (4 if shape.gated else 2),
        "dropped": 2 * here * d * (product if device == "cpu" else 1) if shape.dropout else 0,
    }
    return {name: size for name, size in saved.items() if size}


def kept_by_block(
    shape: ModelShape,
    config: ParallelConfig,
    slots: int,
    dtype: Dtype = "fp32",
    recompute: Recompute = "none",
    device: DeviceKind = "gpu",
) -> dict[str, int]:
    """Bytes that stay of a block between its forward and its backward pass; see `saved_by_block`.

    `full` keeps the block's input alone; `selective` also what attention and matrix products give, but for the last
    product, which nobody reads again without dropout (models/recompute.py).
    """
    saved = saved_by_block(shape, config, slots, dtype, device)
    if recompute == "none":
        return saved
    kept = {"residual": slots // config.tensor * shape.d_model * stream_bytes(config, dtype)}
    if recompute == "full":
        return kept
    product = product_bytes(dtype)
    attended = slots * (shape.heads // config.tensor) * shape.head_width
    products = slots * shape.d_model * (2 if shape.dropout else 1)
    products += slots * (shape.d_ff // config.tensor) * (2 if shape.gated else 1)
    return kept | {
        "heads": slots * (shape.heads + 2 * shape.kv_heads) // config.tensor * shape.head_width * product,
        "attention": attended * (FLOAT32 if device == "cpu" else product),
        "log-sum-exp": saved["log-sum-exp"],
        "products": products * product,
    }


def saved_around(
    shape: ModelShape,
    part: RankPart,
    config: ParallelConfig,
    slots: int,
    dtype: Dtype = "fp32",
    device: DeviceKind = "gpu",
) -> int:
    """Bytes of a pack that are saved outside of blocks: its numbers, rotary tables, the last norm's input."""
    here = slots // config.tensor
    total = 4 * slots * INTEGER  # tokens, targets, positions, rows with a target
    if shape.positions == "rope":
        total += slots * shape.head_width * FLOAT32  # cosines and sines of half a head
    if part.is_first and shape.dropout:
        total += here * shape.d_model * (FLOAT32 if device == "cpu" else 1)
    if part.is_last:
        widens = device == "cpu" and shape.norm == "rmsnorm"
        stream = 2 * FLOAT32 if widens else stream_bytes(config, dtype)
        total += here * (shape.d_model * stream + 2 * FLOAT32)
    return total


def saved_by_loss(shape: ModelShape, slots: int, tensor: int = 1, dtype: Dtype = "fp32") -> dict[str, int]:
    """Bytes of the two gradients that the loss computes in its forward pass, so that no logits are saved."""
    return {
        "hidden": slots * shape.d_model * product_bytes(dtype),
        "output matrix": shape.vocabulary_size // tensor * shape.d_model * FLOAT32,
    }


def logits_chunk(
    shape: ModelShape, slots: int, tensor: int = 1, dtype: Dtype = "fp32", device: DeviceKind = "gpu"
) -> int:
    """Bytes of a chunk's logits and log-probabilities, which are all that exist at a time."""
    rows = min(slots, LOSS_CHUNK_TOKENS)
    product = product_bytes(dtype)
    copied = (
        FLOAT32 if device == "cpu" and product < FLOAT32 else 0
    )  # its softmax widens logits before it works
    return rows * (shape.vocabulary_size // tensor) * (product + FLOAT32 + copied)


def _loss_temporaries(
    shape: ModelShape, slots: int, tensor: int, dtype: Dtype, narrow: bool, device: DeviceKind
) -> int:
    """The larger of a chunk with its products, and the output matrix's gradient times what flows back."""
    matrix, product = shape.vocabulary_size // tensor * shape.d_model, product_bytes(dtype)
    rounded = matrix * product if product < FLOAT32 else 0  # the matrix itself, if no shards are gathered so
    chunk = logits_chunk(shape, slots, tensor, dtype, device)
    logits = min(slots, LOSS_CHUNK_TOKENS) * (shape.vocabulary_size // tensor) * (FLOAT32 + product)
    forward = (0 if narrow else rounded) + max(chunk, logits + rounded)
    return max(forward, matrix * FLOAT32 + (rounded if narrow else 0))


def _block_temporaries(shape: ModelShape, slots: int, tensor: int, product: int) -> int:
    """What the backward pass of a feed-forward layer holds beside what is saved.

    Gradients of its wide tensors (two of them more than were freed where there is a gate, else one), two of the
    residual stream, and a matrix's gradient before it is added, rounded and in float32.
    """
    width = shape.d_ff // tensor
    wide = slots * width * product * (2 if shape.gated else 1)
    matrix = width * shape.d_model * (FLOAT32 + (product if product < FLOAT32 else 0))
    return wide + 2 * (slots // tensor) * shape.d_model * FLOAT32 + matrix
