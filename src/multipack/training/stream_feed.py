"""Global steps of documents that arrive while a run trains on them, as this rank sees them.

    Arriving ─ items ─▶ PackStream ─ steps ─▶ StreamSampler ─▶ PackedLoader ─▶ StreamFeed ─▶ the loop
                                      └─ state: where reading stands, and what is in flight

Every rank reads the same documents, plans the same steps and takes its share, so that all end after the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from multipack.data.arriving import Arriving, DocumentsLate, StreamInterrupted
from multipack.data.collate import PackedCollator
from multipack.data.loader import PackedLoader
from multipack.data.stream import StreamSampler
from multipack.parallel.mesh import Mesh
from multipack.planning.cost import CostModel
from multipack.planning.options import Sync
from multipack.planning.packing import Packs
from multipack.planning.plan import Plan
from multipack.planning.report import predicted_seconds
from multipack.planning.stream import PackStream
from multipack.planning.stream_step import StreamStep
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
    """The feed of a run that trains on documents which arrive.

    Args:
        config: of the run.
        mesh: its ranks.
        arriving: its documents.
        cost_model: what a document costs.
        clock: seconds.
        pad: give every pack one shape.

    Raises:
        ValueError: settings that only documents which are all there can have, or more ranks than packs of a step.
    """
    plan, train = config.plan, config.train
    packs, ranks = plan.packs_per_step, mesh.data_size
    if not train.steps:
        raise ValueError("data.stream=true: nobody knows how many documents are to come; set train.steps")
    if arriving.has_pairs:
        raise ValueError(
            f"{arriving.name} holds preference pairs, whose reference is computed over all of them beforehand: prepare"
            " them whole, and leave data.stream out"
        )
    if plan.tail == "carry":
        raise ValueError(
            "plan.tail=carry carries documents into the next epoch, and a stream has one: keep or drop"
        )
    if plan.effort != 1:
        raise ValueError(
            f"plan.effort={plan.effort} is for documents that are all there: leave it out of a stream"
        )
    if ranks > packs:
        raise ValueError(
            f"{ranks} data-parallel ranks cannot share plan.packs_per_step={packs} packs:"
            f" set it to at least {ranks} (a multiple of {ranks} keeps all of them busy)"
        )
    stream = PackStream(
        arriving,
        capacity=plan.capacity,
        packs_per_step=packs,
        length=itemgetter("length"),
        targets=itemgetter("targets"),
        lookahead=plan.window,
        seed=train.seed,
        order=plan.order,
        tail=plan.tail,
        resume="items",
        budget=plan.budget or None,
        balance=plan.balance,
        cost=cost_model,
        max_documents=plan.max_documents or None,
        group=plan.group,
        align=plan.align,
        loss_weighting=train.loss_weighting,
    )
    return StreamFeed(
        arriving,
        stream,
        mesh,
        cost_model=cost_model,
        sync=config.parallel.sync,
        prefetch=train.prefetch,
        clock=clock,
        pad_to=stream.longest if pad else None,
        pad_id=arriving.tokenizer.end_id or 0,
        multiple=config.parallel.token_multiple,
    )


class StreamFeed:
    """Iterates the global steps of a stream until it ends; like `Feed`, which goes on for ever.

    Args:
        arriving: the documents.
        stream: plans them.
        mesh: the ranks that share each step.
        cost_model: what a document costs.
        sync: where they wait for each other.
        prefetch: packs collated ahead.
        clock: seconds.
        pad_to, pad_id, multiple: see `PackedCollator`.

    Attributes:
        sampler: this rank's packs.
        micro_batches: packs of a rank in a step.
        ended: whether the stream has ended, and no step follows.
        late: what did not come in time, on this rank or another, where that ended the steps; empty otherwise.

    Raises:
        ValueError: more ranks than packs of a step. While iterating: ranks that read different documents; whatever is
            wrong with a document.
    """

    def __init__(
        self,
        arriving: Arriving,
        stream: PackStream,
        mesh: Mesh,
        *,
        cost_model: CostModel,
        sync: Sync = "micro",
        prefetch: int = 2,
        clock: Callable[[], float],
        pad_to: int | None = None,
        pad_id: int = 0,
        multiple: int = 1,
    ) -> None:
        self.arriving, self.stream, self.world = arriving, stream, mesh.world
        self.sampler = StreamSampler(
            stream, arriving, rank=mesh.data_rank, world_size=mesh.data_size, sync=sync
        )
        self._state = stream.state_dict()
        self.micro_batches = -(-self._state["options"]["packs_per_step"] // mesh.data_size)
        collator = PackedCollator.of(stream, pad_to, pad_id, multiple)
        self.loader = PackedLoader(self.sampler, self.sampler, collator, prefetch)
        self.ended, self.late = False, ""
        self.plan: Plan | None = None
        self._cost_model, self._clock = cost_model, clock
        self._last: StreamStep | None = None  # that was handed out

    def __iter__(self) -> Iterator[StepData]:
        batches = iter(self.loader)
        while True:
            began = self._clock()
            micro_batches, interrupted = [], False
            try:
                micro_batches = list(islice(batches, self.micro_batches))
            except StreamInterrupted:
                interrupted = True
            except DocumentsLate as error:
                # On all ranks, or on some alone: none goes on, and what was done is saved.
                interrupted, self.late = True, str(error)
            step: StreamStep | None = self.loader.state_dict()["step"] if micro_batches else None
            if self._all_stop(step, interrupted):
                return
            assert step is not None
            self._last = step
            yield self._data(step, micro_batches, began)

    def _all_stop(self, step: StreamStep | None, interrupted: bool) -> bool:
        """Whether no rank has this step, or one shall stop.

        Raises:
            ValueError: ranks have different documents.
        """
        digest = 0
        if step is not None:
            digest = 1 + int(np.bitwise_xor.reduce(step.positions * 40503 + step.lengths)) % (1 << 20)
        # Equal on all ranks if and only if ranks · Σ d² = (Σ d)²: exact, as whole numbers below 2⁵³ are.
        values = [float(interrupted), float(bool(self.late)), float(digest), float(digest) ** 2]
        stopped, late, total, squares = (int(each) for each in self.world.sum(values))
        if late and not self.late:
            self.late = f"documents came too late on {late} of {self.world.size} ranks, and here in time"
        if not stopped and self.world.size * squares != total * total:
            raise ValueError(
                f"ranks read different documents in step {self.stream.step}: every rank must see the same documents in"
                " the same order; a data set that is shuffled or divided by rank must be neither"
            )
        self.ended = not stopped and step is None
        return bool(stopped) or step is None

    def _data(self, step: StreamStep, micro_batches: list[Any], began: float) -> StepData:
        align, ranks, sync = self.stream.align, self.sampler.world_size, self.sampler.sync
        dealt = step.deal(ranks, sync)
        dealt_costs = self._cost_model, -(-step.lengths // align) * align, dealt, ranks, sync
        return StepData(
            micro_batches=micro_batches,
            target_tokens=step.targets,
            denominator=step.denominator,
            documents=step.positions,
            lengths=step.lengths,
            cost_spread=cost_spread(*dealt_costs),
            predicted_seconds=predicted_seconds(*dealt_costs),
            packs=Packs(step.positions[dealt.order], dealt.offsets),
            wait_seconds=self._clock() - began,
            epoch=0,
            index=step.number,
        )

    @property
    def targets_per_step(self) -> float:
        """What packs that are full of targets have: nobody knows the documents that are to come."""
        options = self._state["options"]
        return float(options["packs_per_step"] * options["mean"])

    def names(self, position: int) -> str:
        """The name of a document of the last step that was handed out; of others their position."""
        if self._last is not None:
            found = np.flatnonzero(self._last.positions == position)
            if len(found):
                return self.arriving.document_name(self._last.items[found[0]])
        return f"document {position:,} of {self.arriving.name}"

    def interrupt(self) -> None:
        """Wait for no documents any more: the iteration ends, on all ranks, and the state is as after the last step."""
        self.arriving.interrupt()

    def state_dict(self) -> dict[str, Any]:
        """The state after the step that was handed out last, as plain values; the same on every rank."""
        return self._state if self._last is None else self._last.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, with any number of ranks.

        Raises:
            ValueError: it is damaged, or of another stream.
        """
        self.loader.load_state_dict(state)
        self._state, self._last = state, None

    def close(self) -> None:
        """Stop waiting and prefetching."""
        self.arriving.interrupt()
        self.loader.close()
