"""Presets of `ModelShape`: two small shapes for tests and first runs, then the dimensions of published models.

Sources are the models' config.json files. This module imports neither torch nor `ModelShape`, which it describes.
"""

from __future__ import annotations

import difflib
import math
from typing import Any, TypeVar

Shape = TypeVar("Shape")
Fields = dict[str, Any]
"""Field of `ModelShape` → value."""


def _gpt2(layers: int, heads: int, d_model: int) -> Fields:
    return Fields(
        layers=layers,
        heads=heads,
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
) -> Fields:
    family = {"vocabulary_size": 128_256, "tied": False, "rope_theta": 500_000.0}
    sizes = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "d_model": d_model, "d_ff": d_ff}
    return {**sizes, "context": context, **family, **others}


def _qwen(
    layers: int, heads: int, kv_heads: int, d_model: int, d_ff: int, context: int, **others: Any
) -> Fields:
    family = {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "qkv_bias": True}
    return _llama(layers, heads, kv_heads, d_model, d_ff, context, **{**family, **others})


def _qwen3(layers: int, heads: int, kv_heads: int, d_model: int, d_ff: int, **others: Any) -> Fields:
    own = {"vocabulary_size": 151_936, "qkv_bias": False, "head_norm": "head", "head_dim": 128}
    return _qwen(layers, heads, kv_heads, d_model, d_ff, 40_960, **{**own, **others})


def _gemma3(
    layers: int, heads: int, kv_heads: int, d_model: int, d_ff: int, context: int, **others: Any
) -> Fields:
    family = {
        "vocabulary_size": 262_144,
        "tied": True,
        "norm": "rmsnorm+1",
        "norms": "around",
        "head_norm": "head",
        "norm_eps": 1e-6,
        "activation": "geglu",
        "full_every": 6,
        "rope_theta": 1_000_000.0,
        "window_theta": 10_000.0,
        "attention_scale": 256**-0.5,
        "embedding_scale": math.sqrt(d_model),
    }
    return _llama(layers, heads, kv_heads, d_model, d_ff, context, **{**family, **others})


def _mixture(dense: Fields, experts: tuple[int, int], **others: Any) -> Fields:
    return {**dense, "experts": experts[0], "experts_per_token": experts[1], **others}


PRESETS: dict[str, Fields] = {
    "tiny": Fields(layers=2, heads=2, kv_heads=1, d_model=64, d_ff=128),
    "small": Fields(),
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    "llama-1b": _llama(16, 32, 8, 2048, 8192, 131_072, tied=True, rope_factor=32.0),
    "llama-3b": _llama(28, 24, 8, 3072, 8192, 131_072, tied=True, rope_factor=32.0),
    "llama-8b": _llama(32, 32, 8, 4096, 14_336, 8192),
    "llama-70b": _llama(80, 64, 8, 8192, 28_672, 8192),
    "llama-405b": _llama(126, 128, 8, 16_384, 53_248, 131_072, rope_factor=8.0),
    "llama-3.1-8b": _llama(32, 32, 8, 4096, 14_336, 131_072, rope_factor=8.0),
    "qwen2.5-0.5b": _qwen(24, 14, 2, 896, 4864, 32_768, vocabulary_size=151_936, tied=True),
    "qwen2.5-7b": _qwen(28, 28, 4, 3584, 18_944, 131_072, vocabulary_size=152_064),
    "qwen3-0.6b": _qwen3(28, 16, 8, 1024, 3072, tied=True),
    "qwen3-8b": _qwen3(36, 32, 8, 4096, 12_288),
    "gemma-3-1b": _gemma3(26, 4, 1, 1152, 6912, 32_768, head_dim=256, window=512),
    "mistral-7b": _llama(32, 32, 8, 4096, 14_336, 32_768, vocabulary_size=32_768, rope_theta=1_000_000.0),
    "phi-3-mini": _llama(
        32, 32, 32, 3072, 8192, 4096, vocabulary_size=32_064, rope_theta=10_000.0, window=2047
    ),
    "phi-4": _llama(40, 40, 10, 5120, 17_920, 16_384, vocabulary_size=100_352, rope_theta=250_000.0),
    "smollm3-3b": _llama(
        *(36, 16, 4, 2048, 11_008, 65_536), tied=True, rope_theta=5e6, norm_eps=1e-6, unrotated_every=4
    ),
    "olmo2-7b": _llama(
        *(32, 32, 32, 4096, 11_008, 4096),
        vocabulary_size=100_352,
        norm_eps=1e-6,
        norms="after",
        head_norm="all",
    ),
    "mixtral-8x7b": _mixture(
        _llama(32, 32, 8, 4096, 14_336, 32_768, vocabulary_size=32_000, rope_theta=1_000_000.0),
        experts=(8, 2),
    ),
    "gpt-oss-20b": _mixture(
        _llama(24, 64, 8, 2880, 2880, 131_072, head_dim=64, vocabulary_size=201_088, rope_theta=150_000.0),
        experts=(32, 4),
        window=128,
        full_every=2,
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
"""Presets: two small shapes for tests and first runs, then published models. Some have experts, for planning only
(`mixtral-8x7b`, `gpt-oss-20b`, and `deepseek-v3` without its head for multi-token prediction)."""


class Presets(dict[str, Shape]):
    """Values by the name of a preset; an unknown name is answered with the nearest ones."""

    def __missing__(self, name: str) -> Shape:
        near = difflib.get_close_matches(str(name), self, 3, 0.0)
        raise KeyError(f"{name} is no preset; the nearest are {', '.join(near)}")
