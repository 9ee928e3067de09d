"""`ModelShape`: the dimensions and options of a decoder as plain data, shared by cost model, decoder and reports.

This module imports no torch. Presets have the published dimensions of each model, so that
`plan(..., cost=CostModel.from_shape(SHAPES["llama-8b"]))` needs no weights. `ModelShape.from_huggingface` reads the
dimensions of any other decoder from its config.json.

A shape may describe mixtures of experts, windows in some layers and latent attention, because the planner needs their
cost. `Decoder` supports only dense layers with the same attention in all of them, and raises an error for other shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from multipack.shapes_huggingface import LLAMA3_SCALING as LLAMA3_SCALING
from multipack.shapes_huggingface import SIZES as SIZES
from multipack.shapes_huggingface import fields_of
from multipack.shapes_huggingface import is_llama3 as is_llama3
from multipack.shapes_huggingface import read_json as read_json

Activation = Literal["gelu", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rope"]
MOST_LAYERS, MOST_WIDTH = 1 << 12, 1 << 24
"""Most layers and heads; largest width, vocabulary and context. Larger numbers are mistakes or damage, which would
exhaust memory or overflow before another check."""


@dataclass(frozen=True)
class ModelShape:
    """Layers, widths, and the options in which GPT-2 and Llama differ."""

    layers: int = 6
    """Transformer blocks."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 0
    """Key and value heads; fewer than `heads` is grouped-query attention; 0 = `heads`."""
    d_model: int = 192
    """Width of the residual stream."""
    d_ff: int = 512
    """Width of the feed-forward layer."""
    vocabulary_size: int = 0
    """Tokens in the vocabulary; 0 = the tokenizer's own size."""
    context: int = 8192
    """Maximum positions of a document: rows of the table of learned positions, a limit for generation."""
    positions: Positions = "rope"
    """Position encoding: `learned` (GPT-2) or `rope` (Llama)."""
    norm: Norm = "rmsnorm"
    """Normalization: `layernorm` (GPT-2) or `rmsnorm` (Llama)."""
    activation: Activation = "swiglu"
    """Feed-forward activation: `gelu` (two matrices) or `swiglu` (gated, three matrices)."""
    bias: bool = False
    """Whether linear layers and LayerNorm have biases."""
    qkv_bias: bool = False
    """Whether the projections of query, key and value have biases, even if `bias` is false (Qwen2)."""
    tied: bool = True
    """Whether input and output embedding share their weights."""
    head_dim: int = 0
    """Width of one head; 0 = d_model / heads."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_factor: float = 1.0
    """Divisor of low rotary frequencies, as in Llama 3.1 (8) and 3.2 (32) with a first context of 8,192; 1 = none."""
    norm_eps: float = 1e-5
    """Added to the variance before its square root."""
    dropout: float = 0.0
    """Probability of dropping an embedding or a residual branch's element."""
    experts: int = 0
    """Routed experts of a layer; 0 = no mixture of experts. For planning only."""
    experts_per_token: int = 0
    """Routed experts of each token. For planning only."""
    expert_width: int = 0
    """Width of a routed expert's feed-forward layer; 0 = d_ff. For planning only."""
    shared_experts: int = 0
    """Experts of every token, in addition to the routed ones. For planning only."""
    shared_width: int = 0
    """Width of a shared expert's feed-forward layer; 0 = the width of a routed expert. For planning only."""
    dense_layers: int = 0
    """Layers of a mixture (usually the first) with a dense feed-forward layer of width d_ff. For planning only."""
    window: int = 0
    """Tokens that a layer with a window sees, including the query itself; 0 = no windows."""
    window_layers: int = 0
    """Layers with a window, if `window` is set; 0 = all of them. Fewer than all: for planning only."""
    kv_rank: int = 0
    """Rank of the common latent of keys and values (multi-head latent attention); 0 = none. For planning only."""
    query_rank: int = 0
    """Rank of the queries' latent in latent attention; 0 = full queries. For planning only."""
    nope_width: int = 0
    """Width of a latent head's query and key without positions. For planning only."""
    rope_width: int = 0
    """Width of a latent head's query and key with rotary positions; the key is shared. For planning only."""
    value_width: int = 0
    """Width of a latent head's value. For planning only."""

    def __post_init__(self) -> None:
        """Check the widths."""
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        sizes = ("layers", "heads", "kv_heads", "d_model", "d_ff", "context")
        for name in (*sizes, "vocabulary_size", "head_dim", *OPTIONAL):
            most = MOST_LAYERS if name in ("layers", "heads", "kv_heads") else MOST_WIDTH
            if not (least := int(name in sizes)) <= (value := getattr(self, name)) <= most:
                raise ValueError(f"model.{name} must be between {least} and {most:,}, got {value}")
        if self.heads % self.kv_heads:
            legal = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            near = min(legal, key=lambda k: abs(k - self.kv_heads))
            raise ValueError(
                f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}; the nearest is {near}"
            )
        if not self.kv_rank and self.head_dim == 0 and self.d_model % self.heads:
            near = max(self.heads, round(self.d_model / self.heads) * self.heads)
            raise ValueError(
                f"model.heads={self.heads} must divide model.d_model={self.d_model}"
                f" (or set model.head_dim); the nearest width is {near}"
            )
        rotary_width = self.rope_width if self.kv_rank else self.head_width
        if self.positions == "rope" and rotary_width % 2:
            raise ValueError(f"rotary positions need an even head width, got {rotary_width}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout must be in [0, 1), got {self.dropout}")
        for name, lowest in (("rope_theta", 1.0), ("rope_factor", 1.0), ("norm_eps", 0.0)):
            if not lowest <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"model.{name} must be a finite number of at least {lowest:g}, got {getattr(self, name)}"
                )
        self._check_optional()

    def _check_optional(self) -> None:
        """Check that mixtures of experts, windows and latent attention are described completely."""
        for switch, names in _DEPENDENT.items():
            stray = [name for name in names if getattr(self, name)]
            if stray and not getattr(self, switch):
                raise ValueError(
                    f"model.{stray[0]}={getattr(self, stray[0])} has no effect with model.{switch}=0:"
                    f" set model.{switch}, or leave model.{stray[0]} out"
                )
        for name in ("dense_layers", "window_layers"):
            if getattr(self, name) > self.layers:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} cannot exceed model.layers={self.layers}; lower it"
                )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} must be 1 … model.experts={self.experts}"
            )
        if self.kv_rank and not (self.nope_width and self.value_width):
            raise ValueError(
                f"model.kv_rank={self.kv_rank} is latent attention, which needs model.nope_width and"
                f" model.value_width; got {self.nope_width} and {self.value_width}"
            )
        if self.kv_rank and self.kv_heads != self.heads:
            raise ValueError(
                f"latent attention (model.kv_rank={self.kv_rank}) has a key for every head: model.kv_heads must be"
                f" {self.heads} or 0, got {self.kv_heads}"
            )

    PRESET_HINT: ClassVar[str] = " or the path of a Hugging Face config.json"

    @classmethod
    def preset(cls, name: str) -> dict[str, Any] | None:
        """Values of a preset, or of the Hugging Face config.json at a path; None if neither exists."""
        shape = SHAPES.get(name)
        if shape is None and Path(name).exists():
            shape = cls.from_huggingface(name)
        if shape is None:
            return None
        # 0 stays equal to `heads` if another word changes `heads`.
        return {**shape.to_dict(), "kv_heads": 0 if shape.kv_heads == shape.heads else shape.kv_heads}

    @staticmethod
    def preset_names() -> list[str]:
        """Names of all presets."""
        return list(SHAPES)

    @classmethod
    def from_huggingface(cls, source: Mapping[str, Any] | str | Path) -> ModelShape:
        """Read a shape for planning from a Hugging Face config.json.

        Details that do not affect the cost (normalized queries, soft caps, biases of some projections, heads for
        multi-token prediction) are ignored.

        Args:
            source: the file's content, its path, or its folder. It is read as JSON; no code is run.

        Raises:
            ValueError: the model is not a decoder of known cost; the message names the missing or unknown fields.
            FileNotFoundError: the file does not exist.
        """
        return cls(**fields_of(source))

    @property
    def head_width(self) -> int:
        """Width of one head's query and key."""
        if self.kv_rank:
            return self.nope_width + self.rope_width
        return self.head_dim or self.d_model // self.heads

    @property
    def value_head_width(self) -> int:
        """Width of one head's value."""
        return self.value_width if self.kv_rank else self.head_width

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate (a third matrix)."""
        return self.activation == "swiglu"

    @property
    def sliding_layers(self) -> int:
        """Number of layers with a window."""
        return (self.window_layers or self.layers) if self.window else 0

    @property
    def attention_parameters(self) -> int:
        """Number of matrix elements of the query, key, value and output projections of one block."""
        d, heads = self.d_model, self.heads
        if not self.kv_rank:
            return d * self.head_width * (2 * heads + 2 * self.kv_heads)
        rank = self.query_rank
        query = d * rank + rank * heads * self.head_width if rank else d * heads * self.head_width
        down = d * (self.kv_rank + self.rope_width)
        up = self.kv_rank * heads * (self.nope_width + self.value_width)
        return query + down + up + heads * self.value_width * d

    @property
    def layer_parameters(self) -> int:
        """Number of matrix elements of one block that a token is multiplied with: P in the cost formula.

        Biases and norms are not counted. In a mixture of experts it is that of a block with experts, with its router.
        """
        return self.attention_parameters + (
            self._mixture(self.experts_per_token) if self.experts else self._feed_forward(self.d_ff)
        )

    @property
    def token_parameters(self) -> int:
        """Number of matrix elements of all blocks that a token is multiplied with: N·P if all blocks are equal."""
        dense = self.attention_parameters + self._feed_forward(self.d_ff)
        return (self.layers - self.dense_layers) * self.layer_parameters + self.dense_layers * dense

    @property
    def total_parameters(self) -> int:
        """Number of all matrix elements: experts, embeddings, learned positions; without biases and norms."""
        idle = self._mixture(self.experts) - self._mixture(self.experts_per_token) if self.experts else 0
        embeddings = self.d_model * self.vocabulary_size * (1 if self.tied else 2)
        table = self.d_model * self.context if self.positions == "learned" else 0
        return self.token_parameters + (self.layers - self.dense_layers) * idle + embeddings + table

    def _feed_forward(self, width: int) -> int:
        return (3 if self.gated else 2) * self.d_model * width

    def _mixture(self, routed: int) -> int:
        """Matrix elements of the router, of `routed` of the routed experts, and of the shared experts."""
        width = self.expert_width or self.d_ff
        shared = self.shared_experts * self._feed_forward(self.shared_width or width)
        return self.d_model * self.experts + routed * self._feed_forward(width) + shared

    def with_vocabulary(self, size: int) -> ModelShape:
        """The same shape for a vocabulary of `size` tokens."""
        return replace(self, vocabulary_size=size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in config.yaml."""
        return asdict(self)


