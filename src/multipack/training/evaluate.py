"""Validation loss over all ranks, and what the model writes."""

from __future__ import annotations

from typing import cast

import torch

from multipack.data.loader import PackedLoader
from multipack.data.tokenizer import Tokenizer
from multipack.models.decoder import Decoder
from multipack.models.generate import generate
from multipack.parallel.engine import Engine


def validation_loss(engine: Engine, loader: PackedLoader, packs: int) -> float:
    """Mean loss over the target tokens of the validation packs, every rank taking its own.

    Args:
        engine: the model in the run's precision.
        loader: this rank's validation packs, always from the first one.
        packs: how many of them to take.
    """
    world, loss, targets = engine.world, 0.0, 0
    batches = iter(loader)
    with engine.evaluating() as model:
        for _ in range(packs):
            batch = next(batches)
            loss += float(model(batch.to(world.device)))
            targets += batch.num_target_tokens
    loader.close()
    total_loss, total_targets = world.sum([loss, float(targets)])
    return total_loss / max(total_targets, 1.0)


def write_sample(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> str:
    """What the model writes after `prompt`; its random numbers are its own, so the run's stay untouched."""
    prompt_ids = tokenizer.encode(prompt)
    if not prompt_ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens")
    generator = torch.Generator().manual_seed(seed)
    with engine.evaluating() as model:
        new = generate(
            cast(Decoder, model),
            prompt_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            end_id=tokenizer.end_id,
            generator=generator,
        )
    return tokenizer.decode(new)
