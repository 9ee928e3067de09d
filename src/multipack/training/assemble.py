"""A run assembled: documents, plan, model, engine and files, ready for the loop.

    config ─▶ corpus ─▶ sampler (plan) ─▶ loader ─▶ feed
       └────▶ shape ──▶ decoder ─▶ optimizer ─▶ engine

Nothing is written before everything is known to fit together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from multipack.data.collate import PackedCollator
from multipack.data.corpus import Corpus, load_corpus
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.sampler import PackedBatchSampler
from multipack.data.tokenizer import Tokenizer
from multipack.models.decoder import Decoder
from multipack.parallel.engine import build_engine
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console
from multipack.run import RunDirectory, find_run
from multipack.shapes import ModelShape
from multipack.training.calibrate import run_cost
from multipack.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
)
from multipack.training.feed import Feed
from multipack.training.metrics import RunningLoss
from multipack.training.observer import Observers
from multipack.training.optimizer import build_optimizer
from multipack.training.precision import mean_peak, name_of_dtype, resolve_dtype
from multipack.training.session import Session

if TYPE_CHECKING:
    from multipack.config import Config


def assemble(
    config: Config,
    world: World,
    console: Console,
    clock: Callable[[], float] = time.perf_counter,
) -> Session:
    """Build every part of a run and, when it resumes, put each part where it was.

    Raises:
        ValueError: the configuration does not fit the documents, the device or the saved run.
        FileExistsError: the run directory holds another run.
    """
    config = replace(config, out=world.from_main(config.out or f"runs/{time.strftime('%Y-%m-%d_%H-%M-%S')}"))
    run, checkpoint = _run_and_checkpoint(config)
    if config.train.resume == "false":
        world.on_main(run.check_free)
    plan = config.plan
    packs_per_step = plan.keywords(world.size)["packs_per_step"]
    limit = document_limit(config)
    with console.progress("reading documents") as advance:
        corpus = load_corpus(config.data, config.tokenizer, limit=limit, progress=_reading(advance))
    if config.train.sample_prompt and not corpus.tokenizer.encode(config.train.sample_prompt):
        raise ValueError(f"train.sample_prompt={config.train.sample_prompt!r} has no tokens")
    shape = shape_of(config, corpus.tokenizer)
    dtype = resolve_dtype(config.train.dtype, world.device)
    config = replace(
        config,
        model=replace(config.model, vocabulary_size=shape.vocabulary_size),
        train=replace(config.train, dtype=name_of_dtype(dtype)),
        plan=replace(plan, packs_per_step=packs_per_step, micro_batches=0),
    )
    cost_model = run_cost(config, shape, world, run, checkpoint, dtype, limit)
    sampler = _sampler(config, world, corpus.train, cost_model, "training")
    collate = _collator(config, sampler, corpus)
    feed = Feed(PackedLoader(corpus.train, sampler, collate, config.train.prefetch), sampler, clock)
    validation, validation_packs = None, 0
    if config.train.eval_every or config.train.eval_only:
        validation, validation_packs = _validation(config, world, corpus, cost_model)
    torch.manual_seed(config.train.seed)
    model = Decoder(shape, attention=config.model.attention).to(world.device)
    engine = build_engine(
        model, build_optimizer(model, config.optimizer), world, config.parallel, dtype, clock
    )
    # From here on ranks draw their own random numbers (dropout): a distinct, reproducible stream each.
    torch.manual_seed(int(np.random.SeedSequence([config.train.seed, world.rank]).generate_state(1)[0]))
    steps = config.train.steps or max(1, round(config.train.epochs * sampler.steps_per_epoch))
    session = Session(
        config=config,
        world=world,
        console=console,
        run=run,
        corpus=corpus,
        shape=shape,
        cost_model=cost_model,
        sampler=sampler,
        feed=feed,
        validation=validation,
        validation_packs=validation_packs,
        engine=engine,
        steps=steps,
        peak_flops=mean_peak(world, dtype),
        clock=clock,
        running=RunningLoss(loss_weighting=config.train.loss_weighting),
        observers=Observers([]),
    )
    session.begin(checkpoint)
    return session


def _run_and_checkpoint(config: Config) -> tuple[RunDirectory, Checkpoint | None]:
    if config.train.resume == "false":
        return RunDirectory.at(config.out), None
    run, path = find_run(config.out if config.train.resume == "true" else config.train.resume)
    if path is None and not run.latest.is_file():
        return run, None  # stopped before its first checkpoint: it begins again
    return run, load_checkpoint(path or run.latest_checkpoint())


def _reading(advance: Any) -> Callable[[int, int | None, str], None]:
    return lambda done, total, unit: advance(done, total, unit)


def document_limit(config: Config) -> int:
    """Most tokens of a document: what a pack holds and, where positions are learned, the model has."""
    limit = config.plan.capacity // config.plan.align * config.plan.align
    return min(limit, config.model.context) if config.model.positions == "learned" else limit


def shape_of(config: Config, tokenizer: Tokenizer) -> ModelShape:
    """The decoder's shape, its vocabulary set.

    Raises:
        ValueError: the vocabulary is smaller than the tokenizer's.
    """
    values = config.model.to_dict()
    values.pop("attention")
    size = config.model.vocabulary_size
    if size and size < tokenizer.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={size} is smaller than the tokenizer's {tokenizer.vocabulary_size};"
            " use 0 to take the tokenizer's"
        )
    return ModelShape(**{**values, "vocabulary_size": size or tokenizer.vocabulary_size})


def _sampler(
    config: Config, world: World, documents: Documents, cost_model: CostModel, what: str, **options: Any
) -> PackedBatchSampler:
    plan = config.plan
    if world.size > plan.packs_per_step:
        raise ValueError(
            f"{world.size} processes cannot share plan.packs_per_step={plan.packs_per_step} packs:"
            f" set it to at least {world.size} (a multiple of {world.size} keeps all of them busy)"
        )
    if len(documents) < world.size:
        raise ValueError(
            f"there are {len(documents)} {what} documents for {world.size} processes:"
            " start fewer processes or add documents"
        )
    settings: dict[str, Any] = {
        **plan.keywords(world.size),
        "targets": documents.target_counts,
        "rank": world.rank,
        "world_size": world.size,
        "seed": config.train.seed,
        "sync": config.parallel.sync,
        "cost": cost_model,
        "loss_weighting": config.train.loss_weighting,
        **options,
    }
    return PackedBatchSampler(documents.lengths, **settings)


def _collator(config: Config, sampler: PackedBatchSampler, corpus: Corpus) -> PackedCollator:
    slots = config.plan.capacity // sampler.align * sampler.align  # what aligned documents can fill
    return PackedCollator.of(
        sampler, pad_to=slots if config.train.fixed_shape else None, pad_id=corpus.tokenizer.end_id or 0
    )


def _validation(
    config: Config, world: World, corpus: Corpus, cost_model: CostModel
) -> tuple[PackedLoader, int]:
    """This rank's validation packs, and how many of them an evaluation takes."""
    documents = corpus.validation
    if not len(documents) or not int(documents.target_counts.sum()):
        raise ValueError(
            f"validation has {len(documents)} documents and no target tokens: raise data.validation"
            f" (now {config.data.validation}), add documents, or set train.eval_every=0"
        )
    sampler = _sampler(config, world, documents, cost_model, "validation", order="given", tail="keep")
    loader = PackedLoader(documents, sampler, _collator(config, sampler, corpus), config.train.prefetch)
    steps, limit = sampler.steps_per_epoch, config.train.eval_packs
    if limit:
        steps = min(steps, -(-limit // sampler.plan.packs_per_step))
    return loader, steps * sampler.micro_batches
