"""Builds the parts of a run from its configuration, for `Trainer`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from multipack.data.text.tokenizer import Tokenizer
from multipack.data.views.corpus import Corpus, find_tokenizer, load_corpus
from multipack.hub import model_folder
from multipack.models.compile import compiler_problem, keep_compiled_code_private
from multipack.parallel.engine import ModelEngine
from multipack.parallel.joining import connected
from multipack.parallel.mesh import Mesh
from multipack.parallel.readers import opens_tokens
from multipack.parallel.stages import fit_micro_batches
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console, Detail
from multipack.run import RunDirectory, find_run
from multipack.shapes import ModelShape
from multipack.training.blueprint import check_first_stage
from multipack.training.callbacks.averaging import MovingAverage
from multipack.training.callbacks.callback import Callback
from multipack.training.callbacks.early_stopping import EarlyStopping
from multipack.training.callbacks.gradients import GradientNoise, LayerNorms
from multipack.training.callbacks.profiler import Trace
from multipack.training.callbacks.spikes import SpikeGuard
from multipack.training.callbacks.trackers import TrackedRun, Tracking, check_trackers
from multipack.training.checkpoint import Checkpoint, load_checkpoint
from multipack.training.feed import EpochFeed, StreamFeed
from multipack.training.foreign_checks import check_same_code
from multipack.training.objective import Objective
from multipack.training.pack_loaders import PackLoaders
from multipack.training.precision import DTYPES, deterministic, exact_float32, resolve_dtype
from multipack.training.rules import read_rule
from multipack.training.run_config import Config, saved_shape
from multipack.training.settings import ADAPTER_LR_SCALE, NEW_MODEL_LR, TrainConfig
from multipack.training.validation import Validation
from multipack.training.weights import TrainedWeights, trained_shape


@contextmanager
def run_world(config: Config) -> Iterator[World]:
    """Context of a run's ranks, and of the arithmetic that its settings choose."""
    with (
        connected(
            config.train.device,
            config.parallel.timeout_seconds,
            group_of_one=config.parallel.offloads_parameters,
        ) as world,
        deterministic(config.train.deterministic, world.device),
        exact_float32(),
    ):
        if config.train.compile == "true" or (config.train.compile == "auto" and world.device.type == "cuda"):
            keep_compiled_code_private()
        yield world


def check_model(config: Config, processes: int, console: Console) -> None:
    """Check settings that depend on the vocabulary or on names of parameters, before a process group exists.

    Tensor parallelism must divide the vocabulary, and the first stage of a pipeline must have trained parameters.

    Raises:
        ValueError: settings cannot be combined; the message names the nearest legal choice.
    """
    parallel, size = config.parallel, config.model.vocabulary_size
    freezes = parallel.pipeline > 1 and (
        config.adapter.name != "none" or any(read_rule(rule).freeze for rule in config.optimizer.rules)
    )
    if not freezes and (parallel.tensor == 1 or size):
        return
    if not size:
        with console.progress("reading the vocabulary") as advance:
            tokenizer = find_tokenizer(
                config.data, config.tokenizer, limit=config.document_limit, progress=advance
            )
        path = config.train.init_from
        foreign = bool(config.model.architecture)
        rows = trained_shape(model_folder(path, "train.init_from"), foreign).vocabulary_size if path else 0
        size = max(rows, tokenizer.vocabulary_size)
    shape = config.shape_with(size)
    parallel.check(shape, processes, config.plan.capacity, resumed=config.train.resume != "false")
    if freezes:
        check_first_stage(config, shape)


def open_run(config: Config, world: World) -> tuple[RunDirectory, Checkpoint | None]:
    """The run directory, and the checkpoint that the run resumes from; None = the run starts with step 1.

    Raises:
        FileExistsError: the directory of a new run is not empty.
        ValueError: the checkpoint is damaged, or all are missing.
    """
    if config.train.resume == "false":
        run = RunDirectory(config.out)
        world.on_main(run.check_free)
        return run, None
    run, path = find_run(config.out if config.train.resume == "true" else config.train.resume)
    if path is None and not run.has_checkpoints:
        run.check_unsaved()
        return run, None  # stopped before its first checkpoint
    return run, load_checkpoint(path or run.latest_checkpoint(), world)


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
    if parallel.pipeline > 1 and config.train.fixed_shape != "true":
        notes.append(
            Detail(f"packs are padded to plan.capacity={config.plan.capacity}: pipelines need one shape")
        )
    if parallel.tensor > 1:
        hosts = mesh.world.gather(socket.gethostname())
        first = mesh.world.rank - mesh.coordinate("tp")
        if len(set(hosts[first : first + parallel.tensor])) > 1:
            notes.append(
                f"parallel.tensor={parallel.tensor} spans several hosts: its ranks communicate in every layer, for"
                " which only links within a host are fast enough"
            )
    return packs, notes


