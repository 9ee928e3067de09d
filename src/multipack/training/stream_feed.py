"""Global steps of documents that arrive during the run, as this rank sees them.

    Arriving ─ items ─▶ PackStream ─ steps ─▶ this rank's packs, collated one step ahead ─▶ training
                        └─ state: position of reading, and the items in flight

Every rank reads the same documents, plans the same steps and takes its share, so all ranks end after the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from multipack.data.arriving import Arriving, DocumentsLate, StreamInterrupted
from multipack.data.batch import PackedBatch
from multipack.data.collate import PackedCollator
from multipack.data.loader import PrefetchThread, rank_items
from multipack.parallel.mesh import Mesh
from multipack.planning.cost import CostModel
from multipack.planning.packing import Packs
from multipack.planning.plan import Plan
from multipack.planning.report import predicted_seconds
from multipack.planning.stream import PackStream, StreamStep
from multipack.training.feed import StepData, cost_spread

if TYPE_CHECKING:
    from multipack.training.run_config import Config


def open_feed(
    config: Config,
    mesh: Mesh,
    arriving: Arriving,
    cost_model: CostModel,
    clock: Callable[[], float],
    pad: bool = False,
) -> StreamFeed:
    """The feed of a run that trains on arriving documents.

    Args:
        config: the run.
        mesh: its ranks.
        arriving: its documents.
        cost_model: cost of a document.
        clock: seconds.
        pad: give all packs one shape.

    Raises:
        ValueError: settings that need all documents at once, or more ranks than packs of a step.
    """
    ranks = mesh.data_size
    options = config.plan.for_ranks(ranks)
    packs = options.packs_per_step
    if not config.train.steps:
        raise ValueError("data.stream=true: the number of documents is unknown; set train.steps")
    if arriving.has_pairs:
        raise ValueError(
            f"{arriving.name} holds preference pairs, whose reference is computed over all of them first: prepare"
            " them as a complete store, and leave data.stream out"
        )
    if options.tail == "carry":
        raise ValueError(
            "plan.tail=carry carries documents into the next epoch, and a stream has one: keep or drop"
        )
    if options.effort != 1:
        raise ValueError(
            f"plan.effort={options.effort} needs all documents at once: leave it out of a stream"
        )
    if ranks > packs:
        raise ValueError(
            f"{ranks} data-parallel ranks cannot share plan.packs_per_step={packs} packs:"
            f" set it to at least {ranks} (a multiple of {ranks} keeps all of them busy)"
        )
    stream = PackStream(
        arriving,
        options=options,
        length=itemgetter("length"),
        targets=itemgetter("targets"),
        cost=cost_model,
        seed=config.train.seed,
        loss_weighting=config.train.loss_weighting,
    )
    return StreamFeed(config, mesh, arriving, stream, cost_model, clock, pad)


class StreamFeed:
    """Iterates the global steps of a stream until it ends; the counterpart of `EpochFeed`.

    Args:
        config: the run.
        mesh: the ranks that share each step.
        arriving: the documents.
        stream: plans them.
        cost_model: cost of a document.
        clock: seconds.
        pad: give all packs one shape.

    Attributes:
        micro_batches: packs of a rank in a step.
        targets_per_step: target tokens of a step whose packs are full: the documents to come are unknown.
        ended: whether the stream has ended, and no step follows.
        late: which documents did not arrive in time, here or on another rank, and ended the steps; else empty.

    Raises:
        ValueError: while iterating: ranks that read different documents; a malformed document.
    """

    plan: Plan | None = None

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        arriving: Arriving,
        stream: PackStream,
        cost_model: CostModel,
        clock: Callable[[], float],
        pad: bool = False,
    ) -> None:
        self.arriving, self.stream, self.mesh = arriving, stream, mesh
        self.micro_batches = -(-config.plan.packs_per_step // mesh.data_size)
        self.targets_per_step = float(config.plan.packs_per_step * config.plan.mean)
        self.ended, self.late = False, ""
        self._collate = PackedCollator.of(
            stream,
            stream.longest if pad else None,
            arriving.tokenizer.end_id or 0,
            config.parallel.token_multiple,
        )
        self._cost_model, self._sync, self._clock = cost_model, config.parallel.sync, clock
        self._prefetch = config.train.prefetch > 0
        self._thread: PrefetchThread[tuple[StreamStep, list[PackedBatch]]] | None = None
        self._state = stream.state_dict()
        self._last: StreamStep | None = None  # the step that was yielded last

    def _steps(self) -> Iterator[tuple[StreamStep, list[PackedBatch]]]:
        """Each step with this rank's packs; runs in the background thread."""
        for step in self.stream:
            packs = rank_items(step, self.mesh.data_rank, self.mesh.data_size, self._sync)
            yield step, [self._collate([self.arriving.document(item) for item in pack]) for pack in packs]

    def __iter__(self) -> Iterator[StepData]:
        steps = self._steps()
        if self._prefetch:
            self._thread = PrefetchThread(steps, 1)
            steps = self._thread.items()
        while True:
            began, interrupted = self._clock(), False
            step, micro_batches = None, list[PackedBatch]()
            try:
                step, micro_batches = next(steps, (None, []))
            except StreamInterrupted:
                interrupted = True
            except DocumentsLate as error:  # no rank continues, and the run is saved
                interrupted, self.late = True, str(error)
            if self._all_stop(step, interrupted) or step is None:
                return
            self._last = step
            yield self._data(step, micro_batches, began)

    def _all_stop(self, step: StreamStep | None, interrupted: bool) -> bool:
        """Whether no rank has this step, or one of them stops; collective.

        Raises:
            ValueError: ranks have different documents.
        """
        digest, world = 0, self.mesh.world
        if step is not None:
            digest = 1 + int(np.bitwise_xor.reduce(step.positions * 40503 + step.lengths)) % (1 << 20)
        # Equal on all ranks if and only if ranks · Σ d² = (Σ d)²: exact, since whole numbers below 2⁵³ are.
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

    def _data(self, step: StreamStep, micro_batches: list[PackedBatch], began: float) -> StepData:
        align, ranks, sync = self.stream.align, self.mesh.data_size, self._sync
        dealt = step.deal(ranks, sync)
        costs = self._cost_model, -(-step.lengths // align) * align, dealt, ranks, sync
        return StepData(
            micro_batches=micro_batches,
            target_tokens=step.targets,
            denominator=step.denominator,
            documents=step.positions,
            lengths=step.lengths,
            cost_spread=cost_spread(*costs),
            predicted_seconds=predicted_seconds(*costs),
            packs=Packs(step.positions[dealt.order], dealt.offsets),
            wait_seconds=self._clock() - began,
            index=step.number,
        )

    def names(self, number: int) -> str:
        """The name of a document of the last step; for others their position."""
        if self._last is not None and len(found := np.flatnonzero(self._last.positions == number)):
            return str(self._last.items[found[0]]["name"])
        return f"document {number:,} of {self.arriving.name}"

    def interrupt(self) -> None:
        """End waiting for documents: the iteration ends on all ranks, with the state after the last step."""
        self.arriving.interrupt()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was yielded, as plain values; equal on every rank."""
        return self._state if self._last is None else self._last.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, with any number of ranks.

        Raises:
            ValueError: the state is damaged, or of another stream.
        """
        self.stream.load_state_dict(state)
        self.arriving.restart()  # a state from before the first step holds no position of the documents
        self._state, self._last = state, None

    def close(self) -> None:
        """Stop waiting and prefetching."""
        self.arriving.interrupt()
        if self._thread is not None:
            self._thread.stop()
