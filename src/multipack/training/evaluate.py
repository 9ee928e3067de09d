"""Validation loss over all ranks."""

from __future__ import annotations

from multipack.data.loader import PackedLoader
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