_DEPENDENT: dict[str, tuple[str, ...]] = {
    "experts": ("experts_per_token", "expert_width", "shared_experts", "dense_layers"),
    "shared_experts": ("shared_width",),
    "window": ("window_layers",),
    "kv_rank": ("query_rank", "nope_width", "rope_width", "value_width"),
}
"""Field → fields that have an effect only if it is not 0."""

OPTIONAL: tuple[str, ...] = (
    "experts",
    "window",
    "kv_rank",
    *(name for names in _DEPENDENT.values() for name in names),
)
"""Fields of mixtures of experts, windows and latent attention; 0 in a decoder without them."""


def _gpt2(layers: int, heads: int, d_model: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        heads=heads,
        kv_heads=heads,
        d_model=d_model,
        d_ff=4 * d_model,
        vocabulary_size=50_257,
        context=1024,
        positions="learned",
        norm="layernorm",
        activation="gelu",
        bias=True,
        tied=True,
    )


def _llama(
    layers: int, heads: int, kv_heads: int, d_model: int, d_ff: int, context: int, **others: Any
) -> ModelShape:
    family = {"vocabulary_size": 128_256, "tied": False, "rope_theta": 500_000.0}
    return ModelShape(layers, heads, kv_heads, d_model, d_ff, context=context, **{**family, **others})