def read_documents(config: Config, mesh: Mesh, console: Console) -> Corpus:
    """The documents of the run; tokenized first, if necessary.

    Raises:
        ValueError: see `load_corpus`; or the prompt of samples has no tokens.
    """
    with console.progress("reading documents") as advance:
        corpus = load_corpus(
            config.data,
            config.tokenizer,
            limit=config.document_limit,
            progress=advance,
            reads=opens_tokens(mesh, config.data.readers),
        )
    prompt = config.train.sample_prompt
    if prompt and not corpus.tokenizer.encode(prompt):
        raise ValueError(f"train.sample_prompt={prompt!r} has no tokens")
    return corpus


def shape_of(
    config: Config,
    tokenizer: Tokenizer,
    initial: TrainedWeights | None = None,
    resumed: Path | None = None,
) -> ModelShape:
    """The decoder's shape with its vocabulary.

    That of a resumed run has the family of its checkpoint, and a model of transformers is built from the config.json in
    it: the folder may have changed since.

    Args:
        config: of the run.
        tokenizer: of the documents.
        initial: the weights that are read, whose family the run keeps.
        resumed: the checkpoint of a resumed run.

    Raises:
        ValueError: the vocabulary is smaller than the tokenizer's, or the resumed run names another model.
    """
    size = config.model.vocabulary_size
    if size and size < tokenizer.vocabulary_size and config.train.resume != "false":
        raise ValueError(
            f"the documents have changed since the run began: their tokenizer has {tokenizer.vocabulary_size:,} tokens,"
            f" and that of the run {size:,}; restore them, or start a new run with another out="
        )
    if size and size < tokenizer.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={size} is smaller than the tokenizer's {tokenizer.vocabulary_size};"
            " use 0 to take the tokenizer's"
        )
    rows = initial.shape.vocabulary_size if initial is not None else 0  # may exceed the number of tokens
    shape = config.shape_with(size or max(rows, tokenizer.vocabulary_size))
    if resumed is not None:
        saved = saved_shape(resumed)
        check_same_code(config.model.architecture, resumed)
        return replace(shape, family=saved.family, architecture=saved.architecture)
    return replace(shape, family=shape.family or (initial.shape.family if initial is not None else ""))


def device_settings(config: Config, world: World) -> tuple[TrainConfig, list[str]]:
    """Choose dtype, compile and fixed_shape by the device where they are auto; collective.

    Returns:
        `config.train` with these choices, and notes on them for the header of the run.
    """
    train, parallel, on_gpu = config.train, config.parallel, world.device.type == "cuda"
    notes: list[str] = []
    dtype = resolve_dtype(train.dtype, world.device)
    if config.model.architecture and train.compile == "auto":
        train = replace(train, compile="false")
    if train.fixed_shape == "auto":
        # On a CPU, oneDNN compiles half-precision products for each shape, about 12 for a new size of a pack, each in
        # 2 ms and 0.6 MiB, and keeps 1,024 of them. A pack of fixed shape needs a capacity that ranks divide evenly.
        divides = config.plan.longest % parallel.token_multiple == 0
        fixed = (on_gpu or dtype.itemsize < 4) and divides and not config.plan.budget  # else mostly padding
        fixed = fixed and not parallel.context_slack
        train = replace(train, fixed_shape="true" if fixed else "false")
    if train.compile == "auto":
        problem = next(filter(None, world.gather(compiler_problem(world.device))), "") if on_gpu else ""
        notes += [Detail(f"train.compile is false: {problem}")] if problem else []
        wanted = on_gpu and not problem and config.model.kernels != "liger"  # compiled blocks have their own
        train = replace(train, compile="true" if wanted else "false")
    chosen: Any = next(name for name, each in DTYPES.items() if each == dtype)
    return replace(train, dtype=chosen), notes


