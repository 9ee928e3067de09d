"""What a decoder looks like, as plain data that the cost model, the decoder and the reports share.

A `ModelShape` holds numbers and names only: no torch, no configuration file. Presets carry the published
widths of each model, so that `plan(..., cost=CostModel.from_shape(SHAPES["llama-8b"]))` needs no weights;
`ModelShape.from_huggingface` reads the widths of any other decoder from its config.json.

Mixtures of experts, windows in some layers and latent attention are described too, because planning needs their cost;
the decoder of this project builds dense layers that all attend alike, and refuses the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

Activation = Literal["gelu", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rope"]


@dataclass(frozen=True)
class ModelShape:
    """Layers, widths and the few switches that tell GPT-2 and Llama apart."""

    layers: int = 6
    """Transformer blocks."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 0
    """Key and value heads; fewer than `heads` is grouped-query attention; 0 = as many as heads."""
    d_model: int = 192
    """Width of the residual stream."""
    d_ff: int = 512
    """Width of the feed-forward layer."""
    vocabulary_size: int = 0
    """Tokens in the vocabulary; 0 = the tokenizer's own size."""
    context: int = 8192
    """Most positions in a document: the table's rows for learned positions, a limit for generation."""
    positions: Positions = "rope"
    """`learned` (GPT-2) or `rope` (Llama)."""
    norm: Norm = "rmsnorm"
    """`layernorm` (GPT-2) or `rmsnorm` (Llama)."""
    activation: Activation = "swiglu"
    """`gelu`, or `swiglu`, which is gated (three matrices)."""
    bias: bool = False
    """Biases in linear layers and LayerNorm."""
    tied: bool = True
    """Input and output embedding share their weights."""
    head_dim: int = 0
    """Width of one head; 0 = d_model / heads."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the variance before its square root."""
    dropout: float = 0.0
    """Probability of dropping an embedding or a residual branch's element."""
    experts: int = 0
    """Routed experts of a layer; 0 = no mixture of experts. For planning only."""
    experts_per_token: int = 0
    """Routed experts that each token passes through. For planning only."""
    expert_width: int = 0
    """Width of a routed expert's feed-forward layer; 0 = d_ff. For planning only."""
    shared_experts: int = 0
    """Experts beside the routed ones, which every token passes through. For planning only."""
    shared_width: int = 0
    """Width of a shared expert's feed-forward layer; 0 = that of a routed one. For planning only."""
    dense_layers: int = 0
    """Layers of a mixture (usually its first) whose feed-forward layer is dense, d_ff wide. For planning only."""
    window: int = 0
    """Tokens that a sliding layer sees, the query itself included; 0 = all layers see all."""
    window_layers: int = 0
    """Layers that slide, where `window` is set; 0 = all of them; fewer than all: for planning only."""
    kv_rank: int = 0
    """Rank of the keys' and values' common latent (multi-head latent attention); 0 = none. For planning only."""
    query_rank: int = 0
    """Rank of the queries' latent in latent attention; 0 = full queries. For planning only."""
    nope_width: int = 0
    """Width of a latent head's query and key without positions. For planning only."""
    rope_width: int = 0
    """Width of a latent head's query and key with rotary positions; heads share the key. For planning only."""
    value_width: int = 0
    """Width of a latent head's value. For planning only."""

    def __post_init__(self) -> None:
        """Refuse shapes that no decoder can have."""
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("layers", "heads", "kv_heads", "d_model", "d_ff", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        if self.vocabulary_size < 0 or self.head_dim < 0:
            raise ValueError("model.vocabulary_size and model.head_dim must not be negative")
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
        turned = self.rope_width if self.kv_rank else self.head_width
        if self.positions == "rope" and turned % 2:
            raise ValueError(f"rotary positions need an even head width, got {turned}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout must be in [0, 1), got {self.dropout}")
        self._check_planning_only()

    def _check_planning_only(self) -> None:
        """Refuse mixtures, windows and latent attention that are half described."""
        for name in PLANNING_ONLY:
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} must not be negative, got {getattr(self, name)}")
        for switch, names in _BELONG.items():
            stray = [name for name in names if getattr(self, name)]
            if stray and not getattr(self, switch):
                raise ValueError(
                    f"model.{stray[0]}={getattr(self, stray[0])} means nothing while model.{switch}=0:"
                    f" set model.{switch}, or leave model.{stray[0]} away"
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
                f" model.value_width too; got {self.nope_width} and {self.value_width}"
            )
        if self.kv_rank and self.kv_heads != self.heads:
            raise ValueError(
                f"latent attention (model.kv_rank={self.kv_rank}) has a key for every head: model.kv_heads must be"
                f" {self.heads} or 0, got {self.kv_heads}"
            )

    PRESET_HINT: ClassVar[str] = " or the path of a Hugging Face config.json"

    @classmethod
    def preset(cls, name: str) -> dict[str, Any] | None:
        """The values of a named shape, or of the Hugging Face config.json at a path; None if there is neither."""
        shape = SHAPES.get(name)
        if shape is None and Path(name).exists():
            shape = cls.from_huggingface(name)
        if shape is None:
            return None
        return {**shape.to_dict(), "kv_heads": 0 if shape.kv_heads == shape.heads else shape.kv_heads}

    @staticmethod
    def preset_names() -> list[str]:
        """Names of shapes."""
        return list(SHAPES)

    @classmethod
    def from_huggingface(cls, source: Mapping[str, Any] | str | Path) -> ModelShape:
        """The shape that a Hugging Face config.json describes, as far as cost depends on it.

        The result serves planning: what families do besides (normalized queries, soft caps, biases of some
        projections, heads for multi-token prediction) is not described.

        Args:
            source: the file's content, its path, or the folder that holds it. It is read as JSON; nothing is run.

        Raises:
            ValueError: no decoder whose cost is known: the message names the missing or unknown fields.
            FileNotFoundError: there is no such file.
        """
        from multipack.shapes.huggingface import fields_of  # which nothing but this needs

        return cls(**fields_of(source))

    @property
    def head_width(self) -> int:
        """Width of one head's query and key in effect."""
        if self.kv_rank:
            return self.nope_width + self.rope_width
        return self.head_dim or self.d_model // self.heads

    @property
    def value_head_width(self) -> int:
        """Width of one head's value in effect."""
        return self.value_width if self.kv_rank else self.head_width

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate (a third matrix)."""
        return self.activation == "swiglu"

    @property
    def sliding_layers(self) -> int:
        """Layers that slide, in effect."""
        return (self.window_layers or self.layers) if self.window else 0

    @property
    def attention_parameters(self) -> int:
        """Matrix elements of one block's projections of query, key, value and output."""
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
        """Matrix elements that a token meets in one block (biases and norms left out): P in the cost formula.

        In a mixture: in a block with experts, its router included.
        """
        return self.attention_parameters + (
            self._mixture(self.experts_per_token) if self.experts else self._feed_forward(self.d_ff)
        )

    @property
    def token_parameters(self) -> int:
        """Matrix elements that a token meets in all blocks: N·P where all blocks are alike."""
        dense = self.attention_parameters + self._feed_forward(self.d_ff)
        return (self.layers - self.dense_layers) * self.layer_parameters + self.dense_layers * dense

    @property
    def total_parameters(self) -> int:
        """All matrix elements: every expert, embeddings, learned positions (biases and norms left out)."""
        idle = self._mixture(self.experts) - self._mixture(self.experts_per_token) if self.experts else 0
        embeddings = self.d_model * self.vocabulary_size * (1 if self.tied else 2)
        table = self.d_model * self.context if self.positions == "learned" else 0
        return self.token_parameters + (self.layers - self.dense_layers) * idle + embeddings + table

    def _feed_forward(self, width: int) -> int:
        return (3 if self.gated else 2) * self.d_model * width

    def _mixture(self, experts: int) -> int:
        """Matrix elements of the router, so many routed experts, and the shared ones."""
        width = self.expert_width or self.d_ff
        shared = self.shared_experts * self._feed_forward(self.shared_width or width)
        return self.d_model * self.experts + experts * self._feed_forward(width) + shared

    def with_vocabulary(self, size: int) -> ModelShape:
        """The same shape for a vocabulary of `size` tokens."""
        return replace(self, vocabulary_size=size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are written into config.yaml."""
        return asdict(self)


_BELONG: dict[str, tuple[str, ...]] = {
    "experts": ("experts_per_token", "expert_width", "shared_experts", "dense_layers"),
    "shared_experts": ("shared_width",),
    "window": ("window_layers",),
    "kv_rank": ("query_rank", "nope_width", "rope_width", "value_width"),
}
"""Switch → the fields that mean something only where it is set."""

PLANNING_ONLY: tuple[str, ...] = (
    "experts",
    "window",
    "kv_rank",
    *(name for names in _BELONG.values() for name in names),
)
"""Fields of models that the decoder builds in part (`window`) or not at all, and whose cost the planner knows."""


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
    family = {"rope_theta": 1_000_000.0, "norm_eps": 1e-6}
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
    "llama-1b": _llama(16, 32, 8, 2048, 8192, 131_072, tied=True),
    "llama-3b": _llama(28, 24, 8, 3072, 8192, 131_072, tied=True),
    "llama-8b": _llama(32, 32, 8, 4096, 14_336, 8192),
    "llama-70b": _llama(80, 64, 8, 8192, 28_672, 8192),
    "llama-405b": _llama(126, 128, 8, 16_384, 53_248, 131_072),
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
"""Presets: `tiny` and `small` of our own, then published widths. Those with experts serve planning only
(`mixtral-8x7b`, `gpt-oss-20b`, and `deepseek-v3` without its head for multi-token prediction)."""
