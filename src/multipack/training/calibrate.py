"""Calibration: the planner's cost fitted to measured times of a decoder on this device.

    documents ─▶ plan ─▶ some packs ─┬─ every second one, and mixes ─▶ fit ─▶ cost.json
                                     └─ the others ─▶ predicted and measured times

    mixes of documents ─▶ forward + backward, timed ─▶ t = t₀ + α·tokens + β·Σ l(l+1) + γ·documents ─▶ CostModel

`multipack calibrate --save cost.json` writes the cost, and `plan.cost=cost.json` plans with it (run_cost.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import torch

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.corpus import load_corpus
from multipack.data.views.documents import Document
from multipack.models.compile import compile_blocks
from multipack.models.decoder import Decoder
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.planning.plan import plan as make_plan
from multipack.planning.report import even
from multipack.reports.console import PLANNING, Console
from multipack.shapes import ModelShape
from multipack.training.precision import DTYPES
from multipack.training.run_config import Config
from multipack.training.run_parts import device_settings, shape_of

Timer = Callable[[list[int]], float]
"""Lengths of the documents of a micro-batch → seconds of its forward and backward pass."""

PACKS = 24
"""Packs of the plan that are timed, half of them to fit and half of them to check."""
BUDGET_SECONDS = 3.0
"""Time for all mixes: if packs of the full capacity would take longer, smaller ones are timed."""
ROUNDS = 2
"""Times that each micro-batch is timed; the smallest time counts, because other processes can only increase it."""
_PARTS = (1, 2, 4, 8, 16, 64)
"""Numbers of equal documents in a mix."""
_SHARES = (1, 2, 4)
"""Divisors of the number of tokens of a mix."""


def calibrate_documents(config: Config, world: World, console: Console) -> tuple[CostModel, float]:
    """Time packs of the documents of `config` with its model, and fit the planner's cost to half of them.

    Returns:
        The cost, and the mean absolute error of its predictions for the other half, relative to the mean time.

    Raises:
        ValueError: the documents do not fit or are too few, or no cost can be fitted to the times.
    """
    with console.progress("reading documents") as advance:
        corpus = load_corpus(config.data, config.tokenizer, limit=config.document_limit, progress=advance)
    shape = shape_of(config, corpus.tokenizer)
    cost, options = CostModel.from_shape(shape), config.plan.for_ranks(1)
    with console.notice(PLANNING):
        made = make_plan(corpus.train.lengths, options=options, cost=cost, seed=config.train.seed)
    packs = [
        made.slots[pack] for step in even(made.num_steps, PACKS) for pack in made.packs(step) if len(pack)
    ]
    chosen = [packs[index].tolist() for index in even(len(packs), PACKS)]
    if len(chosen) < 4:
        raise ValueError(
            f"{len(chosen)} packs are too few to fit a cost and to check it: give more documents, or lower"
            f" plan.capacity={config.plan.capacity}"
        )
    train, _ = device_settings(config, world)
    compiled, dtype = train.compile == "true", DTYPES[train.dtype]
    timer, calls = decoder_timer(shape, config.model.attention, world, dtype, compiled), count(1)
    with console.progress("timing packs") as advance:

        def counted(lengths: list[int]) -> float:
            advance(next(calls), None, "micro-batches timed")
            return timer(lengths)

        model = calibrate(counted, shape, config.plan.capacity, made.longest, packs=chosen[::2])
        held_out = chosen[1::2]
        seconds = least_seconds(counted, held_out)
    pairs = zip(held_out, seconds, strict=True)
    return model, sum(abs(model.seconds(pack) - measured) for pack, measured in pairs) / sum(seconds)


def calibrate(
    timer: Timer,
    shape: ModelShape,
    capacity: int,
    longest: int,
    budget_seconds: float = BUDGET_SECONDS,
    packs: Sequence[list[int]] = (),
) -> CostModel:
    """Time about twenty micro-batches of different documents and fit their cost.

    Args:
        timer: times a micro-batch.
        shape: of the decoder that it times.
        capacity: most tokens of a micro-batch.
        longest: most tokens of a document.
        budget_seconds: approximate time for all micro-batches but `packs`.
        packs: document lengths of further micro-batches to time, such as packs of a plan.

    Raises:
        ValueError: no cost can be fitted to the times.
    """
    tokens = _affordable(timer, capacity, longest, budget_seconds)
    batches = [*mixes(tokens, longest), *packs]
    least = least_seconds(timer, batches)
    try:
        return CostModel.fit(list(zip(batches, least, strict=True)), shape=shape)
    except ValueError as error:
        raise ValueError(
            f"micro-batches of up to {tokens:,} tokens, in documents of up to {min(longest, tokens):,}, gave no cost:"
            f" {error}; use plan.cost=flops"
        ) from None


def least_seconds(timer: Timer, batches: Sequence[list[int]]) -> list[float]:
    """The smallest of `ROUNDS` times of each micro-batch.

    All batches are timed before the next round, so that a short disturbance affects one time of each.
    """
    rounds = [[timer(lengths) for lengths in batches] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def mixes(tokens: int, longest: int) -> list[list[int]]:
    """Document lengths of about twenty micro-batches that differ in tokens, squared lengths and number of documents.

    All, a half and a quarter of `tokens` are each divided into equal documents, few and many, and into one long and
    many short ones.
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


def _affordable(timer: Timer, capacity: int, longest: int, budget_seconds: float) -> int:
    """The largest number of tokens, at most the capacity, whose mixes are timed within the budget."""
    tokens = min(capacity, 256)
    # The first pass includes one-time work.
    timer(mixes(tokens, longest)[0])
    while tokens < capacity:
        larger = min(2 * tokens, capacity)
        work = ROUNDS * sum(sum(lengths) for lengths in mixes(larger, longest)) / larger
        if timer(mixes(tokens, longest)[0]) * larger / tokens * work > budget_seconds:
            break
        tokens = larger
    return tokens


def decoder_timer(
    shape: ModelShape, attention: str, world: World, dtype: torch.dtype, compiled: bool = False
) -> Timer:
    """A function that times forward and backward passes of a decoder with random weights, in autocast to `dtype`."""
    with world.device:
        model = Decoder(replace(shape, scores=0), attention=attention)  # a reward model's loss needs pairs
    if compiled:
        compile_blocks(model)

    def seconds(lengths: list[int]) -> float:
        draw = np.random.default_rng(len(lengths))
        documents = [
            Document(draw.integers(0, shape.vocabulary_size, length, np.uint32), np.array([[0, length]]))
            for length in lengths
        ]
        batch = PackedCollator(len(documents), max(lengths))(documents).to(world.device)
        world.synchronize()
        start = time.perf_counter()
        with torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(batch)
        # Gradients accumulate, as in a step of several micro-batches.
        (loss / sum(lengths)).backward()
        world.synchronize()
        return time.perf_counter() - start

    return seconds