def _qwen(
    layers: int, heads: int, kv_heads: int, d_model: int, d_ff: int, context: int, **others: Any
) -> ModelShape:
    family = {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "qkv_bias": True}
    return _llama(layers, heads, kv_heads, d_model, d_ff, context, **{**family, **others})


def _mixture(dense: ModelShape, experts: tuple[int, int], **others: Any) -> ModelShape:
    return replace(dense, experts=experts[0], experts_per_token=experts[1], **others)


SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(layers=2, heads=2, kv_heads=1, d_model=64, d_ff=128),
    "small": ModelShape(),
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    "llama-1b": _llama(16, 32, 8, 2048, 8192, 131_072, tied=True, rope_factor=32.0),
    "llama-3b": _llama(28, 24, 8, 3072, 8192, 131_072, tied=True, rope_factor=32.0),
    "llama-8b": _llama(32, 32, 8, 4096, 14_336, 8192),
    "llama-70b": _llama(80, 64, 8, 8192, 28_672, 8192),
    "llama-405b": _llama(126, 128, 8, 16_384, 53_248, 131_072, rope_factor=8.0),
    "qwen2.5-0.5b": _qwen(24, 14, 2, 896, 4864, 32_768, vocabulary_size=151_936, tied=True),
    "qwen2.5-7b": _qwen(28, 28, 4, 3584, 18_944, 131_072, vocabulary_size=152_064),
    "mixtral-8x7b": _mixture(
        _llama(32, 32, 8, 4096, 14_336, 32_768, vocabulary_size=32_000, rope_theta=1_000_000.0),
        experts=(8, 2),
    ),
    "gpt-oss-20b": _mixture(
        _llama(24, 64, 8, 2880, 2880, 131_072, head_dim=64, vocabulary_size=201_088, rope_theta=150_000.0),
        experts=(32, 4),
        window=128,
        window_layers=12,
    ),
    "deepseek-v3": _mixture(
        _llama(
            61, 128, 128, 7168, 18_432, 163_840, vocabulary_size=129_280, rope_theta=10_000.0, norm_eps=1e-6
        ),
        experts=(256, 8),
        expert_width=2048,
        shared_experts=1,
        dense_layers=3,
        kv_rank=512,
        query_rank=1536,
        nope_width=128,
        rope_width=64,
        value_width=128,
    ),
}
"""Presets: two small shapes for tests and first runs, then published models. Those with experts are for planning only
(`mixtral-8x7b`, `gpt-oss-20b`, and `deepseek-v3` without its head for multi-token prediction)."""
