"""What a document costs to train on: the one place that says so, for packer, balancer and FLOPs meter.

Forward and backward together, causal attention inside each document, model FLOPs (nothing recomputed):

    F = 6·(N·P + d·V)·Σ l  +  6·N·H·e·Σ l(l+1)

N layers of P matrix elements, width d, vocabulary V, H heads of width e. A matrix element costs 2 FLOPs a
token forward and 4 backward (Kaplan et al. 2020, arXiv:2001.08361, §2.1); a query-key pair costs 4·H·e
forward and twice that backward, and a causal document of l tokens has l(l+1)/2 pairs (the causal count
of Dao 2023, arXiv:2307.08691, §4). Divided by 6·N·H·e:

    cost(l) = L*·l + l(l+1),     L* = (N·P + d·V) / (N·H·e)

L* is the length, in tokens, at which attention costs as much as everything else: 57,256 for Llama 3 8B.

Variants, each of which changes one term:

    mixture of experts   P holds the router and those experts that a token passes through
    latent attention     e is the mean of the widths of a head's key and of its value: (k + v) / 2
    sliding window w     l(l+1) becomes 2·Σ_{t ≤ l} min(t, w) in the layers that slide
    recompute=flash      attention 7 instead of 6: the backward pass computes the scores anew, 5 products instead of 4
    recompute=full       the forward pass runs twice: matrices 8 instead of 6, attention 9 (7 of flash attention and 2;
                         without flash attention it would be 8)
    align=a              each document is padded to a multiple of a tokens, which cost as others do
    constant             of every document, whatever its length (measured models: kernel launches)

All costs are integers, so that plans are the same on every platform.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.atomic import write_atomically
from multipack.planning.lengths import check_integer, check_lengths
from multipack.planning.timing import Seconds, fit_seconds, integer_weights
from multipack.shapes import SHAPES, ModelShape

Recompute = Literal["none", "flash", "full"]

MATRIX_FLOPS = {"none": 6, "flash": 6, "full": 8}
"""FLOPs of a matrix element and a token, forward and backward."""

WEIGHTS = ("linear", "quadratic", "sliding", "constant")
"""The integers of the cost, in the order of its formula."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """The cost of documents for one model: integers for plans, FLOPs, and seconds where they were measured.

        cost(l) = linear·l + quadratic·l(l+1) + sliding·2·Σ_{t ≤ l} min(t, window) + constant

    where l is padded to a multiple of `align`. Costs have no unit: only their ratios matter, and the four weights
    are divided by what divides all of them. Models are equal when their documents cost the same, whatever
    they were made from: then plans are equal too.

    Attributes:
        shape: the decoder, which FLOPs are counted of; None = unknown, of a fitted model.
        linear: L* in tokens, rounded, where `quadratic` is 1.
        quadratic: weight of l(l+1): 1, or the share of layers that see all tokens where others slide.
        sliding: weight of the pairs inside the window: the share of layers that slide.
        window: tokens that those layers see; 0 = none slides.
        constant: of every document.
        align: tokens; each document is padded to a multiple of this.
        recompute: what the backward pass computes anew.
        timed: measured seconds, where the model was fitted.
    """

    shape: ModelShape | None
    linear: int
    quadratic: int = 1
    sliding: int = 0
    window: int = 0
    constant: int = 0
    align: int = 1
    recompute: Recompute = "none"
    timed: Seconds | None = None

    def __post_init__(self) -> None:
        """Check what may come from a file, and write equal costs in one way."""
        for name in (*WEIGHTS, "window"):
            object.__setattr__(self, name, check_integer(f"cost.{name}", getattr(self, name), 0))
        object.__setattr__(self, "align", check_integer("cost.align", self.align))
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
            raise ValueError("a cost model needs a weight above 0: linear, quadratic, sliding or constant")
        for name in WEIGHTS:
            object.__setattr__(self, name, getattr(self, name) // divisor)

    @classmethod
    def from_shape(
        cls, shape: ModelShape | None = None, *, recompute: Recompute = "none", align: int = 1
    ) -> CostModel:
        """The cost model of a decoder, from its FLOPs.

        Args:
            shape: the decoder; None = Llama 3 8B.
            recompute: `none` counts model FLOPs; `flash` and `full` what is executed, see the module.
            align: each document is padded to a multiple of so many tokens.
        """
        chosen = SHAPES["llama-8b"] if shape is None else shape
        if recompute not in MATRIX_FLOPS:
            raise ValueError(f"recompute={recompute!r} is unknown; choose one of {', '.join(MATRIX_FLOPS)}")
        sliding = chosen.sliding_layers
        alike = math.gcd(chosen.layers - sliding, sliding)  # so many times the same mix of layers
        matrices = MATRIX_FLOPS[recompute] * _matrices(chosen, chosen.vocabulary_size)
        pair = alike * _pair_flops(chosen, recompute)
        return cls(
            chosen,
            linear=(2 * matrices + pair) // (2 * pair),
            quadratic=(chosen.layers - sliding) // alike,
            sliding=sliding // alike,
            window=chosen.window,
            align=align,
            recompute=recompute,
        )

    @classmethod
    def fit(
        cls,
        timings: Sequence[tuple[ArrayLike, float]],
        *,
        shape: ModelShape | None = None,
        align: int = 1,
    ) -> CostModel:
        """The cost model of measured times: t = t₀ + α·tokens + β·Σ l(l+1) + γ·documents, none below 0.

        Plans compare documents, so t₀, which every micro-batch pays, is no part of the cost; `seconds` has it. The
        integers are linear = α/β and constant = γ/β with quadratic = 1. Where β is 0, or so small that attention takes
        as long as the rest from 2^28 tokens on only, quadratic is 0 and the others are in 1,024ths of a token's time
        (where α is 0 too, all documents cost 1). A fit knows no sliding window: it takes all pairs to cost alike.

        Args:
            timings: (lengths of the documents of one micro-batch, its seconds), at least four that differ in
                tokens, in squares and in documents; about twenty are good.
            shape: the decoder that was timed, for `flops`.
            align: each document was padded to a multiple of so many tokens.

        Raises:
            ValueError: too few or degenerate timings; the message says what to time.
        """
        measured = fit_seconds([(_padded(check_lengths(x), align), t) for x, t in timings])
        linear, quadratic, constant = integer_weights(measured)
        return cls(shape, linear, quadratic, constant=constant, align=align, timed=measured)

    def cost(self, lengths: ArrayLike) -> NDArray[np.int64]:
        """(documents,) int64 cost of each document; never falls as documents grow.

        Raises:
            ValueError: lengths that are no positive integers, or whose costs sum to 2^62 or more.
        """
        padded = _padded(check_lengths(lengths), self.align)
        self._check_sum(padded)
        cost = padded * (self.linear + self.quadratic * (padded + 1))
        if self.sliding:
            cost += self.sliding * _windowed(padded, self.window)
        return cost + self.constant if self.constant else cost

    def check(self, lengths: NDArray[np.int64]) -> None:
        """Refuse documents whose costs sum to 2^62 or more, without making an array of costs.

        Raises:
            ValueError: as `cost` does.
        """
        self._check_sum(_padded(lengths, self.align))

    def _check_sum(self, padded: NDArray[np.int64]) -> None:
        longest = int(padded.max())
        pairs = self.quadratic * (longest + 1) + self.sliding * min(longest + 1, 2 * self.window)
        _check_sum(padded, self.linear + pairs, self.constant)

    def key(self) -> int | dict[str, int]:
        """Plain values that determine the costs: `linear` alone where the others are as in a plain decoder."""
        neutral = {"quadratic": 1, "sliding": 0, "window": 0, "constant": 0, "align": 1}
        other = {name: getattr(self, name) for name, plain in neutral.items() if getattr(self, name) != plain}
        return {"linear": self.linear, **other} if other else self.linear

    @property
    def formula(self) -> str:
        """The cost of l tokens in words: `57,256·l + l(l+1)`."""
        terms = (
            (self.linear, "l"),
            (self.quadratic, "l(l+1)"),
            (self.sliding, f"2·Σ min(t, {self.window:,})"),
        )
        shown = [name if weight == 1 else f"{weight:,}·{name}" for weight, name in terms if weight]
        shown += [f"{self.constant:,}"] if self.constant else []
        return " + ".join(shown) + (f" with l a multiple of {self.align}" if self.align > 1 else "")

    def __eq__(self, other: object) -> bool:
        return self.key() == other.key() if isinstance(other, CostModel) else NotImplemented

    def __hash__(self) -> int:
        return hash(json.dumps(self.key(), sort_keys=True))

    def flops(self, lengths: ArrayLike, vocabulary_size: int | None = None) -> float:
        """Model FLOPs of one forward and backward pass over these documents, each by itself.

        What the model asks for: no recomputation, no padding. It is what MFU is measured by.

        Args:
            lengths: (documents,) tokens of each document.
            vocabulary_size: of the output layer; None = the shape's own.

        Raises:
            ValueError: bad lengths, or the model was fitted without a shape.
        """
        return self._flops(check_lengths(lengths), vocabulary_size, "none")

    def executed_flops(self, lengths: ArrayLike, vocabulary_size: int | None = None) -> float:
        """FLOPs that the device executes for these documents: with recomputation, and padded to `align`.

        Takes and raises what `flops` does.
        """
        return self._flops(_padded(check_lengths(lengths), self.align), vocabulary_size, self.recompute)

    def _flops(self, lengths: NDArray[np.int64], vocabulary_size: int | None, recompute: Recompute) -> float:
        shape = self.shape
        if shape is None:
            raise ValueError(
                "this cost model was fitted without a shape, so its FLOPs are not known: use fit(…, shape=…)"
            )
        vocabulary = shape.vocabulary_size if vocabulary_size is None else vocabulary_size
        matrices = MATRIX_FLOPS[recompute] * _matrices(shape, vocabulary) * int(lengths.sum())
        pairs = (shape.layers - shape.sliding_layers) * int(weigh(lengths, 0, 1).sum())
        if shape.window:
            pairs += shape.sliding_layers * int(_windowed(lengths, shape.window).sum())
        return float(matrices + _pair_flops(shape, recompute) * pairs)

    def seconds(self, lengths: ArrayLike) -> float:
        """Predicted seconds of one micro-batch of these documents, forward and backward.

        Raises:
            ValueError: bad lengths, or the model was not fitted to measured times.
        """
        if self.timed is None:
            raise ValueError("this cost model counts FLOPs and knows no seconds: make one with CostModel.fit")
        return self.timed.of(_padded(check_lengths(lengths), self.align))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, from which `from_dict` makes the same model."""
        plain = {name: getattr(self, name) for name in (*WEIGHTS, "window", "align", "recompute")}
        shape = None if self.shape is None else self.shape.to_dict()
        return {**plain, "shape": shape, "timed": None if self.timed is None else asdict(self.timed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """The model that `to_dict` wrote.

        Raises:
            ValueError: keys that are missing or unknown, or values that no cost model has.
        """
        known = {*WEIGHTS, "window", "align", "recompute", "shape", "timed"}
        wrong = sorted(known ^ set(values))
        if wrong:
            raise ValueError(
                f"a saved cost model has the keys {', '.join(sorted(known))}; check {', '.join(wrong)}"
            )
        try:
            shape = None if values["shape"] is None else ModelShape(**values["shape"])
            timed = None if values["timed"] is None else Seconds(**values["timed"])
        except TypeError as error:
            raise ValueError(f"a saved cost model has a shape or times of another version: {error}") from None
        return cls(**{**values, "shape": shape, "timed": timed})

    def save(self, path: str | Path) -> None:
        """Write the model as JSON, whole or not at all."""
        write_atomically(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The model that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file holds no cost model.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"it holds {type(values).__name__}, not an object")
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path} is not a saved cost model: {error}") from None


def weigh(lengths: NDArray[np.int64], linear: int, quadratic: int) -> NDArray[np.int64]:
    """linear·l + quadratic·l(l+1) for each document, refusing sums that would exceed int64.

    Raises:
        ValueError: the sum over all documents may be 2^62 or more.
    """
    _check_sum(lengths, linear + quadratic * (int(lengths.max(initial=0)) + 1), 0)
    return lengths * (linear + quadratic * (lengths + 1))


def _check_sum(lengths: NDArray[np.int64], most_per_token: int, constant: int) -> None:
    """Refuse documents whose costs, of at most so much a token and a constant, might sum to 2^62."""
    longest = int(lengths.max(initial=0))
    # The sum itself cannot wrap around while this product, which is no smaller, is below 2^63.
    wraps = longest * len(lengths) >= 1 << 63
    if wraps or int(lengths.sum()) * most_per_token + len(lengths) * constant >= 1 << 62:
        raise ValueError(
            f"{len(lengths):,} documents of up to {longest:,} tokens cost more than int64 can hold;"
            " plan them in several parts"
        )


def _matrices(shape: ModelShape, vocabulary: int) -> int:
    """Matrix elements that a token passes through, the output layer's among them."""
    return shape.token_parameters + shape.d_model * vocabulary


def _pair_flops(shape: ModelShape, recompute: Recompute) -> int:
    """FLOPs of one layer for l(l+1), which is two query-key pairs: 6·H·e, or more where scores are computed anew.

    A product with queries or keys of width k costs 2·H·k a pair, one with values of width v 2·H·v; there is one
    of each forward and two of each backward. Flash attention adds one with keys, a second forward pass one of each.
    """
    key, value = shape.head_width, shape.value_head_width
    products = {"none": 3 * (key + value), "flash": 4 * key + 3 * value, "full": 5 * key + 4 * value}
    return shape.heads * products[recompute]


def _windowed(lengths: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """2·Σ_{t ≤ l} min(t, window) for each document."""
    inside = np.minimum(lengths, window)
    return inside * (inside + 1) + 2 * window * (lengths - inside)


def _padded(lengths: NDArray[np.int64], align: int) -> NDArray[np.int64]:
    """Each length rounded up to a multiple.

    Raises:
        ValueError: a length that no int64 holds afterwards.
    """
    if align > 1:
        _check_sum(lengths, align, 0)
    return lengths if align == 1 else -(-lengths // align) * align
