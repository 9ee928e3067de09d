"""The cost of padding, measured in the run itself by alternating packed and padded steps on the same documents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from multipack.data.packs.batch import PackedBatch
from multipack.data.packs.collate import PackedCollator, pad_documents
from multipack.data.views.documents import Documents
from multipack.parallel.engine import Engine
from multipack.planning.options import LossWeighting
from multipack.planning.plan import Plan
from multipack.planning.report import PADDED_BATCH_SIZE


@dataclass(frozen=True)
class Comparison:
    """Packed and padded steps over the same documents.

    Attributes:
        ratio: packed over padded tokens per second, over all steps together; padding does not count as tokens.
        packed_tokens_per_second: tokens of all packed steps over their time.
        padded_tokens_per_second: the same for padded steps.
        pad_factor: slots of padded batches over tokens; the ratio if every slot cost the same.
        steps: number of pairs of steps.
        batch_size: documents in a padded batch.
    """

    ratio: float
    packed_tokens_per_second: float
    padded_tokens_per_second: float
    pad_factor: float
    steps: int
    batch_size: int


def padded_batches(
    documents: Documents,
    numbers: NDArray[np.int64],
    batch_size: int,
    seed: int,
    loss_weighting: LossWeighting = "token",
) -> list[PackedBatch]:
    """Documents `numbers` in random batches of `batch_size`, each padded to its longest document."""
    shuffled = np.random.default_rng(seed).permutation(numbers)
    groups = [shuffled[start : start + batch_size] for start in range(0, len(shuffled), batch_size)]
    return [
        pad_documents(
            [documents[int(number)] for number in group], 0, loss_weighting, documents.weights is not None
        )
        for group in groups
    ]


def compare_with_padding(
    engine: Engine,
    documents: Documents,
    plan: Plan,
    *,
    batch_size: int = PADDED_BATCH_SIZE,
    steps: int = 5,
    seconds: float = 40.0,
    clock: Callable[[], float] = time.perf_counter,
    padded_loss: Callable[..., Tensor] | None = None,
    pad_to: int | None = None,
) -> Comparison:
    """Time whole steps (forward, backward, clipping, optimizer with learning rate 0) both ways, in alternation.

    Weights stay as they are, but the optimizer's state does not: call it after the last step of a run.

    Args:
        engine: an engine in a world of one process: padded ranks would wait for each other.
        documents: the training documents.
        plan: its first steps are compared.
        batch_size: documents in a padded batch.
        steps: most pairs to time, after one untimed pair.
        seconds: start no further pair after this time (at least one is timed).
        clock: returns seconds.
        padded_loss: loss function of padded steps, for the one of another trainer; None = the model's.
        pad_to: slots of every pack; None = packs are not padded.
    """
    collate, model = PackedCollator.of(plan, pad_to), cast(Any, engine.model)
    own_loss, began = model.loss_function, clock()
    pairs: list[tuple[float, float, int, int]] = []
    for index in range(min(steps, plan.num_steps) + 1):
        step = max(index - 1, 0)  # the first pair warms up and is repeated
        packed = [collate([documents[int(n)] for n in pack]) for pack in plan.packs(step) if len(pack)]
        padded = padded_batches(documents, plan.documents(step), batch_size, step, plan.loss_weighting)
        packed_seconds = timed_step(engine, packed, clock)
        model.loss_function = padded_loss or own_loss
        try:
            padded_seconds = timed_step(engine, padded, clock)
        finally:
            model.loss_function = own_loss
        tokens, slots = sum(each.num_tokens for each in padded), sum(each.num_slots for each in padded)
        pairs += [(packed_seconds, padded_seconds, tokens, slots)] if index else []
        if pairs and clock() - began > seconds:
            break
    packed_total, padded_total, tokens, slots = map(sum, zip(*pairs, strict=True))
    return Comparison(
        ratio=padded_total / packed_total,
        packed_tokens_per_second=tokens / packed_total,
        padded_tokens_per_second=tokens / padded_total,
        pad_factor=slots / tokens,
        steps=len(pairs),
        batch_size=batch_size,
    )


def timed_step(engine: Engine, batches: Sequence[PackedBatch], clock: Callable[[], float]) -> float:
    """Seconds of a step that leaves the weights as they are."""
    engine.world.synchronize()
    began = clock()
    engine.forward_backward(batches, sum(batch.denominator for batch in batches))
    engine.clip(1.0)
    engine.step(0.0)
    engine.world.synchronize()
    return clock() - began
