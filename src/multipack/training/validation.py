"""The validation loss: of all documents and, in a mixture, of each source.

Each source is planned alone, in packs of its own, one after the other: its loss needs no losses of single documents,
and is exact under every parallel method. The loss of all follows from the sums.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from multipack.data.packs.loader import PackedLoader
from multipack.parallel.engine import Engine


class ValidationPart(NamedTuple):
    """The validation documents of one source.

    Attributes:
        name: name of the source; empty outside of mixtures.
        loader: packs of the documents on this rank.
        steps: global steps of an evaluation.
    """

    name: str
    loader: PackedLoader
    steps: int


class Validation:
    """Evaluates the model of an engine.

    Args:
        engine: the model and the ranks.
        parts: the sources, at least one.
        micro_batches: packs of a rank in a step.

    Attributes:
        steps: global steps of an evaluation.
    """

    def __init__(self, engine: Engine, parts: list[ValidationPart], micro_batches: int) -> None:
        self._engine, self._parts, self._micro_batches = engine, parts, micro_batches
        self.steps = sum(part.steps for part in parts)

    def losses(self) -> dict[str, float]:
        """Mean losses over all ranks, weighted as the training loss; collective.

        Returns:
            The loss of all documents under "", and in a mixture of each source under "/NAME".
        """
        totals = [self._sums(part) for part in self._parts]
        loss, denominator = (sum(column) for column in zip(*totals, strict=True))
        found = {"": loss / (denominator or 1.0)}
        for part, (own, share) in zip(self._parts, totals, strict=True):
            if part.name:
                found[f"/{part.name}"] = own / (share or 1.0)
        return found

    def _sums(self, part: ValidationPart) -> list[float]:
        """Summed loss of a source and its denominator, over all ranks; collective."""
        loss, denominator = 0.0, 0.0
        batches = iter(part.loader)
        for _ in range(part.steps):
            micro_batches = list(islice(batches, self._micro_batches))
            loss += sum(self._engine.evaluate(micro_batches))
            if self._engine.mesh.is_replica_leader:
                denominator += sum(batch.denominator for batch in micro_batches)
        part.loader.close()
        return self._engine.world.sum([loss, denominator])

    def close(self) -> None:
        """Stop the threads that collate packs."""
        for part in self._parts:
            part.loader.close()
