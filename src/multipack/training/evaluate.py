"""Validation loss over all ranks."""

from __future__ import annotations

from itertools import islice

from multipack.data.loader import PackedLoader
from multipack.parallel.engine import ModelEngine


def validation_loss(engine: ModelEngine, loader: PackedLoader, packs: int, micro_batches: int = 1) -> float:
    """Mean loss over the validation packs, every rank taking its own; weighted as the packs are.

    That is the mean over their target tokens or, where packs have weights, over their documents.

    Args:
        engine: the model in the run's precision.
        loader: this rank's validation packs, always from the first one.
        packs: how many of them to take: a multiple of `micro_batches`.
        micro_batches: packs that the engine is given at once.
    """
    loss, denominator = 0.0, 0
    batches = iter(loader)
    for _ in range(packs // micro_batches):
        step = list(islice(batches, micro_batches))
        loss += sum(engine.evaluate(step))
        denominator += sum(batch.denominator for batch in step) if engine.mesh.is_replica_leader else 0
    loader.close()
    total_loss, total = engine.world.sum([loss, float(denominator)])
    return total_loss / max(total, 1.0)
