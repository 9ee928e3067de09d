"""The parts of a run, built from its configuration: documents, plan, model, engine, callbacks.

    config ─▶ corpus ─▶ sampler (plan) ─▶ loader ─▶ feed
       └────▶ shape ──▶ blueprint ─▶ engine (model, optimizer)

No file is written before all parts are built and checked.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multipack.data.corpus import Corpus, find_tokenizer, load_corpus
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.sampler import PackedBatchSampler
from multipack.data.tokenizer import Tokenizer
from multipack.parallel.build import build_engine
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.readers import open_loader, opens_tokens
from multipack.parallel.stages import fit_micro_batches
from multipack.parallel.world import World
from multipack.reports.console import Console
from multipack.run import RunDirectory, find_run
from multipack.shapes import ModelShape
from multipack.training.blueprint import blueprint_of, check_first_stage
from multipack.training.callbacks.averaging import MovingAverage
from multipack.training.callbacks.callback import Callback, Callbacks
from multipack.training.callbacks.early_stopping import EarlyStopping
from multipack.training.callbacks.gradients import GradientNoise, LayerNorms, needs_two_micro_batches
from multipack.training.callbacks.profiler import Trace
from multipack.training.callbacks.spikes import SpikeGuard
from multipack.training.callbacks.trackers import TrackedRun
from multipack.training.callbacks.tracking import Tracking, open_trackers
from multipack.training.checkpoint import Checkpoint, load_checkpoint
from multipack.training.feed import EpochFeed
from multipack.training.inference import find_template
from multipack.training.objective import objective_of
from multipack.training.optimizer import build_optimizer, described
from multipack.training.precision import mean_peak, name_of_dtype, resolve_dtype
from multipack.training.rules import read_rule
from multipack.training.run_config import Config
from multipack.training.run_cost import run_cost
from multipack.training.schedule import rate_factor
from multipack.training.stream_feed import StreamFeed, open_feed
from multipack.training.weights import Initial, begin_from, initial_shape, initial_weights


class RunParts:
    """Builds the parts of a run; base class of `RunState` and `Trainer`.

    Args:
        config: configuration of the run; see `compose_run`.
        world: the ranks.
        console: prints progress.
        clock: returns seconds; replaced in tests.

    Attributes:
        config: the configuration with run directory, vocabulary, dtype and packs per step resolved.
        resumed: the checkpoint that the run resumes from; None = a new run.
        steps: number of the last step of the run.
        lr_factor: factor of learning rates from `optimizer.lr_scaling`.
        peak_flops: measured peak of matrix products on one device, in FLOP/s.
        notes: notes for the header of the run.

    Raises:
        ValueError: the configuration does not fit the documents, the device or the saved run.
        FileExistsError: the run directory holds another run.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        out = world.from_main(config.out or f"runs/{time.strftime('%Y-%m-%d_%H-%M-%S')}")
        self.config = replace(config, out=out)
        self.world, self.console, self.clock = world, console, clock
        self.notes: list[str] = []
        self.run, self.resumed = _run_and_checkpoint(self.config)
        if config.train.resume == "false":
            world.on_main(self.run.check_free)
        self.mesh = build_mesh(config.parallel, world)
        packs, notes = packs_per_step(self.config, self.mesh)
        self.notes += notes
        self.corpus = self._read_documents()
        self.objective = objective_of(self.config, self.corpus)
        initial = self._initial_weights()
        self.shape = shape_of(self.config, self.corpus.tokenizer, initial)
        self.dtype = resolve_dtype(config.train.dtype, world.device)
        self.config = replace(
            self.config,
            model=replace(config.model, vocabulary_size=self.shape.vocabulary_size),
            train=replace(config.train, dtype=name_of_dtype(self.dtype), **self.objective.settings()),
            plan=replace(config.plan, packs_per_step=packs, micro_batches=0),
        )
        self.cost_model = run_cost(self.config, self.shape, self.run)
        self.chat_template = self._chat_template(initial)
        self.engine = self._build_engine(initial)
        self._build_feeds()
        # From here on ranks draw their own random numbers (dropout), each from a reproducible stream.
        torch.manual_seed(int(np.random.SeedSequence([config.train.seed, world.rank]).generate_state(1)[0]))
        self.callbacks = Callbacks([*self.objective.callbacks(self.engine), *self._build_callbacks()])
        self.lr_factor = rate_factor(config.optimizer, self.feed.targets_per_step)
        self.peak_flops = mean_peak(world, self.dtype)

    def _read_documents(self) -> Corpus:
        config = self.config
        with self.console.progress("reading documents") as advance:
            corpus = load_corpus(
                config.data,
                config.tokenizer,
                limit=document_limit(config),
                progress=advance,
                reads=opens_tokens(self.mesh, config.data.readers),
            )
        self.notes += [corpus.staged] if corpus.staged else []
        if config.train.sample_prompt and not corpus.tokenizer.encode(config.train.sample_prompt):
            raise ValueError(f"train.sample_prompt={config.train.sample_prompt!r} has no tokens")
        return corpus

    def _initial_weights(self) -> Initial | None:
        """The weights of train.init_from; None without it, and for a resumed run."""
        path = self.config.train.init_from
        if not path or self.resumed is not None:
            return None
        try:
            return initial_weights(Path(path).expanduser())
        except FileNotFoundError as error:
            raise FileNotFoundError(f"train.init_from={path}: {error}") from error

    def _chat_template(self, initial: Initial | None) -> str:
        """The chat template of the corpus or, without one, that of the checkpoint or initial weights."""
        before = self.resumed.path if self.resumed else initial.folder if initial else None
        template = None if before is None or self.corpus.chat_template else find_template(before)
        return self.corpus.chat_template if template is None else template.to_json()

    def _build_engine(self, initial: Initial | None) -> ModelEngine:
        config, weights = self.config, None
        if initial is not None:
            weights, note = begin_from(initial, self.shape, self.corpus.tokenizer)
            self.notes.append(note)
        blueprint = blueprint_of(config, self.objective, self.shape, weights)
        return build_engine(
            blueprint,
            partial(build_optimizer, config=config.optimizer, whole=described(blueprint.shapes)),
            self.mesh,
            config.parallel,
            self.dtype,
            micro_batches=-(-config.plan.packs_per_step // self.mesh.data_size),
            clock=self.clock,
        )

    def _build_feeds(self) -> None:
        """Set the feed of training steps, their number, and the validation packs."""
        config, corpus = self.config, self.corpus
        with self.console.progress("computing reference values") as advance:  # before a checkpoint's weights
            resumed = self.run.path if self.resumed is not None else None
            views, notes = self.objective.views(
                self.engine, self.dtype, document_limit(config), pack_slots(config), advance, resumed
            )
        self.notes += notes
        self.feed: EpochFeed | StreamFeed
        self.steps = config.train.steps
        if corpus.arriving is not None:  # documents are planned as they arrive; there is no plan of an epoch
            pad = pack_slots(config) is not None
            self.feed = open_feed(config, self.mesh, corpus.arriving, self.cost_model, self.clock, pad)
        else:
            sampler = self._sampler(corpus.train, "training")
            self.feed = EpochFeed(self._loader(views[0], sampler), sampler, corpus.train, self.clock)
            self.steps = self.steps or max(1, round(config.train.epochs * sampler.steps_per_epoch))
        self.validation: PackedLoader | None = None
        self.validation_packs = 0
        if config.train.eval_every or config.train.eval_only:
            self._build_validation(views[1])

    def _build_validation(self, view: Any) -> None:
        """Set this rank's validation packs, and the number of them in an evaluation."""
        documents = self.corpus.validation
        if not len(documents) or not int(documents.target_counts.sum()):
            raise ValueError(
                f"validation has {len(documents)} documents and no target tokens: raise data.validation"
                f" (now {self.config.data.validation}), add documents, or set train.eval_every=0"
            )
        sampler = self._sampler(documents, "validation", order="given", tail="keep")
        self.validation = self._loader(view, sampler)
        steps, limit = sampler.steps_per_epoch, self.config.train.eval_packs
        if limit:
            steps = min(steps, -(-limit // sampler.plan.packs_per_step))
        self.validation_packs = steps * sampler.micro_batches

    def _sampler(self, documents: Documents, kind: str, **changes: Any) -> PackedBatchSampler:
        config, ranks = self.config, self.mesh.data_size
        if len(documents) < ranks:
            raise ValueError(
                f"there are {len(documents)} {kind} documents for {ranks} data-parallel ranks:"
                " start fewer processes or add documents"
            )
        settings: dict[str, Any] = {
            "options": replace(config.plan.for_ranks(ranks), **changes),
            "targets": documents.target_counts,
            "rank": self.mesh.data_rank,
            "world_size": ranks,
            "seed": config.train.seed,
            "sync": config.parallel.sync,
            "cost": self.cost_model,
            "loss_weighting": config.train.loss_weighting,
        }
        return PackedBatchSampler(documents.lengths, **settings)

    def _loader(self, view: Any, sampler: PackedBatchSampler) -> PackedLoader:
        config = self.config
        return open_loader(
            view,
            sampler,
            self.objective.collator(sampler, pack_slots(config)),
            self.mesh,
            readers=config.data.readers,
            prefetch=config.train.prefetch,
            timeout_seconds=config.parallel.timeout_seconds,
        )

    def _build_callbacks(self) -> list[Callback]:
        """The callbacks that settings enable, in the order in which they are called."""
        train, log, track = self.config.train, self.config.log, self.config.track
        report = self.console.line
        callbacks: list[Callback] = []
        if train.profile:
            path = self.run.path / "trace.json" if self.world.is_main else None
            callbacks.append(Trace(path, self.world.device, report))
        if log.layer_norms:
            callbacks.append(LayerNorms())
        if log.gradient_noise:
            if self.feed.micro_batches < 2:
                raise ValueError(needs_two_micro_batches(self.feed.micro_batches))
            callbacks.append(GradientNoise())
        if train.spike != "off":
            callbacks.append(SpikeGuard(train.spike, train.spike_factor, report))
        if train.ema_decay:
            callbacks.append(MovingAverage(train.ema_decay))
        if train.patience:
            callbacks.append(EarlyStopping(train.patience, train.min_improvement))
        if track.to and track.mode != "disabled":
            run = TrackedRun(track, self.run.path, asdict(self.config))
            callbacks.append(Tracking(open_trackers(track, self.world), run, report))
        return callbacks


def check_model(config: Config, processes: int, console: Console) -> None:
    """Check settings that depend on the vocabulary or on names of parameters, before a process group exists.

    Tensor parallelism must divide the vocabulary, and the first stage of a pipeline must have trained parameters.

    Raises:
        ValueError: settings cannot be combined; the message names the nearest legal choice.
    """
    parallel, size = config.parallel, config.model.vocabulary_size
    freezes = parallel.pipeline > 1 and any(read_rule(rule).freeze for rule in config.optimizer.rules)
    if not freezes and (parallel.tensor == 1 or size):
        return
    if not size:
        with console.progress("reading the vocabulary") as advance:
            tokenizer = find_tokenizer(
                config.data, config.tokenizer, limit=document_limit(config), progress=advance
            )
        begun = config.train.init_from
        rows = initial_shape(Path(begun).expanduser()).vocabulary_size if begun else 0
        size = max(rows, tokenizer.vocabulary_size)
    shape = _with_vocabulary(config, size)
    parallel.check(shape, processes, config.plan.capacity)
    if freezes:
        check_first_stage(config, shape)


def packs_per_step(config: Config, mesh: Mesh) -> tuple[int, list[str]]:
    """Number of packs of a global step, increased if a pipeline needs more; and notes for the header of the run."""
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
        notes.append(f"packs are padded to plan.capacity={config.plan.capacity}: pipelines need one shape")
    if parallel.tensor > 1:
        hosts = mesh.world.gather(socket.gethostname())
        first = mesh.world.rank - mesh.coordinate("tp")
        if len(set(hosts[first : first + parallel.tensor])) > 1:
            notes.append(
                f"parallel.tensor={parallel.tensor} spans several hosts: its ranks communicate in every layer, for"
                " which only links within a host are fast enough"
            )
    return packs, notes


def document_limit(config: Config) -> int:
    """Maximum number of tokens of a document: the capacity of a pack and, with learned positions, the context."""
    limit = config.plan.capacity // config.plan.align * config.plan.align
    return min(limit, config.model.context) if config.model.positions == "learned" else limit


def pack_slots(config: Config) -> int | None:
    """Number of slots of every pack if all packs have one shape; None if they differ."""
    plan = config.plan
    one_shape = config.train.fixed_shape or config.parallel.pipeline > 1
    return plan.capacity // plan.align * plan.align if one_shape else None


def shape_of(config: Config, tokenizer: Tokenizer, initial: Initial | None = None) -> ModelShape:
    """The decoder's shape with its vocabulary.

    Raises:
        ValueError: the vocabulary is smaller than the tokenizer's.
    """
    size = config.model.vocabulary_size
    if size and size < tokenizer.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={size} is smaller than the tokenizer's {tokenizer.vocabulary_size};"
            " use 0 to take the tokenizer's"
        )
    rows = initial.shape.vocabulary_size if initial is not None else 0  # may exceed the number of tokens
    return _with_vocabulary(config, size or max(rows, tokenizer.vocabulary_size))


def _with_vocabulary(config: Config, size: int) -> ModelShape:
    values = config.model.to_dict()
    values.pop("attention")
    return ModelShape(**{**values, "vocabulary_size": size})


def _run_and_checkpoint(config: Config) -> tuple[RunDirectory, Checkpoint | None]:
    if config.train.resume == "false":
        return RunDirectory.at(config.out), None
    run, path = find_run(config.out if config.train.resume == "true" else config.train.resume)
    if path is None and not run.has_checkpoints:
        return run, None  # stopped before its first checkpoint: it starts again
    return run, load_checkpoint(path or run.latest_checkpoint())
