"""`StreamFeed`: global steps of documents that arrive during the run.

Arriving ─ items ─▶ PackStream ─▶ StreamFeed ─▶ StepData      its state: position of reading, and items in flight
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from multipack.data.packs.collate import PackedCollator
from multipack.data.packs.loader import prefetched
from multipack.data.views.arriving import Arriving, DocumentsLate, StreamInterrupted
from multipack.parallel.mesh import Mesh
from multipack.planning.cost import CostModel
from multipack.planning.lengths import nothing_learned
from multipack.planning.packing import Packs
from multipack.planning.plan import Plan
from multipack.planning.stream import PackStream, StreamStep
from multipack.training.feed import StepData, checked, cost_spread
from multipack.training.run_config import Config


class StreamFeed:
    """Iterates the global steps of a stream of documents until it ends; see `Feed`.

    `pad` gives all packs one shape; `clock` returns seconds.

    Raises:
        ValueError: `plan.tail=carry`; while iterating, ranks that read different documents, or a malformed document.
    """

    plan: Plan | None = None

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        arriving: Arriving,
        cost_model: CostModel,
        clock: Callable[[], float],
        pad: bool = False,
    ) -> None:
        options = config.plan.for_ranks(mesh.data_size)
        self.arriving, self.mesh = arriving, mesh
        # Ends the iteration on all ranks, with the state after the last step.
        self.interrupt = arriving.interrupt
        self.stream = PackStream(
            arriving,
            options=options,
            length=itemgetter("length"),
            targets=itemgetter("targets"),
            cost=cost_model,
            seed=config.train.seed,
            loss_weighting=config.train.loss_weighting,
        )
        self.micro_batches = -(-options.packs_per_step // mesh.data_size)
        self.ended, self.late = False, ""
        slots, end = self.stream.longest if pad else None, arriving.tokenizer.end_id or 0
        collate = PackedCollator.of(self.stream, slots, end, config.parallel.token_multiple)
        self._collate = checked(collate, config.model.vocabulary_size or arriving.tokenizer.vocabulary_size)
        self._cost_model, self._sync, self._clock = cost_model, config.parallel.sync, clock
        self._prefetch = min(config.train.prefetch, 1)
        self._steps: Generator[tuple[StreamStep, StepData]] | None = None
        self._state = self.stream.state_dict()
        self._last: StreamStep | None = None  # the step that was yielded last

    def _collated(self) -> Iterator[tuple[StreamStep, StepData]]:
        """Each step, and its data with this rank's packs; runs in the background thread."""
        rank, ranks, document = self.mesh.data_rank, self.mesh.data_size, self.arriving.document
        for step in self.stream:
            dealt = step.deal(ranks, self._sync)
            costs = self._cost_model.cost(step.lengths[dealt.order])
            mine = [dealt[number].tolist() for number in range(rank, len(dealt), ranks)]
            yield (
                step,
                StepData(
                    micro_batches=[self._collate([document(step.items[n]) for n in pack]) for pack in mine],
                    target_tokens=step.targets,
                    denominator=step.denominator,
                    documents=step.positions,
                    lengths=step.lengths,
                    cost_spread=cost_spread(costs, dealt, ranks, self._sync),
                    computed=(step.lengths, None),
                    packs=Packs(step.positions[dealt.order], dealt.offsets),
                    wait_seconds=0.0,  # known when the step is taken
                    index=step.number,
                ),
            )

    def __iter__(self) -> Iterator[StepData]:
        self._steps = prefetched(self._collated(), self._prefetch)
        while True:
            began, interrupted, nothing = self._clock(), False, (None, None)
            step, data = nothing
            try:
                step, data = next(self._steps, nothing)
            except (StreamInterrupted, DocumentsLate) as error:  # no rank continues, and the run is saved
                interrupted, self.late = True, str(error) if isinstance(error, DocumentsLate) else ""
            if self._all_stop(step, interrupted) or step is None or data is None:
                return
            if self._last is None and not step.targets:
                raise nothing_learned(
                    f"the {len(step.lengths):,} documents of the first step",
                    "look at their answers (data.train_on_prompt=true makes all tokens targets)",
                )
            self._last = step
            yield replace(data, wait_seconds=self._clock() - began)

    def _all_stop(self, step: StreamStep | None, interrupted: bool) -> bool:
        """Whether all ranks stop: no rank has this step, or one was interrupted; collective.

        Raises:
            ValueError: ranks have different documents.
        """
        digest, world = 0, self.mesh.world
        if step is not None:
            digest = 1 + int(np.bitwise_xor.reduce(step.positions * 40503 + step.lengths)) % (1 << 20)
        # Digests d are equal on all ranks if and only if ranks · Σ d² = (Σ d)². float64 sums d² ≤ 2⁴⁰ exactly
        # for fewer than 2¹³ ranks; the products are of Python's integers.
        values = [float(interrupted), float(bool(self.late)), float(digest), float(digest) ** 2]
        stopped, late, total, squares = (int(each) for each in world.sum(values))
        if late and not self.late:
            self.late = f"documents came too late on {late} of {world.size} ranks, and here in time"
        if not stopped and world.size * squares != total * total:
            raise ValueError(
                f"ranks read different documents in step {self.stream.step}: every rank must see the same documents in"
                " the same order; a data set that is shuffled or divided by rank must be neither"
            )
        self.ended = not stopped and step is None
        return bool(stopped) or step is None

    @property
    def ending(self) -> dict[str, Any]:
        """Number of documents of the whole stream, and those that filled no step."""
        return {"documents": self.stream.position, "dropped": self.stream.left.tolist()} if self.ended else {}

    def name(self, number: int) -> str:
        """The name of a document of the last step; for others their position."""
        if self._last is not None and len(found := np.flatnonzero(self._last.positions == number)):
            return str(self._last.items[found[0]]["name"])
        return f"document {number:,} of {self.arriving.name}"

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was yielded, as plain values; equal on every rank."""
        return self._state if self._last is None else self._last.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, with any number of ranks; `ValueError` if it is of another stream."""
        self.stream.load_state_dict(state)
        self.arriving.restart()  # a state from before the first step holds no position of the documents
        self._state, self._last = state, None

    def close(self) -> None:
        """Stop waiting and prefetching."""
        self.arriving.interrupt()
        if self._steps is not None:
            self._steps.close()
