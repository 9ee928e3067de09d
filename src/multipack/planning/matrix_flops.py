"""FLOPs of a decoder's matrix products, by what is trained."""

from __future__ import annotations

from collections.abc import Iterator

from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.shapes.families import LLAMA

MATRIX_FLOPS = {"none": 6, "flash": 6, "full": 8}
"""FLOPs per matrix element and token, forward and backward; 2 of them are the gradient of the matrix."""
FLOPS_PER_BYTE = 1333.0
"""FLOPs of a device while it sends a byte to a rank of its host, by the rates that `multipack advise`
assumes: 400 TFLOP/s and 300 GB/s."""

_FOREIGN = {ours: theirs for theirs, (ours,) in LLAMA.inner.items()}
"""Name of a matrix in a block → its name in most models of transformers."""


def _matrices(shape: ModelShape) -> int:
    """Number of matrix elements that a token is multiplied with, including the output layer."""
    return shape.token_parameters + shape.d_model * (shape.scores or shape.vocabulary_size)


def matrix_flops(shape: ModelShape, recompute: str, adapter: AdapterConfig | None) -> int:
    """FLOPs of matrix products per token; a frozen matrix has no gradient."""
    elements = _matrices(shape)
    if adapter is None or adapter.name == "none":
        return MATRIX_FLOPS[recompute] * elements
    trained = added = 0
    for name, inputs, outputs in _linear_layers(shape):
        if adapter.trains(name):
            trained += inputs * outputs
        elif adapter.adapts(name) and name.startswith("blocks."):
            added += adapter.rank * (inputs + outputs)
    return MATRIX_FLOPS[recompute] * (elements + added) - 2 * (elements - trained)


def _linear_layers(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """Name, inputs and outputs of the matrices that adapters may be on, and of the head.

    A model of transformers has other names, Llama's most often; its experts and latents have no adapters here.
    """
    d, heads, keys = shape.d_model, shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    inner = (
        {}
        if shape.kv_rank
        else {"query": (d, heads), "key": (d, keys), "value": (d, keys), "output": (heads, d)}
    )
    inner = {f"attention.{name}": sizes for name, sizes in inner.items()}
    if not shape.experts:
        gate = {"feed_forward.gate": (d, shape.d_ff)} if shape.gated else {}
        inner |= gate | {"feed_forward.up": (d, shape.d_ff), "feed_forward.down": (shape.d_ff, d)}
    for layer in range(shape.layers):
        for name, sizes in inner.items():
            yield f"blocks.{layer}.{_FOREIGN[name] if shape.architecture else name}", *sizes
    head = "score" if shape.scores else "embedding" if shape.tied else "head"
    yield head, d, shape.scores or shape.vocabulary_size
