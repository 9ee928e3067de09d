"""Validation loss over all ranks."""

from __future__ import annotations

from multipack.data.loader import PackedLoader
from multipack.parallel.engine import Engine


def validation_loss(engine: Engine, loader: PackedLoader, packs: int) -> float:
    """Mean loss over the validation packs, every rank taking its own; weighted as the packs are.

    That is the mean over their target tokens or, where packs have weights, over their documents.

    Args:
        engine: the model in the run's precision.
        loader: this rank's validation packs, always from the first one.
        packs: how many of them to take.
    """
    world, loss, denominator = engine.world, 0.0, 0
    batches = iter(loader)
    with engine.evaluating() as model:
        for _ in range(packs):
            batch = next(batches)
            loss += float(model(batch.to(world.device)))
            denominator += batch.denominator
    loader.close()
    total_loss, total = world.sum([loss, float(denominator)])
    return total_loss / max(total, 1.0)
