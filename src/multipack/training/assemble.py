"""A run assembled: documents, plan, model, engine and files, ready for the loop.

    config ─▶ corpus ─▶ sampler (plan) ─▶ loader ─▶ feed
       └────▶ shape ──▶ blueprint ─▶ engine (model, optimizer)

Nothing is written before everything is known to fit together.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from multipack.data.corpus import Corpus, find_tokenizer, load_corpus
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.sampler import PackedBatchSampler
from multipack.data.tokenizer import Tokenizer
from multipack.parallel.build import build_engine
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.readers import open_loader, opens_tokens
from multipack.parallel.stages import fit_micro_batches
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console
from multipack.run import RunDirectory, find_run
from multipack.shapes import ModelShape
from multipack.training.blueprint import blueprint_of, check_first_stage
from multipack.training.calibrate import run_cost
from multipack.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
)
from multipack.training.feed import Feed, Steps
from multipack.training.inference import find_template
from multipack.training.metrics import RunningLoss
from multipack.training.objective import Objective, objective_of
from multipack.training.observer import Observers
from multipack.training.optimizer import build_optimizer, described
from multipack.training.precision import mean_peak, name_of_dtype, resolve_dtype
from multipack.training.rules import read_rule
from multipack.training.schedule import rate_factor
from multipack.training.session import Session
from multipack.training.stream_feed import open_feed
from multipack.training.watch import build_observers
from multipack.training.weights import Initial, begin_from, initial_shape, initial_weights

if TYPE_CHECKING:
    from multipack.training.run_config import Config


def check_model(config: Config, processes: int, console: Console) -> None:
    """Refuse what only the vocabulary or the names of parameters tell against, before a process joins the others.

    Looks where it matters: tensor parallelism divides the vocabulary, and the first stage of a pipeline must train.

    Raises:
        ValueError: settings that do not go together, the nearest legal choice named.
    """
    parallel, size = config.parallel, config.model.vocabulary_size
    freezes = parallel.pipeline > 1 and any(read_rule(rule).freeze for rule in config.optimizer.rules)
    if not freezes and (parallel.tensor == 1 or size):
        return
    if not size:
        with console.progress("looking at the vocabulary") as advance:
            tokenizer = find_tokenizer(
                config.data, config.tokenizer, limit=document_limit(config), progress=_reading(advance)
            )
        begun = config.train.init_from
        rows = initial_shape(Path(begun).expanduser()).vocabulary_size if begun else 0
        size = max(rows, tokenizer.vocabulary_size)
    shape = _with_vocabulary(config, size)
    parallel.check(shape, processes, config.plan.capacity)
    if freezes:
        check_first_stage(config, shape)


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
    mesh = build_mesh(config.parallel, world)
    packs_per_step, notes = _packs_per_step(config, mesh)
    limit = document_limit(config)
    with console.progress("reading documents") as advance:
        reads = opens_tokens(mesh, config.data.readers)
        corpus = load_corpus(
            config.data, config.tokenizer, limit=limit, progress=_reading(advance), reads=reads
        )
    notes += [corpus.staged] if corpus.staged else []
    if config.train.sample_prompt and not corpus.tokenizer.encode(config.train.sample_prompt):
        raise ValueError(f"train.sample_prompt={config.train.sample_prompt!r} has no tokens")
    objective = objective_of(config, corpus)
    initial = _initial(config, checkpoint, objective)
    shape = shape_of(config, corpus.tokenizer, initial)
    dtype = resolve_dtype(config.train.dtype, world.device)
    config = replace(
        config,
        model=replace(config.model, vocabulary_size=shape.vocabulary_size),
        train=replace(config.train, dtype=name_of_dtype(dtype), **objective.settings()),
        plan=replace(config.plan, packs_per_step=packs_per_step, micro_batches=0),
    )
    cost_model = run_cost(config, shape, world, run, checkpoint, dtype, limit)
    state: Mapping[str, Tensor] | None = None
    if initial is not None:
        state, told = begin_from(initial, shape, corpus.tokenizer)
        notes.append(told)
    blueprint = blueprint_of(config, objective, shape, state)
    engine = build_engine(
        blueprint,
        partial(build_optimizer, config=config.optimizer, whole=described(blueprint.shapes)),
        mesh,
        config.parallel,
        dtype,
        micro_batches=-(-packs_per_step // mesh.data_size),
        clock=clock,
    )
    with console.progress("asking the reference model") as advance:  # before the weights of a checkpoint
        views, told_views = objective.views(engine, dtype, limit, _slots(config), _reading(advance))
    feed, steps = _steps(config, mesh, objective, views[0], cost_model, clock)
    validation, validation_packs = None, 0
    if config.train.eval_every or config.train.eval_only:
        validation, validation_packs = _validation(config, mesh, objective, views[1], cost_model)
    # From here on ranks draw their own random numbers (dropout): a distinct, reproducible stream each.
    torch.manual_seed(int(np.random.SeedSequence([config.train.seed, world.rank]).generate_state(1)[0]))
    observers = build_observers(
        config.train,
        config.log,
        config.track,
        run,
        world,
        settings=asdict(config),
        micro_batches=feed.micro_batches,
        tell=console.line,
    )
    session = Session(
        config=config,
        world=world,
        console=console,
        run=run,
        corpus=corpus,
        shape=shape,
        cost_model=cost_model,
        objective=objective,
        feed=feed,
        validation=validation,
        validation_packs=validation_packs,
        engine=engine,
        steps=steps,
        peak_flops=mean_peak(world, dtype),
        clock=clock,
        running=RunningLoss(loss_weighting=config.train.loss_weighting),
        observers=Observers([*objective.observers(engine), *observers]),
        lr_factor=rate_factor(config.optimizer, feed.targets_per_step),
        targets_per_step=feed.targets_per_step,
        notes=[*notes, *told_views],
        chat_template=_chat_template(corpus, checkpoint, initial),
    )
    session.begin(checkpoint)
    return session


def _packs_per_step(config: Config, mesh: Mesh) -> tuple[int, list[str]]:
    """Packs of a global step, and what people should know of them and of the ranks."""
    parallel, notes = config.parallel, []
    packs = config.plan.for_ranks(mesh.data_size).packs_per_step
    micro_batches = -(-packs // mesh.data_size)
    fitting = fit_micro_batches(parallel, micro_batches)
    if fitting > micro_batches:
        packs = fitting * mesh.data_size
        notes.append(
            f"plan.packs_per_step is {packs}, so that the {parallel.pipeline} ranks of a pipeline have {fitting}"
            " micro-batches each"
        )
    if parallel.pipeline > 1 and not config.train.fixed_shape:
        notes.append(f"packs are filled up to plan.capacity={config.plan.capacity}: pipelines need one shape")
    if parallel.tensor > 1:
        places = mesh.world.gather(socket.gethostname())
        first = mesh.world.rank - mesh.coordinate("tp")
        if len(set(places[first : first + parallel.tensor])) > 1:
            notes.append(
                f"parallel.tensor={parallel.tensor} spans several hosts: its ranks talk in every layer, which only a"
                " link within a host is quick enough for"
            )
    return packs, notes


def _steps(
    config: Config,
    mesh: Mesh,
    objective: Objective,
    view: Any,
    cost_model: CostModel,
    clock: Callable[[], float],
) -> tuple[Steps, int]:
    """Where global steps come from, and the last step of the run."""
    corpus = objective.corpus
    if corpus.arriving is not None:  # there is no plan of an epoch: documents are planned as they come
        pad = _slots(config) is not None
        return open_feed(config, mesh, corpus.arriving, cost_model, clock, pad), config.train.steps
    sampler = _sampler(config, mesh, corpus.train, cost_model, "training")
    loader = _loader(config, mesh, objective, view, sampler)
    feed = Feed(loader, sampler, corpus.train, clock)
    return feed, config.train.steps or max(1, round(config.train.epochs * sampler.steps_per_epoch))


def _run_and_checkpoint(config: Config) -> tuple[RunDirectory, Checkpoint | None]:
    if config.train.resume == "false":
        return RunDirectory.at(config.out), None
    run, path = find_run(config.out if config.train.resume == "true" else config.train.resume)
    if path is None and not run.has_checkpoints:
        return run, None  # stopped before its first checkpoint: it begins again
    return run, load_checkpoint(path or run.latest_checkpoint())


def _initial(config: Config, checkpoint: Checkpoint | None, objective: Objective) -> Initial | None:
    """The weights to begin with. A run that goes on has its own, and may need these as its reference only."""
    if not config.train.init_from or (checkpoint is not None and not objective.needs_initial):
        return None
    try:
        return initial_weights(Path(config.train.init_from).expanduser())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"train.init_from={config.train.init_from}: {error}") from error


def _chat_template(corpus: Corpus, checkpoint: Checkpoint | None, initial: Initial | None) -> str:
    """The template of the run's chats; without any, that of the weights it goes on with."""
    before = checkpoint.path if checkpoint is not None else initial.folder if initial is not None else None
    template = find_template(before) if before is not None and not corpus.chat_template else None
    return corpus.chat_template if template is None else template.to_json()


