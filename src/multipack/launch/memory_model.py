"""Predicted memory of a rank during training; nothing is allocated.

docs/parallel/choosing.md states the formulas and their accuracy.

Parameters, gradients and optimizer state are float32 in every precision, and divided as in ZeRO (Rajbhandari et al.
2020, arXiv:1910.02054, §5). Activations are counted tensor by tensor as the decoder saves them; tensor parallelism,
pipelines and activation checkpointing follow Korthikanti et al. 2022 (arXiv:2205.05198, §4 and §5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from multipack.launch.advise_request import Dtype
from multipack.launch.held import (
    FLOAT32,
    Held,
    blocks_held,
    largest_trained,
    output_rows,
    outside_held,
    trains_output,
)
from multipack.ops.logits import chunk_rows
from multipack.parallel.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerName
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.stages import RankPart, parts_of_ranks
from multipack.planning.placement_report import ContextMeasure
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig

Recompute = Literal["none", "selective", "full"]
"""Activation checkpointing, fastest first, and with the least memory last."""

GATHERED_BLOCKS = 2
"""Number of blocks whose parameters zero3 holds gathered: the current one, and the prefetched next one."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        parameters, gradients: in float32, or this rank's shards.
        optimizer: state of the optimizer, without step counters.
        gathered: whole parameters gathered from shards; 0 without FSDP2.
        copies: parameters that autocast casts to the dtype of products.
        activations: tensors saved by blocks, embedding and last norm for all micro-batches in flight.
        loss: tensors saved by the loss: gradients of the hidden states and of the output matrix.
        temporary: temporary tensors of the loss or of a block's backward pass, minus memory that is freed before.
        host, disk: shards in host memory and in files with offload; not part of `peak`.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    copies: int
    activations: int
    loss: int
    temporary: int
    host: int = 0
    disk: int = 0

    @property
    def peak(self) -> int:
        """Maximum number of bytes on the device."""
        return sum(value for name, value in vars(self).items() if name not in ("host", "disk"))


