"""Calibration: what documents cost on this device, measured with the run's own decoder at its start.

    mixes of documents ─▶ forward + backward, timed ─▶ t = t₀ + α·tokens + β·Σ l(l+1) + γ·documents ─▶ CostModel ─▶ plan

Rank 0 measures a decoder of its own, so that neither weights, gradients nor random numbers of the run notice. All
ranks take rank 0's coefficients, and the run keeps them in cost.json: a resumed run plans with what it was started
with, also on another machine, because a measured cost is never the same twice and its plans would not be either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models.decoder import Decoder
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.run import RunDirectory
from multipack.shapes import ModelShape
from multipack.training.checkpoint import Checkpoint

if TYPE_CHECKING:
    from multipack.training.run_config import Config

COST_FILE = "cost.json"
"""In a run directory and in each of its checkpoints, where the cost was measured."""

BUDGET_SECONDS = 3.0
"""Time for all micro-batches: where packs of the full capacity would take longer, smaller ones are timed."""

ROUNDS = 2
"""Times that each mix is timed; the least counts, because other work can only add to it."""

NOISY = 0.2
"""Error of a fit, as a share of the mean time, from which the header doubts it: 4 … 10 % are usual."""

_PARTS = (1, 2, 4, 8, 16, 64)
_SHARES = (1, 2, 4)


def run_cost(
    config: Config,
    shape: ModelShape,
    world: World,
    run: RunDirectory,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    longest: int,
) -> CostModel:
    """The cost model that a run plans with: FLOPs of its shape, or measured seconds, the same on every rank.

    Args:
        config: `plan.cost` says which; attention and capacity are those to measure with.
        shape: the run's decoder.
        world: rank 0 measures.
        run: where a run that resumes keeps what it measured.
        checkpoint: the one that the run resumes from.
        dtype: precision of forward passes.
        longest: most tokens of a document.

    Raises:
        ValueError: measured times that say nothing, or a checkpoint whose measured cost is gone.
    """
    if config.plan.cost == "flops":
        return CostModel.from_shape(shape)
    if config.plan.cost != "measured" and config.train.resume == "false":
        return CostModel.load(config.plan.cost)

    def saved_or_measured() -> str:
        saved = (checkpoint.path if checkpoint else run.path) / COST_FILE
        if config.train.resume != "false" and (checkpoint or saved.is_file()):
            return json.dumps(_saved(saved).to_dict())
        timer = DecoderTimer(shape, config.model.attention, world.device, dtype)
        return json.dumps(calibrate(timer, shape, config.plan.capacity, longest).to_dict())

    return CostModel.from_dict(json.loads(world.on_main(saved_or_measured)))


def _saved(path: Path) -> CostModel:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: the run was planned with plan.cost=measured, and without its coefficients the plan"
            " cannot be made again; put the file back, or start a new run with another out="
        )
    return CostModel.load(path)


def calibrate(
    timer: Callable[[list[int]], float],
    shape: ModelShape,
    capacity: int,
    longest: int,
    budget_seconds: float = BUDGET_SECONDS,
    packs: Sequence[list[int]] = (),
) -> CostModel:
    """Time about twenty micro-batches of different documents and fit their cost.

    Args:
        timer: lengths of the documents of a micro-batch → seconds of its forward and backward pass.
        shape: the decoder that it times.
        capacity: most tokens of a micro-batch.
        longest: most tokens of a document.
        budget_seconds: how long all of it may take, about; `packs` left out.
        packs: lengths of the documents of more micro-batches to time, real ones.

    Raises:
        ValueError: the times say nothing about documents.
    """
    tokens = _affordable(timer, capacity, longest, budget_seconds)
    batches = [*mixes(tokens, longest), *packs]
    least = least_seconds(timer, batches)
    try:
        return CostModel.fit(list(zip(batches, least, strict=True)), shape=shape)
    except ValueError as error:
        raise ValueError(
            f"plan.cost=measured: micro-batches of up to {tokens:,} tokens, in documents of up to"
            f" {min(longest, tokens):,}, gave no cost: {error}; use plan.cost=flops"
        ) from None


def least_seconds(timer: Callable[[list[int]], float], batches: Sequence[list[int]]) -> list[float]:
    """The least of `ROUNDS` times of each micro-batch.

    Round after round, not batch after batch: what slows the machine down for a moment then meets one time of each.
    """
    rounds = [[timer(lengths) for lengths in batches] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def mixes(tokens: int, longest: int) -> list[list[int]]:
    """Lengths of the documents of about twenty micro-batches that differ in tokens, squares and documents.

    Each of `tokens`, its half and its quarter is cut into equal documents, few and many; and once into a long
    document and short ones.
    """
    found: dict[tuple[int, ...], None] = {}
    for share in _SHARES:
        whole = max(tokens // share, 1)
        for parts in _PARTS:
            length = min(max(whole // parts, 1), longest)
            found[(length,) * (whole // length)] = None
        first, short = min(max(whole // 2, 1), longest), max(min(whole, longest) // 32, 1)
        found[(first, *[short] * ((whole - first) // short))] = None
    return [list(lengths) for lengths in found]


def _affordable(
    timer: Callable[[list[int]], float], capacity: int, longest: int, budget_seconds: float
) -> int:
    """The largest number of tokens, at most the capacity, whose mixes are timed within the budget."""
    tokens = min(capacity, 256)
    timer(mixes(tokens, longest)[0])  # the first pass pays for what later ones find done
    while tokens < capacity:
        larger = min(2 * tokens, capacity)
        work = ROUNDS * sum(sum(lengths) for lengths in mixes(larger, longest)) / larger
        if timer(mixes(tokens, longest)[0]) * larger / tokens * work > budget_seconds:
            break
        tokens = larger
    return tokens


class DecoderTimer:
    """Lengths of documents → seconds that a decoder takes for them, forward and backward.

    Args:
        shape: of the decoder; its weights are drawn anew, and the global generators are left as they were.
        attention: its backend.
        device: where it runs.
        dtype: bfloat16 runs forward passes under autocast.
        clock: seconds.
    """

    def __init__(
        self,
        shape: ModelShape,
        attention: str,
        device: torch.device,
        dtype: torch.dtype,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.dtype, self.clock = device, dtype, clock
        with self._own_random_numbers(), device:
            self.model = Decoder(shape, attention=attention)

    def __call__(self, lengths: list[int]) -> float:
        """Time one micro-batch; gradients add up, as in a step of several."""
        draw = np.random.default_rng(len(lengths))
        vocabulary = self.model.shape.vocabulary_size
        documents = [
            Document(draw.integers(0, vocabulary, length, dtype=np.uint32), np.array([[0, length]]))
            for length in lengths
        ]
        batch = PackedCollator(len(documents), max(lengths))(documents).to(self.device)
        with self._own_random_numbers():
            self._synchronize()
            began = self.clock()
            exact = self.dtype == torch.float32
            with nullcontext() if exact else torch.autocast(self.device.type, self.dtype):
                loss = self.model(batch)
            (loss / sum(lengths)).backward()
            self._synchronize()
            return self.clock() - began

    def _own_random_numbers(self) -> AbstractContextManager[None]:
        """A context after which the generators are as before it: dropout draws too."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def cost_files(model: CostModel) -> dict[str, str]:
    """What a run directory and its checkpoints keep of a measured cost; nothing where FLOPs say it."""
    return {COST_FILE: json.dumps(model.to_dict(), indent=1) + "\n"} if model.timed else {}


def cost_rows(model: CostModel) -> list[tuple[str, str]]:
    """Rows of the run header: the measured coefficients, and what the plan makes of them."""
    timed = model.timed
    if timed is None:
        return []
    flops = CostModel.from_shape(model.shape)
    return [
        (
            "measured times",
            f"{1e3 * timed.micro_batch:.3g} ms a micro-batch, {1e6 * timed.token:.4g} µs a token,"
            f" {1e9 * timed.pair:.4g} ns an l(l+1), {1e6 * timed.document:.4g} µs a document"
            f" (error {100 * timed.error:.1f} %{'; was the machine busy?' if timed.error > NOISY else ''})",
        ),
        ("cost of l tokens", f"{model.formula}; by FLOPs alone {flops.formula}"),
    ]
