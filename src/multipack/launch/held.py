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


@cache
def blocks_held(shape: ModelShape, adapter: AdapterConfig = NO_ADAPTER, tensor: int = 1) -> Held:
    """The parameters of a block on a rank, a mean over blocks; `tensor` ranks divide matrices and some biases."""
    found = Held()
    for layer, count in _kinds_of_blocks(shape, adapter).items():
        for name, held in _parameters(shape, adapter, tensor, layer, layer + 1).items():
            found += held * (count * name.startswith("blocks."))
    return found * (1 / shape.layers)


@cache
def outside_held(
    shape: ModelShape, part: RankPart, adapter: AdapterConfig = NO_ADAPTER, tensor: int = 1
) -> Held:
    """The parameters outside of blocks on a rank: embedding, positions, last norm, head."""
    # The last rank of a pipeline also has the embedding if it is the output matrix; a rank with both ends has it once.
    found: dict[str, Held] = {}
    for end in [0] * part.is_first + [shape.layers] * part.is_last:
        found |= _parameters(shape, adapter, tensor, end, end)
    return sum(found.values(), Held())


@cache
def largest_trained(shape: ModelShape, adapter: AdapterConfig, tensor: int) -> int:
    """Elements on a rank of the largest parameter that is trained."""
    blocks = ((layer, layer + 1) for layer in _kinds_of_blocks(shape, adapter))
    parts = [*blocks, (0, 0), (shape.layers, shape.layers)]
    found = (held for part in parts for held in _parameters(shape, adapter, tensor, *part).values())
    return int(max(held.trained for held in found))


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
def _parameters(
    shape: ModelShape, adapter: AdapterConfig, tensor: int, first: int, stop: int
) -> Mapping[str, Held]:
    """Parameters of a rank in blocks `first` … `stop` − 1, and outside of blocks in a pipeline stage of them."""
    model = decoder_of(shape, DecoderPart(first, stop, shape.layers))
    # Frozen products are recognized by their dtype. A new head is trained whole.
    add_adapters(model, adapter.with_head("score") if shape.scores else adapter, torch.bfloat16)
    return {
        f"{name}.{own}": _held(name, module, own, parameter, size)
        for name, module, own, parameter, size in pieces(model, PARALLEL_PLAN, tensor)
    }


def _held(name: str, module: nn.Module, own: str, parameter: nn.Parameter, size: tuple[int, ...]) -> Held:
    """A rank's piece of a parameter, of this size, as its numbers; see `pieces`."""
    elements = math.prod(size)
    if parameter.dtype == torch.uint8:
        return Held(quantized=elements)
    if parameter.dtype != torch.float32:
        return Held(products=elements)
    is_cast = isinstance(module, nn.Linear) and name.startswith("blocks.") and own != "magnitude"
    found = Held(cast=elements * is_cast)
    if not parameter.requires_grad:
        return found + Held(frozen=elements)
    found += Held(trained=elements, matrices=elements * (is_cast and len(size) == 2))
    if own == "lora_a":
        found += Held(adapted_ranks=size[0], adapted_inputs=size[1])
    return found + Held(adapted_outputs=size[0]) if own == "lora_b" else found


@cache
def _kinds_of_blocks(shape: ModelShape, adapter: AdapterConfig) -> Mapping[int, int]:
    """The first block of each kind → number of blocks of the kind, in which the same modules are adapted."""
    parameters = _parameters(shape, NO_ADAPTER, 1, 0, 1)
    modules = {name.rpartition(".")[0].removeprefix("blocks.0.") for name in parameters}
    first: dict[tuple[bool, ...], int] = {}
    counts = Counter[int]()
    for layer in range(shape.layers):
        names = [f"blocks.{layer}.{name}" for name in modules]
        kind = tuple(matches(name) for name in names for matches in (adapter.adapts, adapter.trains))
        counts[first.setdefault(kind, layer)] += 1
    return counts