def _reading(advance: Any) -> Callable[[int, int | None, str], None]:
    return lambda done, total, unit: advance(done, total, unit)


def document_limit(config: Config) -> int:
    """Most tokens of a document: what a pack holds and, where positions are learned, the model has."""
    limit = config.plan.capacity // config.plan.align * config.plan.align
    return min(limit, config.model.context) if config.model.positions == "learned" else limit


def shape_of(config: Config, tokenizer: Tokenizer, initial: Initial | None = None) -> ModelShape:
    """The decoder's shape, its vocabulary set.

    Raises:
        ValueError: the vocabulary is smaller than the tokenizer's.
    """
    size = config.model.vocabulary_size
    if size and size < tokenizer.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={size} is smaller than the tokenizer's {tokenizer.vocabulary_size};"
            " use 0 to take the tokenizer's"
        )
    rows = (
        initial.shape.vocabulary_size if initial is not None else 0
    )  # which may be more than there are tokens
    return _with_vocabulary(config, size or max(rows, tokenizer.vocabulary_size))


def _with_vocabulary(config: Config, size: int) -> ModelShape:
    values = config.model.to_dict()
    values.pop("attention")
    return ModelShape(**{**values, "vocabulary_size": size})


def _sampler(
    config: Config, mesh: Mesh, documents: Documents, cost_model: CostModel, what: str, **changes: Any
) -> PackedBatchSampler:
    ranks = mesh.data_size
    if len(documents) < ranks:
        raise ValueError(
            f"there are {len(documents)} {what} documents for {ranks} data-parallel ranks:"
            " start fewer processes or add documents"
        )
    settings: dict[str, Any] = {
        "options": replace(config.plan.for_ranks(ranks), **changes),
        "targets": documents.target_counts,
        "rank": mesh.data_rank,
        "world_size": ranks,
        "seed": config.train.seed,
        "sync": config.parallel.sync,
        "cost": cost_model,
        "loss_weighting": config.train.loss_weighting,
    }
    return PackedBatchSampler(documents.lengths, **settings)