def resolve(
    config: Config, objective: Objective, shape: ModelShape, packs: int, world: World
) -> tuple[Config, list[str]]:
    """Choose what settings leave to the run: by the device, the initial weights and the kind of documents.

    Returns:
        The configuration with vocabulary, packs of a step and all choices; and notes for the header of the run.
    """
    optimizer, data = config.optimizer, config.data
    train, notes = device_settings(config, world)
    if train.eval_every and data.validation == 0 and not data.validation_sets:
        if train.patience:
            raise ValueError(
                f"train.patience={train.patience} counts evaluations, and data.validation=0 keeps no documents for"
                " them: set data.validation=0.1, or leave train.patience out"
            )
        train = replace(train, eval_every=0)
        notes.append("data.validation=0: there are no evaluations")
    if optimizer.lr < 0:
        lr = objective.fine_tuning_lr if train.init_from else NEW_MODEL_LR
        lr *= ADAPTER_LR_SCALE if config.adapter.name != "none" else 1
        optimizer = replace(optimizer, lr=lr)
        if train.init_from:
            adapted = " with adapters" if config.adapter.name != "none" else ""
            notes.append(
                Detail(
                    f"optimizer.lr is {lr:g}, the default of runs that start from train.init_from{adapted}"
                )
            )
    return (
        replace(
            config,
            model=replace(
                config.model, vocabulary_size=shape.vocabulary_size, scores=shape.scores, family=shape.family
            ),
            adapter=config.adapter.with_head("score") if shape.scores else config.adapter,
            train=replace(train, **objective.train_settings),
            optimizer=optimizer,
            plan=replace(config.plan, packs_per_step=packs, micro_batches=0),
        ),
        notes,
    )


class Feeds:
    """The packs of a run on this rank, of training steps and of evaluations.

    The engine's model must still have its initial weights. `resumed` is the run directory, if the run continues from a
    checkpoint.

    Attributes:
        training: the global steps to train on.
        steps: number of the last step of the run.
        validation: computes the validation loss; None if the run does not evaluate.
        notes: notes for the header of the run.

    Raises:
        ValueError: there are too few documents, no validation targets, or settings that a stream cannot have.
    """

    def __init__(
        self,
        config: Config,
        objective: Objective,
        engine: ModelEngine,
        cost_model: CostModel,
        console: Console,
        clock: Callable[[], float],
        resumed: Path | None = None,
    ) -> None:
        corpus, train = objective.corpus, config.train
        loaders = PackLoaders(config, objective, engine, cost_model)
        with console.progress("computing reference values") as advance:
            views, notes = objective.views(engine, advance, resumed)
        staged = [Detail(corpus.staged)] if corpus.staged else []
        warnings = corpus.arriving.warnings if corpus.arriving else corpus.train.store.warnings
        self.notes = [*staged, *warnings, *notes]
        self.training: EpochFeed | StreamFeed
        self.steps = train.steps
        if corpus.arriving is not None:  # documents are planned as they arrive; there is no plan of an epoch
            pad = config.pack_slots is not None
            self.training = StreamFeed(config, engine.mesh, corpus.arriving, cost_model, clock, pad)
        else:
            loaders.check_ranks(corpus.train, "training")
            sampler = loaders.sampler(corpus.train)
            self.training = EpochFeed(loaders.loader(views[0], sampler), corpus.train, clock)
            self.steps = self.steps or max(1, round(train.epochs * sampler.steps_per_epoch))
        self.validation: Validation | None = None
        if not train.eval_every:
            return
        self.validation = loaders.validation(views[1])
        as_steps = self.validation.steps // 3  # a forward pass is about a third of a step
        if as_steps > train.eval_every > 0:
            self.notes.append(
                f"an evaluation takes about as long as {as_steps:,} steps, and there is one every {train.eval_every}:"
                " train.eval_packs limits it, train.eval_every makes it rarer"
            )

    def close(self) -> None:
        """Stop the threads that collate packs."""
        self.training.close()
        if self.validation is not None:
            self.validation.close()


def build_callbacks(
    config: Config, world: World, run: RunDirectory, micro_batches: int, report: Callable[[str], None]
) -> list[Callback]:
    """The callbacks that settings enable, in the order in which they are called.

    Raises:
        ValueError: a callback does not suit the run, or a tracker's package is missing.
    """
    train, log, track = config.train, config.log, config.track
    callbacks: list[Callback] = []
    if train.profile:
        callbacks.append(Trace(run.path / "trace.json" if world.is_main else None, world.device, report))
    if log.layer_norms:
        callbacks.append(LayerNorms())
    if log.gradient_noise:
        if micro_batches < 2:
            raise ValueError(
                f"log.gradient_noise=true compares a micro-batch with its step, but each rank has {micro_batches} per"
                " step: set plan.packs_per_step to at least twice the number of processes"
            )
        callbacks.append(GradientNoise())
    if train.spike != "off":
        callbacks.append(SpikeGuard(train.spike, train.spike_factor, report))
    if train.ema_decay:
        callbacks.append(MovingAverage(train.ema_decay))
    if train.patience:
        callbacks.append(EarlyStopping(train.patience, train.min_improvement))
    if track.to and track.mode != "disabled":
        world.on_main(lambda: check_trackers(track))
        callbacks.append(Tracking(TrackedRun(track, run.path, asdict(config)), report))
    return callbacks
