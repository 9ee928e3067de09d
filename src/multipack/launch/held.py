"""Numbers of a model's parameters on a rank: what is trained, and how the rest is held beside adapters. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from multipack.parallel.stages import RankPart
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig

FLOAT32 = 4
"""Bytes of an element of parameters, gradients, moments and exact sums."""
NO_ADAPTER = AdapterConfig()
"""All parameters are trained."""


@dataclass(frozen=True)
class Held:
    """Parameters on a rank, before data-parallel ranks divide them.

    Attributes:
        trained: elements in float32, with gradients and optimizer state.
        matrices: those of them that are in matrices of blocks.
        cast: elements in float32 that autocast copies in half precision: of matrices and biases.
        frozen: other elements in float32, without gradients.
        products: frozen elements in the dtype of matrix products: of linear layers.
        quantized: bytes of quantized matrices.
        adapted_ranks, adapted_inputs, adapted_outputs: sums over adapted matrices.
    """

    trained: float = 0
    matrices: float = 0
    cast: float = 0
    frozen: float = 0
    products: float = 0
    quantized: float = 0
    adapted_ranks: float = 0
    adapted_inputs: float = 0
    adapted_outputs: float = 0

    def __add__(self, other: Held) -> Held:
        """Both together."""
        return Held(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> Held:
        """All numbers, times a factor."""
        return Held(*(factor * each for each in vars(self).values()))

    def size(self, product: int, element: int = FLOAT32) -> int:
        """Bytes: `product` of an element of frozen linear layers, `element` of others, quantized ones as they are."""
        return round(element * (self.trained + self.frozen) + product * self.products + self.quantized)


def matrices_of(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """Yield (name in a block, outputs, inputs) of the matrices of a block."""
    attended, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    yield "attention.query", attended, shape.d_model
    yield "attention.key", keys, shape.d_model
    yield "attention.value", keys, shape.d_model
    yield "attention.output", shape.d_model, attended
    if shape.gated:
        yield "feed_forward.gate", shape.d_ff, shape.d_model
    yield "feed_forward.up", shape.d_ff, shape.d_model
    yield "feed_forward.down", shape.d_model, shape.d_ff


@cache
def blocks_held(shape: ModelShape, adapter: AdapterConfig = NO_ADAPTER, tensor: int = 1) -> Held:
    """The parameters of a block on a rank, a mean over blocks; `tensor` ranks divide matrices and some biases."""
    found = Held()
    for layer in range(1 if adapter.name == "none" else shape.layers):
        norms = _block_norms(shape, tensor)
        trained = adapter.trains(f"blocks.{layer}.attention_norm")
        found += Held(trained=norms) if trained else Held(frozen=norms)
        for name, outputs, inputs in matrices_of(shape):
            found += _matrix_held(shape, adapter, f"blocks.{layer}.{name}", outputs, inputs, tensor)
    return found if adapter.name == "none" else found * (1 / shape.layers)


def _matrix_held(
    shape: ModelShape, adapter: AdapterConfig, name: str, outputs: int, inputs: int, tensor: int
) -> Held:
    """A matrix of a block with its bias and its adapter."""
    kind = name.rpartition(".")[2]
    by_inputs = kind in ("output", "down")
    shared = kind in ("key", "value") and tensor > shape.kv_heads  # every rank has the whole matrix
    ranks = 1 if shared else tensor
    size = outputs * inputs // ranks
    has_bias = shape.bias or (shape.qkv_bias and kind in ("query", "key", "value"))
    bias = has_bias * (outputs if by_inputs else outputs // ranks)
    if adapter.trains(name):
        found = Held(trained=size + bias, matrices=size, cast=size + bias)
    elif adapter.format is not None:
        quantized = adapter.format.rank_bytes(outputs, inputs, ranks, adapter.double_quantize)
        found = Held(cast=bias, frozen=bias, quantized=quantized)
    else:
        found = Held(cast=bias, frozen=bias, products=size)
    if adapter.adapts(name):
        rows, columns = (outputs, inputs // ranks) if by_inputs else (outputs // ranks, inputs)
        pair = adapter.rank * (rows + columns)
        found += Held(
            pair + rows * (adapter.name == "dora"),
            pair,
            pair,
            adapted_ranks=adapter.rank,
            adapted_inputs=columns,
            adapted_outputs=rows,
        )
    return found


@cache
def outside_held(
    shape: ModelShape, part: RankPart, adapter: AdapterConfig = NO_ADAPTER, tensor: int = 1
) -> Held:
    """The parameters outside of blocks on a rank: embedding, positions, last norm, head."""
    head = output_rows(shape, tensor) * shape.d_model * part.is_last
    # The last rank of a pipeline also has the embedding if it is the output matrix.
    embeds = part.is_first or (part.is_last and shape.tied and not shape.scores)
    sizes = {
        "embedding": shape.vocabulary_size // tensor * shape.d_model * embeds,
        "positions": shape.context * shape.d_model * (part.is_first and shape.positions == "learned"),
        "norm": _norm_parameters(shape) * part.is_last,
        "score" if shape.scores else "head": head * bool(shape.scores or not shape.tied),
    }
    found = Held()
    for name, size in sizes.items():
        if adapter.trains(name) or name == "score":
            found += Held(trained=size)
        else:
            found += Held(products=size) if name == "head" else Held(frozen=size)
    return found


def output_rows(shape: ModelShape, tensor: int = 1) -> int:
    """Rows of the output matrix on a rank: of the vocabulary, or of a reward model's scores."""
    return shape.scores or shape.vocabulary_size // tensor


def trains_output(shape: ModelShape, adapter: AdapterConfig) -> bool:
    """Whether the output matrix has a gradient."""
    return bool(shape.scores) or adapter.trains("embedding" if shape.tied else "head")


def _block_norms(shape: ModelShape, tensor: int) -> int:
    """Return the number of parameters of a block's norms on a rank."""
    of_heads = {"none": 0, "head": 2, "all": (shape.heads + shape.kv_heads) // tensor}[shape.head_norm]
    return (4 if shape.norms == "around" else 2) * _norm_parameters(shape) + of_heads * shape.head_width


def model_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the whole decoder, including biases and norms."""
    return round((blocks_held(shape) * shape.layers + outside_held(shape, RankPart(shape.layers))).trained)


def _norm_parameters(shape: ModelShape) -> int:
    return shape.d_model * (2 if shape.norm == "layernorm" and shape.bias else 1)
