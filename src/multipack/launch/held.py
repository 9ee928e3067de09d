"""Numbers of a model's parameters on a rank, counted from its modules on the meta device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from multipack.models.decoder import PARALLEL_PLAN, Decoder, DecoderPart
from multipack.ops.lora import add_adapters
from multipack.parallel.stages import RankPart
from multipack.parallel.tensor import pieces
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
        matrices: trained elements in matrices of blocks.
        cast: elements of matrices and biases in float32, which autocast copies in half precision.
        frozen: other elements in float32, without gradients.
        products: elements of frozen linear layers, in the dtype of matrix products.
        quantized: bytes of quantized matrices.
        adapted_ranks, adapted_inputs, adapted_outputs: sums of r, inputs and outputs over adapted matrices.
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
        """The sum of both."""
        return Held(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, factor: float) -> Held:
        """All numbers, times a factor."""
        return Held(**{name: factor * value for name, value in vars(self).items()})

    def size(self, product: int, element: int = FLOAT32) -> int:
        """Bytes: `product` of an element of frozen linear layers, `element` of others, quantized ones as they are."""
        return round(element * (self.trained + self.frozen) + product * self.products + self.quantized)


@dataclass(frozen=True)
class Piece:
    """A parameter on a rank: its module, whether that is a Linear, and its name there."""

    module: str
    is_linear: bool
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_trained: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def held(self) -> Held:
        """The parameter as the numbers of a rank."""
        is_cast = self.is_linear and self.module.startswith("blocks.") and self.name != "magnitude"
        if self.dtype == torch.uint8:
            return Held(quantized=self.size)
        if self.dtype != torch.float32:
            return Held(products=self.size)
        found = Held(cast=self.size * is_cast)
        if not self.is_trained:
            return found + Held(frozen=self.size)
        found += Held(trained=self.size, matrices=self.size * (is_cast and len(self.shape) == 2))
        if self.name == "lora_a":
            found += Held(adapted_ranks=self.shape[0], adapted_inputs=self.shape[1])
        return found + Held(adapted_outputs=self.shape[0]) if self.name == "lora_b" else found


@cache
def blocks_held(shape: ModelShape, adapter: AdapterConfig = NO_ADAPTER, tensor: int = 1) -> Held:
    """The parameters of a block on a rank, a mean over blocks; `tensor` ranks divide matrices and some biases."""
    found = Held()
    for layer, count in _kinds_of_blocks(shape, adapter).items():
        for piece in _pieces(shape, adapter, tensor, layer, layer + 1):
            found += piece.held * (count * piece.module.startswith("blocks."))
    return found * (1 / shape.layers)


@cache
def outside_held(
    shape: ModelShape, part: RankPart, adapter: AdapterConfig = NO_ADAPTER, tensor: int = 1
) -> Held:
    """The parameters outside of blocks on a rank: embedding, positions, last norm, head."""
    # The last rank of a pipeline also has the embedding if it is the output matrix; a rank with both ends has it once.
    ends = [0] * part.is_first + [shape.layers] * part.is_last
    found = {
        (each.module, each.name): each for end in ends for each in _pieces(shape, adapter, tensor, end, end)
    }
    return sum((each.held for each in found.values()), Held())


@cache
def largest_trained(shape: ModelShape, adapter: AdapterConfig, tensor: int) -> int:
    """Elements on a rank of the largest parameter that is trained."""
    parts = [
        *((layer, layer + 1) for layer in _kinds_of_blocks(shape, adapter)),
        (0, 0),
        (shape.layers, shape.layers),
    ]
    found = (each for part in parts for each in _pieces(shape, adapter, tensor, *part) if each.is_trained)
    return max(each.size for each in found)


def output_rows(shape: ModelShape, tensor: int = 1) -> int:
    """Rows of the output matrix on a rank: of the vocabulary, or of a reward model's scores."""
    return shape.scores or shape.vocabulary_size // tensor


def trains_output(shape: ModelShape, adapter: AdapterConfig) -> bool:
    """Whether the output matrix has a gradient."""
    return bool(shape.scores) or adapter.trains("embedding" if shape.tied else "head")


def model_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the whole decoder, including biases and norms."""
    return sum(parameter.numel() for parameter in decoder_of(shape).parameters())


def decoder_of(shape: ModelShape, part: DecoderPart | None = None) -> Decoder:
    """The decoder without values; the code of another model is counted as our decoder of the same widths.

    Raises:
        ValueError: the shape serves planning only.
    """
    with torch.device("meta"):
        return Decoder(replace(shape, architecture="", unsupported="", window_layers=0), part=part)


@cache
def _pieces(
    shape: ModelShape, adapter: AdapterConfig, tensor: int, first: int, stop: int
) -> tuple[Piece, ...]:
    """Parameters of a rank in blocks `first` … `stop` − 1, and outside of blocks in a pipeline stage of them."""
    model = decoder_of(shape, DecoderPart(first, stop, shape.layers))
    # Frozen products are recognized by their dtype. A new head is trained whole.
    add_adapters(model, adapter.with_head("score") if shape.scores else adapter, torch.bfloat16)
    return tuple(
        Piece(name, isinstance(module, nn.Linear), own, each.dtype, size, each.requires_grad)
        for name, module, own, each, size in pieces(model, PARALLEL_PLAN, tensor)
    )


@cache
def _kinds_of_blocks(shape: ModelShape, adapter: AdapterConfig) -> Mapping[int, int]:
    """The first block of each kind → number of blocks of the kind, in which the same modules are adapted."""
    modules = {each.module.removeprefix("blocks.0.") for each in _pieces(shape, NO_ADAPTER, 1, 0, 1)}
    first: dict[tuple[bool, ...], int] = {}
    counts = Counter[int]()
    for layer in range(shape.layers):
        names = [f"blocks.{layer}.{name}" for name in modules]
        kind = tuple(matches(name) for name in names for matches in (adapter.adapts, adapter.trains))
        counts[first.setdefault(kind, layer)] += 1
    return counts
