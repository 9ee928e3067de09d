"""`ModelShape`: the dimensions and options of a decoder as plain data, shared by cost model, decoder and reports.

This module imports no torch. Presets have the published dimensions of each model, so that
`plan(..., cost=CostModel.from_shape(SHAPES["llama-8b"]))` needs no weights. `ModelShape.from_huggingface` reads the
dimensions of any other decoder from its config.json.

A shape may describe mixtures of experts, latent attention and windows in any layers, because the planner
needs their cost. `Decoder` raises an error for shapes that it does not compute (`ModelShape.check_computed`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from multipack.ranges import Amount, Range, Share, check_ranges
from multipack.shapes.config_json import MOST_LAYERS, MOST_WIDTH, fields_of
from multipack.shapes.families import BY_TYPE
from multipack.shapes.presets import PRESETS, Presets
from multipack.shapes.rotation import RotationLimit

Activation = Literal["gelu", "swiglu", "geglu"]
Norm = Literal["layernorm", "rmsnorm", "rmsnorm+1"]
Norms = Literal["before", "after", "around"]
HeadNorm = Literal["none", "head", "all"]
Positions = Literal["learned", "rope"]
RopeType = Literal["llama3", "linear", "dynamic", "yarn", "longrope"]
Modules = Annotated[int, Range(1, most=MOST_LAYERS)]
Width = Annotated[int, Range(1, most=MOST_WIDTH)]
Option = Annotated[int, Range(0, most=MOST_WIDTH)]
Factor = Annotated[float, Range(1e-6)]


@dataclass(frozen=True)
class ModelShape:
    """Layers, widths, and the options in which families of decoders differ."""

    layers: Modules = 6
    """Transformer blocks."""
    heads: Modules = 4
    """Query heads."""
    kv_heads: Annotated[int, Range(0, most=MOST_LAYERS)] = 0
    """Key and value heads; fewer than `heads` is grouped-query attention; 0 = `heads`."""
    d_model: Width = 192
    """Width of the residual stream."""
    d_ff: Width = 512
    """Width of the feed-forward layer."""
    vocabulary_size: Option = 0
    """Tokens in the vocabulary; 0 = the tokenizer's own size."""
    context: Width = 8192
    """Maximum positions of a document: rows of the table of learned positions, a limit for generation."""
    positions: Positions = "rope"
    """Position encoding: `learned` (GPT-2) or `rope` (Llama)."""
    norm: Norm = "rmsnorm"
    """Normalization: `layernorm` (GPT-2), `rmsnorm` (Llama), or `rmsnorm+1`, whose factor is 1 + weight (Gemma)."""
    activation: Activation = "swiglu"
    """Feed-forward activation: `gelu` (two matrices); gated, with three matrices: `swiglu` (Llama), `geglu` (Gemma)."""
    bias: bool = False
    """Whether linear layers and LayerNorm have biases."""
    qkv_bias: bool = False
    """Whether the projections of query, key and value have biases, even if `bias` is false (Qwen2)."""
    tied: bool = True
    """Whether input and output embedding share their weights."""
    scores: Option = 0
    """Values computed from a document's last token, in place of logits: 1 in a reward model; 0 = logits."""
    head_dim: Option = 0
    """Width of one head; 0 = d_model / heads."""
    rope_theta: Annotated[float, Range(1)] = 10_000.0
    """Base of the rotary frequencies."""
    rope_type: RopeType = "llama3"
    """Scaling of rotary frequencies, if `rope_factor` is not 1: `llama3`, `linear`, `dynamic`, `yarn` or `longrope`."""
    rope_factor: Annotated[float, Range(1)] = 1.0
    """Divisor of the rotary frequencies: of low ones with llama3 (8 in Llama 3.1) and yarn; 1 = no scaling."""
    rope_context: Annotated[int, Range(2)] = 8192
    """Positions that the model was trained with before its frequencies were scaled."""
    rope_attention: Amount = 0.0
    """Factor of cosines and sines; 0 = 0.1 · ln(rope_factor) + 1 (yarn), √(1 + ln(rope_factor) / ln(rope_context))
    (longrope)."""
    rope_factors: tuple[float, ...] = ()
    """Divisors of longrope's frequencies: for documents of up to `rope_context` tokens, then for longer ones."""
    unrotated_every: Option = 0
    """Every n-th layer has no rotary positions (4 in SmolLM3); 0 = all have."""
    embedding_scale: Factor = 1.0
    """Factor of the embeddings (√d_model in Gemma)."""
    residual_scale: Amount = 1.0
    """Factor of what attention and feed-forward add to the residual stream (Granite)."""
    attention_scale: Amount = 0.0
    """Factor of the products of queries and keys; 0 = 1 / √(width of a head)."""
    attention_growth: Amount = 0.0
    """Growth β of the query at position p, whose factor is 1 + β · ln(1 + ⌊p / rope_context⌋) (0.1 in Ministral 3)."""
    attention_cap: Amount = 0.0
    """Bound c of attention's scores s, which become c · tanh(s / c) (50 in Gemma 2); 0 = no bound."""
    logit_cap: Amount = 0.0
    """Bound of the logits, in the same way (30 in Gemma 2); 0 = no bound."""
    logit_divisor: Factor = 1.0
    """Divisor of the logits (Granite)."""
    norm_eps: Amount = 1e-5
    """Added to the variance before its square root."""
    norms: Norms = "before"
    """Norms of a block: `before` attention and feed-forward (Llama), `after` (OLMo 2), or `around` them (Gemma 3)."""
    head_norm: HeadNorm = "none"
    """RMSNorm of queries and keys: over each `head` (Qwen3), over `all` heads together (OLMo 2), or `none`."""
    dropout: Share = 0.0
    """Probability of dropping an embedding or a residual branch's element."""
    experts: Option = 0
    """Routed experts of a layer; 0 = no mixture of experts. For planning only."""
    experts_per_token: Option = 0
    """Routed experts of each token. For planning only."""
    expert_width: Option = 0
    """Width of a routed expert's feed-forward layer; 0 = d_ff. For planning only."""
    shared_experts: Option = 0
    """Experts of every token, in addition to the routed ones. For planning only."""
    shared_width: Option = 0
    """Width of a shared expert's feed-forward layer; 0 = the width of a routed expert. For planning only."""
    dense_layers: Option = 0
    """Layers of a mixture (usually the first) with a dense feed-forward layer of width d_ff. For planning only."""
    window: Option = 0
    """Tokens that a layer with a window sees, including the query itself; 0 = no windows."""
    window_layers: Option = 0
    """Layers with a window, if `window` is set; 0 = all, or all but every `full_every`-th. Otherwise planning only."""
    full_every: Option = 0
    """Every n-th layer has no window (6 in Gemma 3); 0 = all layers are equal. Needs `window`."""
    window_theta: Amount = 0.0
    """Base of the rotary frequencies, without scaling, in layers with a window; 0 = as in the other layers."""
    kv_rank: Option = 0
    """Rank of the common latent of keys and values (multi-head latent attention); 0 = none. For planning only."""
    query_rank: Option = 0
    """Rank of the queries' latent in latent attention; 0 = full queries. For planning only."""
    nope_width: Option = 0
    """Width of a latent head's query and key without positions. For planning only."""
    rope_width: Option = 0
    """Leading elements of a head that rotate; 0 = all. In a latent head they are added, and the key's are shared."""
    value_width: Option = 0
    """Width of a latent head's value. For planning only."""

    family: str = field(default="", compare=False)
    """The config.json's `model_type`, by which tensors are named in files; empty = the first that fits."""
    architecture: str = ""
    """Folder of a config.json of transformers, whose model takes the place of this decoder (model=hf:FOLDER)."""
    unsupported: str = ""
    """Settings of a configuration file for which the decoder would compute another function. For planning only."""

    def __post_init__(self) -> None:
        """Check the fields, one by one and together."""
        object.__setattr__(self, "rope_factors", tuple(self.rope_factors))
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        check_ranges(self, "model.")
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
        if self.positions == "rope" and self.rotary_width % 2:
            raise ValueError(f"rotary positions need an even head width, got {self.rotary_width}")
        if not self.kv_rank and self.rope_width > self.head_width:
            raise ValueError(
                f"model.rope_width={self.rope_width} exceeds the width of a head, {self.head_width}"
            )
        factors = self.rotary_width if self.rope_type == "longrope" and self.rope_factor != 1.0 else 0
        if len(self.rope_factors) != factors or not all(0.0 < each < math.inf for each in self.rope_factors):
            raise ValueError(
                f"model.rope_factors must hold {factors} positive numbers (two for each pair of rotated elements with"
                f" model.rope_type=longrope, else none), got {len(self.rope_factors)} numbers"
            )
        norms = {"head": ("rmsnorm", "rmsnorm+1"), "all": ("rmsnorm",)}.get(self.head_norm, (self.norm,))
        if self.norm not in norms:
            raise ValueError(
                f"model.head_norm={self.head_norm} needs model.norm={' or '.join(norms)}, got {self.norm}"
            )
        if self.family not in ("", *BY_TYPE):
            nearest = difflib.get_close_matches(self.family, BY_TYPE, 1, 0.0)[0]
            raise ValueError(f"model.family={self.family!r:.40} is no known family; the nearest is {nearest}")
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
        if self.full_every and self.window_layers:
            raise ValueError(
                f"model.full_every={self.full_every} and model.window_layers={self.window_layers} both set which layers"
                " have a window: leave model.window_layers out"
            )
        for name in ("dense_layers", "window_layers", "full_every", "unrotated_every"):
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

    def check_computed(self) -> None:
        """Check that the decoder computes this shape, not only its cost.

        Raises:
            ValueError: it does not; the message names the fields.
        """
        windows = [] if self.window_layers in (0, self.layers) else ["window_layers"]
        planned = [name for name in ("experts", "kv_rank", *windows) if getattr(self, name)]
        reason = self.unsupported or ", ".join(f"model.{name}={getattr(self, name)}" for name in planned)
        if reason and not self.architecture:
            raise ValueError(
                f"{reason} is not supported by this decoder: the shape is for planning only (cost and FLOPs);"
                " model=hf:FOLDER trains such a model with the code of transformers"
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
        """Read a shape from a Hugging Face config.json.

        Of a model_type without a row in families.py, details that do not affect the cost (normalized
        queries, soft caps, biases of some projections, heads for multi-token prediction) are ignored.

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
    def rotary_width(self) -> int:
        """Elements of a head's query and key that rotate."""
        return self.rope_width if self.kv_rank else self.rope_width or self.head_width

    @property
    def rotation_limit(self) -> RotationLimit | None:
        """The longest documents whose rotation does not depend on their length; None = no rotation does."""
        field = {"dynamic": "context", "longrope": "rope_context"}.get(self.rope_type, "")
        if not field or self.rope_factor == 1.0:
            return None
        return RotationLimit(getattr(self, field), self.rope_type, f"model.{field}")

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate (a third matrix)."""
        return self.activation != "gelu"

    @property
    def sliding_layers(self) -> int:
        """Number of layers with a window."""
        if self.window and self.full_every:
            return self.layers - self.layers // self.full_every
        return (self.window_layers or self.layers) if self.window else 0

    @property
    def explicit_scores(self) -> str:
        """The field for which attention writes out its scores, as few kernels do; empty = there is none."""
        return "attention_cap" if self.attention_cap else ""

    def window_of(self, layer: int) -> int:
        """Tokens that a layer sees, including the query itself; 0 = no window."""
        return 0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    def rotates(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        return self.positions == "rope" and not (
            self.unrotated_every and (layer + 1) % self.unrotated_every == 0
        )

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
        """Number of matrix elements of one block that a token is multiplied with: P in planning/cost.py.

        Biases and norms are not counted. In a mixture of experts, the block is one with experts; its router counts.
        """
        return self.attention_parameters + (
            self._mixture() if self.experts else self._feed_forward(self.d_ff)
        )

    @property
    def token_parameters(self) -> int:
        """Number of matrix elements of all blocks that a token is multiplied with: N·P if all blocks are equal."""
        dense = self.attention_parameters + self._feed_forward(self.d_ff)
        return (self.layers - self.dense_layers) * self.layer_parameters + self.dense_layers * dense

    def _feed_forward(self, width: int) -> int:
        return (3 if self.gated else 2) * self.d_model * width

    def _mixture(self) -> int:
        """Matrix elements of the router, of a token's routed experts, and of the shared experts."""
        width = self.expert_width or self.d_ff
        shared = self.shared_experts * self._feed_forward(self.shared_width or width)
        return self.d_model * self.experts + self.experts_per_token * self._feed_forward(width) + shared

    def with_vocabulary(self, size: int) -> ModelShape:
        """The same shape for a vocabulary of `size` tokens."""
        return replace(self, vocabulary_size=size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in config.yaml."""
        return {**asdict(self), "rope_factors": list(self.rope_factors)}


_DEPENDENT: dict[str, tuple[str, ...]] = {
    "experts": ("experts_per_token", "expert_width", "shared_experts", "dense_layers"),
    "shared_experts": ("shared_width",),
    "window": ("window_layers", "full_every", "window_theta"),
    "kv_rank": ("query_rank", "nope_width", "value_width"),
}
"""Field → fields that have an effect only if it is not 0."""

SHAPES: dict[str, ModelShape] = Presets({name: ModelShape(**fields) for name, fields in PRESETS.items()})
"""Presets; some have experts, for planning only."""
