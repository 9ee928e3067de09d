"""Cost of training on a document, for the packer, the balancer and the FLOP count.

Forward and backward pass, causal attention inside each document, model FLOPs (no recomputation):

    F = 6·(N·P + d·V)·Σ l  +  6·N·H·e·Σ l(l+1)

with N layers of P matrix elements, width d, vocabulary V, and H heads of width e. A matrix element costs 2 FLOPs per
token forward and 4 backward (Kaplan et al. 2020, arXiv:2001.08361, §2.1). A query-key pair costs 4·H·e forward and
twice that backward, and a causal document of l tokens has l(l+1)/2 pairs (Dao 2023, arXiv:2307.08691, §4). Divided by
6·N·H·e:

    cost(l) = L*·l + l(l+1),     L* = (N·P + d·V) / (N·H·e)

L* is the length in tokens at which attention costs as much as all other operations: 57,256 for Llama 3 8B.

Variants change one term each:

    mixture of experts   P counts the router and the experts that a token uses
    latent attention     e is the mean of the widths of a head's key and value: (k + v) / 2
    sliding window w     l(l+1) becomes 2·Σ_{t ≤ l} min(t, w) in the layers with a window
    recompute=flash      attention 7 instead of 6: the backward pass recomputes the scores, 5 products instead of 4
    recompute=full       the forward pass runs twice: matrices 8 instead of 6, attention 9 (7 of flash attention and 2)
    adapters             frozen matrices 4 instead of 6, since they have no gradients; matrices of adapters 6

Documents that share their beginning compute it once. A node of l tokens behind p others costs L*·l + l(2p + l + 1).
`AttentionPairs` has the second term of items of such documents.

All costs are integers, so that plans are the same on every platform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from numpy.typing import ArrayLike

from multipack.planning.attention_pairs import AttentionPairs, windowed_pairs
from multipack.planning.lengths import Integers, check_integer, check_lengths
from multipack.planning.matrix_flops import matrix_flops
from multipack.planning.options import Balance
from multipack.shapes import SHAPES, ModelShape
from multipack.shapes.adapter import AdapterConfig

Recompute = Literal["none", "flash", "full"]

WEIGHTS = ("linear", "quadratic", "sliding")
"""Integer weights of the cost, in the order of its formula."""


@dataclass(frozen=True)
class CostModel:
    """The cost of documents for one model: integers for plans, and FLOPs.

        cost(l) = linear·l + quadratic·l(l+1) + sliding·2·Σ_{t ≤ l} min(t, window)

    Costs have no unit: only their ratios matter, and the weights are divided by their greatest common divisor.
    Two models with the same costs are equal and give equal plans.

    Attributes:
        shape: the decoder whose FLOPs are counted; None = unknown.
        linear: L* in tokens, rounded, if `quadratic` is 1.
        quadratic: weight of l(l+1): 1, or the share of layers without a window.
        sliding: weight of the pairs inside the window: the share of layers with a window.
        window: tokens that these layers see; 0 = no layer has a window.
        recompute: what the backward pass recomputes.
        adapter: what is trained, for FLOPs; None = all matrices.
    """

    shape: ModelShape | None = field(compare=False)
    linear: int
    quadratic: int = 1
    sliding: int = 0
    window: int = 0
    recompute: Recompute = field(default="none", compare=False)
    adapter: AdapterConfig | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check the values, and divide the weights by their greatest common divisor."""
        for name in (*WEIGHTS, "window"):
            object.__setattr__(self, name, check_integer(f"cost.{name}", getattr(self, name), 0))
        if self.recompute not in get_args(Recompute):
            raise ValueError(
                f"recompute={self.recompute!r} is unknown; choose one of {', '.join(get_args(Recompute))}"
            )
        if bool(self.sliding) != bool(self.window):
            raise ValueError(
                f"sliding={self.sliding} and window={self.window} belong together: set both, or neither"
            )
        divisor = math.gcd(*(getattr(self, name) for name in WEIGHTS))
        if divisor == 0:
            raise ValueError("a cost model needs a weight above 0: linear, quadratic or sliding")
        for name in WEIGHTS:
            object.__setattr__(self, name, getattr(self, name) // divisor)

    @classmethod
    def from_shape(
        cls,
        shape: ModelShape | None = None,
        *,
        recompute: Recompute = "none",
        adapter: AdapterConfig | None = None,
    ) -> CostModel:
        """The cost model of a decoder, from its FLOPs.

        Args:
            shape: the decoder; None = Llama 3 8B.
            recompute: `none` counts model FLOPs, `flash` and `full` executed FLOPs (see the module).
            adapter: which matrices are trained; None = all.
        """
        chosen = SHAPES["llama-8b"] if shape is None else shape
        if not isinstance(chosen, ModelShape):
            raise ValueError(f"cost must be a CostModel or a ModelShape, got {shape!r}")
        sliding = chosen.sliding_layers
        repeats = math.gcd(chosen.layers - sliding, sliding)  # of the same mix of layers
        matrices = matrix_flops(chosen, recompute, adapter)
        pair = repeats * _pair_flops(chosen, recompute)
        return cls(
            chosen,
            linear=(2 * matrices + pair) // (2 * pair),
            quadratic=(chosen.layers - sliding) // repeats,
            sliding=sliding // repeats,
            window=chosen.window,
            recompute=recompute,
            adapter=adapter,
        )

    def cost(self, lengths: ArrayLike, attention: AttentionPairs | None = None) -> Integers:
        """(items,) int64 cost of each item; a longer document costs no less than a shorter one.

        Args:
            lengths: (items,) slots of each.
            attention: attention of each; None = each is one document.

        Raises:
            ValueError: a length is not a positive integer, or the costs sum to 2^62 or more.
        """
        checked = check_lengths(lengths)
        self.check(checked)
        return self.cost_of(checked, attention)

    def cost_of(self, slots: Integers, attention: AttentionPairs | None) -> Integers:
        """`cost` without checks: a plan checks its documents once, and computes costs of every window."""
        if attention is not None:
            cost = self.linear * slots + self.quadratic * attention.pairs
            return cost + self.sliding * attention.windowed
        cost = slots * (self.linear + self.quadratic * (slots + 1))
        if self.sliding:
            cost += self.sliding * windowed_pairs(slots, self.window)
        return cost

    def check(self, lengths: Integers) -> None:
        """Raise the errors of `cost` without allocating the costs."""
        count, longest = len(lengths), int(lengths.max())
        pairs = self.quadratic * (longest + 1) + self.sliding * min(longest + 1, 2 * self.window)
        # The sum of lengths does not overflow if this product, which is at least as large, is below 2^63.
        wraps = longest * count >= 1 << 63
        if wraps or int(lengths.sum()) * (self.linear + pairs) >= 1 << 62:
            raise ValueError(
                f"{count:,} documents of up to {longest:,} tokens cost more than int64 can hold;"
                " plan them in several parts"
            )

    def balanced(self, balance: Balance, slots: Integers) -> CostModel:
        """The cost that packs of documents of these slots are equalized in; `ValueError` if costs exceed int64."""
        chosen = CostModel(None, linear=1, quadratic=0) if balance == "tokens" else self
        if balance == "joint":
            CostModel(None, linear=1).check(slots)  # so that the sum of squares is exact
            tokens, squares = int(slots.sum()), int(slots @ slots)
            chosen = CostModel(None, linear=(2 * squares + tokens) // (2 * tokens))
        chosen.check(slots)
        return chosen

    def key(self) -> dict[str, int]:
        """Plain values that determine the costs."""
        # Documents could once cost a constant each; the same plans keep their fingerprints.
        return {name: getattr(self, name) for name in (*WEIGHTS, "window")} | {"constant": 0}

    def flops(
        self, lengths: ArrayLike, attention: AttentionPairs | None = None, *, executed: bool = False
    ) -> float:
        """FLOPs of one forward and backward pass over these items.

        Args:
            lengths: (items,) tokens, or slots, of each.
            attention: as in `cost`.
            executed: count what the device executes, with recomputation; otherwise model FLOPs, for MFU.

        Raises:
            ValueError: lengths are invalid, or the model has no shape.
        """
        checked, shape, recompute = check_lengths(lengths), self.shape, self.recompute if executed else "none"
        if shape is None:
            raise ValueError(
                "this cost model has no shape, so its FLOPs are not known: use CostModel.from_shape"
            )
        matrices = matrix_flops(shape, recompute, self.adapter) * int(checked.sum())
        each = attention or AttentionPairs.of(checked, window=shape.window)
        pairs = (shape.layers - shape.sliding_layers) * int(each.pairs.sum())
        pairs += shape.sliding_layers * int(each.windowed.sum())
        return float(matrices + _pair_flops(shape, recompute) * pairs)


def _pair_flops(shape: ModelShape, recompute: Recompute) -> int:
    """FLOPs of one layer per unit of l(l+1), which counts each query-key pair twice: 6·H·e, more with recomputation.

    A product with queries or keys of width k costs 2·H·k per pair, with values of width v 2·H·v. The forward pass
    has one of each, the backward pass two of each. Flash attention adds one with keys, a second forward pass one of
    each.
    """
    key, value = shape.head_width, shape.value_head_width
    products = {"none": 3 * (key + value), "flash": 4 * key + 3 * value, "full": 5 * key + 4 * value}
    return shape.heads * products[recompute]
