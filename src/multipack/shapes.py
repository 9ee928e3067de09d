"""What a decoder looks like, as plain data that the cost model, the decoder and the reports share.

A `ModelShape` holds numbers and names only: no torch, no configuration file. Presets carry the published
widths of each model, so that `plan(..., cost=CostModel.from_shape(SHAPES["llama-8b"]))` needs no weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

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
        if self.head_dim == 0 and self.d_model % self.heads:
            near = max(self.heads, round(self.d_model / self.heads) * self.heads)
            raise ValueError(
                f"model.heads={self.heads} must divide model.d_model={self.d_model}"
                f" (or set model.head_dim); the nearest width is {near}"
            )
        if self.positions == "rope" and self.head_width % 2:
            raise ValueError(f"rotary positions need an even head width, got {self.head_width}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_width(self) -> int:
        """Width of one head in effect."""
        return self.head_dim or self.d_model // self.heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate (a third matrix)."""
        return self.activation == "swiglu"

    @property
    def layer_parameters(self) -> int:
        """Matrix elements of one block (biases and norms left out): P in the cost formula."""
        attention = self.d_model * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.d_model * self.d_ff

    def with_vocabulary(self, size: int) -> ModelShape:
        """The same shape for a vocabulary of `size` tokens."""
        return replace(self, vocabulary_size=size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are written into config.yaml."""
        return asdict(self)


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
    layers: int, heads: int, kv_heads: int, d_model: int, d_ff: int, context: int, tied: bool = False
) -> ModelShape:
    return ModelShape(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        d_model=d_model,
        d_ff=d_ff,
        vocabulary_size=128_256,
        context=context,
        tied=tied,
        rope_theta=500_000.0,
    )


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
}
"""Presets: `tiny` and `small` of our own, GPT-2's four, and Llama 3 / 3.2's widths."""
