"""What a document costs to train on: the one place that says so, for packer, balancer and FLOPs meter.

Forward and backward together, causal attention inside each document, model FLOPs (nothing recomputed):

    F = 6·(N·P + d·V)·Σ l  +  6·N·H·e·Σ l(l+1)

N layers of P matrix elements, width d, vocabulary V, H heads of width e. A matrix element costs 2 FLOPs a
token forward and 4 backward (Kaplan et al. 2020, arXiv:2001.08361, §2.1); a query-key pair costs 4·H·e
forward and twice that backward, and a causal document of l tokens has l(l+1)/2 pairs (the causal count
of Dao 2023, arXiv:2307.08691, §4). Divided by 6·N·H·e:

    cost(l) = L*·l + l(l+1),     L* = (N·P + d·V) / (N·H·e)

L* is the length, in tokens, at which attention costs as much as everything else: 57,256 for Llama 3 8B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.planning.packing import check_lengths
from multipack.shapes import SHAPES, ModelShape


@dataclass(frozen=True)
class CostModel:
    """The cost of documents for one model.

    Attributes:
        shape: the decoder.
        linear: L* in tokens, rounded, so that plans are integers and the same on every platform.
    """

    shape: ModelShape
    linear: int

    @classmethod
    def from_shape(cls, shape: ModelShape | None = None) -> CostModel:
        """The cost model of a decoder; None = Llama 3 8B."""
        chosen = SHAPES["llama-8b"] if shape is None else shape
        layers = chosen.layers
        numerator = layers * chosen.layer_parameters + chosen.d_model * chosen.vocabulary_size
        denominator = layers * chosen.heads * chosen.head_width
        return cls(chosen, (2 * numerator + denominator) // (2 * denominator))

    def cost(self, lengths: ArrayLike) -> NDArray[np.int64]:
        """(documents,) int64: L*·l + l(l+1) for each document.

        Raises:
            ValueError: lengths that are no positive integers, or so long that a cost exceeds int64.
        """
        return weigh(check_lengths(lengths), self.linear, 1)

    def flops(self, lengths: ArrayLike, vocabulary_size: int | None = None) -> float:
        """Model FLOPs of one forward and backward pass over these documents, each by itself.

        Args:
            lengths: (documents,) tokens of each document.
            vocabulary_size: of the output layer; None = the shape's own.
        """
        checked = check_lengths(lengths)
        shape = self.shape
        vocabulary = shape.vocabulary_size if vocabulary_size is None else vocabulary_size
        matrices = shape.layers * shape.layer_parameters + shape.d_model * vocabulary
        attention = shape.layers * shape.heads * shape.head_width
        squares = weigh(checked, 0, 1)
        return float(6 * matrices * int(checked.sum()) + 6 * attention * int(squares.sum()))


def weigh(lengths: NDArray[np.int64], linear: int, quadratic: int) -> NDArray[np.int64]:
    """linear·l + quadratic·l(l+1) for each document, refusing sums that would exceed int64.

    Raises:
        ValueError: the sum over all documents is 2^62 or more.
    """
    longest = int(lengths.max(initial=0))
    if int(lengths.sum()) * (linear + quadratic * (longest + 1)) >= 1 << 62:
        raise ValueError(
            f"{len(lengths):,} documents of up to {longest:,} tokens cost more than int64 can hold;"
            " plan them in several parts"
        )
    return lengths * (linear + quadratic * (lengths + 1))