@dataclass(frozen=True)
class Workload:
    """A training step: a model, its parallelism, and the micro-batches of a rank.

    Attributes:
        shape, config, world_size: the decoder with its vocabulary, its parallelism, and the number of ranks.
        tokens: slots of a pack.
        dtype, recompute, adapter: dtype of matrix products, activation checkpointing, and adapters.
        micro_batches: packs per rank and step; a pipeline holds several at a time.
        device: kind of device; on a CPU, attention and norms of half-precision rows save additional float32 copies.
        placed: measure of context ranks on packs; None = one document fills each pack, and is placed by cost unless
            the method is ulysses.
        optimizer: name of the optimizer, whose row has the bytes of its state.
    """

    shape: ModelShape
    config: ParallelConfig
    world_size: int
    tokens: int
    dtype: Dtype = "bf16"
    recompute: Recompute = "none"
    micro_batches: int = 1
    device: Literal["gpu", "cpu"] = "gpu"
    optimizer: OptimizerName = DEFAULT_OPTIMIZER
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    placed: ContextMeasure | None = None

    @cached_property
    def block(self) -> Held:
        """Parameters of a block on a rank, a mean over blocks."""
        return blocks_held(self.shape, self.adapter, self.config.tensor)

    @property
    def slots(self) -> int:
        """Slots of a pack on a rank under context parallelism, before sequence parallelism divides them further."""
        return self.tokens // self.config.context

    @property
    def product(self) -> int:
        """Bytes of an element in matrix products."""
        return FLOAT32 if self.dtype == "fp32" else 2

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream: in the dtype of gathered shards, else 4 (float32 in autocast)."""
        return self.product if self.config.shards_parameters else FLOAT32

    @property
    def widens_norms(self) -> bool:
        """Whether RMSNorm saves float32 copies of its input and of its result before the weights are applied."""
        return self.device == "cpu" and self.shape.norm != "layernorm" and self.stream < FLOAT32

    def saved_by_block(self) -> dict[str, int]:
        """Return the bytes that one block saves for its backward pass, by tensor; see docs/parallel/choosing.md.

        Tensor parallelism divides all tensors except the outputs of norms, which are gathered.
        """
        shape, config, p, slots = self.shape, self.config, self.product, self.slots
        on_cpu, d, e = self.device == "cpu", shape.d_model, shape.head_width
        here, heads = slots // config.tensor, shape.heads // config.tensor
        key_heads = max(shape.kv_heads // config.tensor, 1)  # several ranks may have the same one
        planned = config.context > 1 and config.resolved(shape).context_method == "planned"
        ulysses = config.context > 1 and not planned and shape.heads % (config.tensor * config.context) == 0
        if ulysses:  # key heads are repeated until every rank has one
            key_heads = math.lcm(key_heads, config.context)
        widened = self.widens_norms
        before, after = 2 * (shape.norms != "after"), 2 * (shape.norms != "before")
        head_norms = (heads + key_heads) * e if shape.head_norm != "none" else 0
        attention_float32 = FLOAT32 if on_cpu and p < FLOAT32 and not planned else 0
        return {
            "residual": before * here * d * (FLOAT32 if widened else self.stream),
            "statistics": (before + after) * here * FLOAT32 * (2 if shape.norm == "layernorm" else 1),
            "normalized": (before + after) * here * d * FLOAT32
            if widened and self.adapter.trains("blocks.0.attention_norm")
            else 0,
            "branches": after * here * d * self.stream,
            "head norms": slots * head_norms * self.stream,
            "projected": 2 * slots * d * p,
            "heads": slots * (heads + 2 * key_heads) * e * p,
            "attention": slots * heads * e * (p + attention_float32 + (p if ulysses else 0)),
            "log-sum-exp": slots * heads * FLOAT32,
            "feed-forward": slots * (shape.d_ff // config.tensor) * p * (4 if shape.gated else 2),
            "adapters": round(slots * self._saved_by_adapters()),
            "dropped": 2 * here * d * (p if on_cpu else 1) if shape.dropout else 0,
        }

    def _saved_by_adapters(self) -> float:
        """Bytes per slot that adapters of a block save in addition to the inputs of matrices.

        With dropout each adapter has an input of its own instead of a shared one; frozen products save no inputs.
        """
        block, product, shape = self.block, self.product, self.shape
        dropped = block.adapted_inputs * (2 * product if self.device == "cpu" else product + 1)
        dropped -= (
            0 if self.adapter.train else (2 * shape.d_model + shape.d_ff // self.config.tensor) * product
        )
        results = block.adapted_outputs * product
        return (
            block.adapted_ranks * product
            + (dropped if self.adapter.dropout else 0)
            + (results if self.adapter.name == "dora" else 0)
        )

    def kept_by_block(self) -> int:
        """Return the bytes that a block holds between its passes.

        `full` keeps the block's input. `selective` also keeps the results of attention and of matrix products, except
        the last product, which is not read again without dropout (models/recompute.py).
        """
        shape, tensor = self.shape, self.config.tensor
        saved = self.saved_by_block()
        if self.recompute == "none":
            return sum(saved.values())
        residual = self.slots // tensor * shape.d_model * self.stream
        if self.recompute == "full":
            return residual
        heads = (shape.heads // tensor + 2 * max(shape.kv_heads // tensor, 1)) * shape.head_width
        attended = shape.heads // tensor * shape.head_width
        wide = shape.d_ff // tensor * (2 if shape.gated else 1)
        products = shape.d_model * (2 if shape.dropout or shape.norms != "before" else 1) + wide
        attention = attended * (FLOAT32 if self.device == "cpu" else self.product)
        products += round(self.block.adapted_ranks)
        return residual + saved["log-sum-exp"] + self.slots * ((heads + products) * self.product + attention)

    def saved_outside(self, part: RankPart) -> int:
        """Return the bytes saved outside of blocks: the batch, rotary tables, the last norm's input."""
        shape, here = self.shape, self.slots // self.config.tensor
        total = 4 * self.slots * 8  # tokens, targets, positions, rows with a target: int64
        if shape.positions == "rope":
            total += self.slots * shape.rotary_width * FLOAT32 * (2 if shape.window_theta else 1)
        if part.is_first and shape.dropout:
            total += here * shape.d_model * (FLOAT32 if self.device == "cpu" else 1)
        if part.is_last:
            kept = (1 + self.adapter.trains("norm")) * FLOAT32 if self.widens_norms else self.stream
            total += here * (shape.d_model * kept + 2 * FLOAT32)
        return total


def memory_of_stages(work: Workload) -> list[Memory]:
    """Return the memory of a rank at each position in the pipeline; one entry without a pipeline."""
    parts = parts_of_ranks(work.shape, work.config, work.micro_batches)
    return [_memory_of_part(work, part) for part in parts]


