"""Documents of the isolation probe, and the packed batches that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multipack.data.batch import PackedBatch
from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.integrations.collator import PackedDataCollator
from multipack.planning.lengths import check_integer, check_lengths, short

Documents = Sequence[Sequence[int]]


def transformers_batch(documents: Documents, **collator: Any) -> dict[str, Any]:
    """Documents as `PackedDataCollator` packs them for a model of transformers, with its arguments."""
    return PackedDataCollator(**collator)([{"input_ids": list(document)} for document in documents])


def packed_batch(documents: Documents) -> PackedBatch:
    """Documents as a `PackedBatch` in which every token but the first of a document is a target."""
    collate = PackedCollator(len(documents), max(map(len, documents)))
    tokens = [np.array(document, dtype=np.uint32) for document in documents]
    return collate([Document(each, np.array([[0, len(each)]])) for each in tokens])


def find_vocabulary_size(model: Any, config: Any) -> int:
    """Size of the vocabulary.

    Raises:
        ValueError: the model has neither a configuration nor an embedding that says it.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    sizes = [module.num_embeddings for module in modules if isinstance(module, nn.Embedding)]
    if config is not None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if getattr(text, "vocab_size", None):
            return int(text.vocab_size)
    if own := getattr(getattr(model, "shape", None), "vocabulary_size", None):
        return int(own)
    if not sizes:
        raise ValueError("the model has no embedding: pass vocabulary_size=…")
    return max(sizes)


def special_tokens(config: Any) -> set[int]:
    """Tokens that a configuration gives a meaning: padding, images and others."""
    found: set[int] = set()
    for part in (config, getattr(config, "text_config", None)):
        for name, value in vars(part).items() if part is not None else ():
            if name.endswith(("token_id", "token_index", "token_ids")):
                found.update(
                    each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)
                )
    return found


def draw_tokens(
    lengths: tuple[int, ...], size: int, special: set[int]
) -> tuple[list[list[int]], list[Tensor]]:
    """Documents of distinct tokens, as far as the vocabulary allows, and as many other tokens for each."""
    sizes = check_lengths(lengths).tolist()
    if len(sizes) < 2:
        raise ValueError(f"lengths={short(lengths)}: the probe needs at least two documents")
    size = check_integer("vocabulary_size", size)
    allowed = torch.tensor([token for token in range(min(size, 1 << 16)) if token not in special])
    if len(allowed) < 2:
        raise ValueError(
            f"a vocabulary of {size:,} tokens, {len(special)} of them special, leaves none to change: pass a larger"
            " vocabulary_size"
        )
    generator = torch.Generator().manual_seed(0)
    drawn = allowed[torch.randperm(len(allowed), generator=generator)]
    total = sum(sizes)
    if len(allowed) < total:
        drawn = allowed[torch.randint(len(allowed), (total,), generator=generator)]
    others = torch.roll(drawn, -total)[:total] if len(drawn) >= 2 * total else drawn[:total].clone()
    if len(drawn) < 2 * total:  # the next token of the vocabulary
        order = {int(token): int(allowed[(place + 1) % len(allowed)]) for place, token in enumerate(allowed)}
        others = torch.tensor([order[int(token)] for token in others])
    parts = torch.split(drawn[:total], sizes)
    return [part.tolist() for part in parts], list(torch.split(others, sizes))