def _loader(
    config: Config, mesh: Mesh, objective: Objective, view: Any, sampler: PackedBatchSampler
) -> PackedLoader:
    return open_loader(
        view,
        sampler,
        objective.collator(sampler, _slots(config)),
        mesh,
        readers=config.data.readers,
        prefetch=config.train.prefetch,
        timeout_seconds=config.parallel.timeout_seconds,
    )


def _slots(config: Config) -> int | None:
    """Slots of every pack, where all have one shape: what aligned documents can fill."""
    plan = config.plan
    one_shape = config.train.fixed_shape or config.parallel.pipeline > 1
    return plan.capacity // plan.align * plan.align if one_shape else None


def _validation(
    config: Config, mesh: Mesh, objective: Objective, view: Any, cost_model: CostModel
) -> tuple[PackedLoader, int]:
    """This rank's validation packs, and how many of them an evaluation takes."""
    documents = objective.corpus.validation
    if not len(documents) or not int(documents.target_counts.sum()):
        raise ValueError(
            f"validation has {len(documents)} documents and no target tokens: raise data.validation"
            f" (now {config.data.validation}), add documents, or set train.eval_every=0"
        )
    sampler = _sampler(config, mesh, documents, cost_model, "validation", order="given", tail="keep")
    loader = _loader(config, mesh, objective, view, sampler)
    steps, limit = sampler.steps_per_epoch, config.train.eval_packs
    if limit:
        steps = min(steps, -(-limit // sampler.plan.packs_per_step))
    return loader, steps * sampler.micro_batches