def _memory_of_part(work: Workload, part: RankPart) -> Memory:
    shape, config = work.shape, work.config
    divided = config.divisions(work.world_size)
    block, outside = work.block, outside_held(shape, part, work.adapter, config.tensor)
    held = block * part.layers + outside
    shards = divided["parameters"]
    row = OPTIMIZERS[work.optimizer]
    states = row.state_bytes * held.trained
    if row.matrix_bytes is not None:
        states += (row.matrix_bytes - row.state_bytes) * part.layers * block.matrices
    optimizer = int(states // divided["optimizer"])
    largest = int(row.state_bytes * largest_trained(shape, work.adapter, config.tensor))
    if config.strategy.divides_optimizer:  # by whole tensors
        optimizer = max(optimizer, largest)
    parameters, gradients = held.size(work.product) // shards, round(FLOAT32 * held.trained) // shards
    host = disk = 0
    if config.offload == "disk":
        disk, optimizer = optimizer + parameters * config.offloads_parameters, 0
    if config.offloads_parameters:
        host = gradients + optimizer + parameters * (config.offload == "cpu")
        parameters = gradients = optimizer = 0
    if config.pipeline > 1:  # gradients are reduced once a step
        gradients = round(FLOAT32 * held.trained)
    gathered = copies = loss = 0
    if config.uses_fsdp:
        keeps = config.strategy.keeps_gathered or config.pipeline > 1
        blocks = part.layers if keeps else min(GATHERED_BLOCKS, part.layers)
        gathered = (outside + block * blocks).size(work.product, work.stream)
    if not config.shards_parameters and work.product < FLOAT32:
        # Autocast casts matrices and biases, once a step.
        copies = round(work.product * part.layers * block.cast)
    if part.is_last:
        matrix = output_rows(shape, config.tensor) * shape.d_model * FLOAT32
        matrix *= trains_output(shape, work.adapter)
        loss = part.edge_in_flight * (work.slots * shape.d_model * work.product + matrix)
    activations = round(part.in_flight * part.layers * work.kept_by_block())
    activations += part.edge_in_flight * work.saved_outside(part)

    loss_temporary, block_temporary = _temporaries(work, block, outside)
    # Before a block's backward pass the loss has freed its memory.
    temporary = max(block_temporary - loss, loss_temporary if part.is_last else 0)
    if work.micro_batches > 1:
        # Autograd runs older operations last: in the second micro-batch it casts all gradients of copies at the end.
        matrix = max(shape.d_ff, shape.heads * shape.head_width) // config.tensor * shape.d_model * FLOAT32
        temporary = max(temporary, copies + matrix - activations - loss)
    if disk and not config.offloads_parameters:  # on the device, a tensor's state while it is updated
        temporary = max(temporary, largest - activations - loss)
    return Memory(
        parameters, gradients, optimizer, gathered, copies, activations, loss, temporary, host, disk
    )


def _temporaries(work: Workload, block: Held, outside: Held) -> tuple[int, int]:
    """Return (loss, backward pass of a block): temporary bytes in addition to saved tensors.

    Loss: the larger of a chunk's logits with the cast output matrix, and the scaled gradient of that matrix; on a CPU,
    log-softmax of half-precision logits makes a float32 copy of them.

    Block: recomputed activations, gradients of the feed-forward layer's wide tensors and of the residual stream, a
    matrix's gradient (or the copies to dequantize or normalize it), and with `fully_shard` the block's gradients as
    computed and as reduced.
    """
    shape, tensor, slots, product = work.shape, work.config.tensor, work.slots, work.product
    columns, width, d = output_rows(shape, tensor), shape.d_ff // tensor, shape.d_model
    cast = product if product < FLOAT32 else 0
    rows = min(slots, chunk_rows(columns, torch.device("cpu" if work.device == "cpu" else "cuda")))
    logits = rows * columns * (FLOAT32 + product + (FLOAT32 if cast and work.device == "cpu" else cast))
    trained = trains_output(shape, work.adapter)
    matrix = columns * d * cast * (trained or shape.tied)  # a frozen head has the dtype of products
    loss = max(logits + matrix, columns * d * FLOAT32 * trained)
    recomputed = sum(work.saved_by_block().values()) - work.kept_by_block()
    wide = slots * width * product * (2 if shape.gated else 1)
    reduced = (work.stream + FLOAT32) * block.trained + work.stream * outside.trained
    reduced *= work.config.uses_fsdp
    streams = 2 * slots // tensor * d * FLOAT32 + width * d * _matrix_bytes(work.adapter)
    return loss, round(recomputed + wide + streams + reduced)


def _matrix_bytes(adapter: AdapterConfig) -> int:
    """Temporary bytes per element of a matrix: its gradient, or float32 copies of a frozen matrix and its codes."""
    of_dora = 3 * FLOAT32 if adapter.name == "dora" else 0
    of_format = adapter.format.unpacked if adapter.format else 0
    return max(of_dora, of_format, FLOAT32 if adapter.name == "none" or adapter.train else 0)
