"""Builds the parts of a run, phase by phase; training and evaluation share the phases.

    settings ─▶ Opening: ranks, run directory, checkpoint ─▶ documents
             ─▶ Start: shape and first weights ─▶ OpenModel: resolved settings, objective, engine
             ─▶ Feeds: packs of steps and evaluations ─▶ callbacks, files ─▶ Parts

A phase returns an object; its `notes` are for the header of the run. Settings are resolved once, by
`open_model`, and the phases after it read its `config`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from multipack.data.text.tokenizer import Tokenizer, load_tokenizer
from multipack.data.text.vocabularies import read_text
from multipack.data.views.corpus import Corpus, load_corpus
from multipack.hub import model_folder
from multipack.parallel.engine import Engine
from multipack.parallel.joining import connected
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.stages import fit_micro_batches
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import PLANNING, Console, Detail
from multipack.run import RunDirectory, find_run, unused_folder
from multipack.shapes import ModelShape
from multipack.training.blueprint import open_engine
from multipack.training.callbacks.callback import Callback
from multipack.training.checkpoint import Checkpoint, load_checkpoint
from multipack.training.feed import EpochFeed, Feed, PackLoaders, Validation
from multipack.training.objective import Objective
from multipack.training.precision import DTYPES, deterministic, exact_float32, resolve_dtype
from multipack.training.run_config import Config, saved_shape
from multipack.training.run_files import RunFiles
from multipack.training.settings import ADAPTER_LR_SCALE, NEW_MODEL_LR, TrainConfig

if TYPE_CHECKING:
    from multipack.training.weights import Reader, TrainedWeights


@dataclass(frozen=True)
class Opening:
    """The place of a run: its directory and its ranks.

    Attributes:
        config: the settings, with `out` and `data.template_date`, equal on all ranks.
        run: the run directory.
        resumed: the checkpoint that the run resumes from; None = none was written.
        mesh: the ranks.
    """

    config: Config
    run: RunDirectory
    resumed: Checkpoint | None
    mesh: Mesh


@dataclass(frozen=True)
class Start:
    """The model that a run starts with.

    Attributes:
        shape: shape of the model to train.
        weights: name of a parameter → its first value, or the frozen one below adapters; None = weights are
            drawn, or in the checkpoint.
        folder: the checkpoint or folder whose `source_files` and chat template the run keeps; None = none.
        base_hash: hash of the files of frozen weights of adapters; empty without adapters.
        notes: for the header of the run.
    """

    shape: ModelShape
    weights: Reader | None
    folder: Path | None
    base_hash: str
    notes: list[str]


@dataclass(frozen=True)
class OpenModel:
    """A model that is ready to be trained or evaluated.

    Attributes:
        config: the settings, resolved.
        objective: the objective, with the documents.
        shape: shape of the model.
        cost_model: cost of documents, which plans balance, and FLOPs of steps.
        engine: this rank's part of the model.
        notes: for the header of the run.
    """

    config: Config
    objective: Objective
    shape: ModelShape
    cost_model: CostModel
    engine: Engine
    notes: list[str]


@dataclass(frozen=True)
class Parts:
    """All parts of a run, for `Trainer`; nothing was written yet.

    Attributes:
        opening: ranks, run directory, checkpoint.
        model: settings, objective and engine.
        feeds: packs of steps and of evaluations.
        callbacks: in the order in which they are called.
        files: writes the files of the run.
        notes: notes of all phases, for the header of the run.
    """

    opening: Opening
    model: OpenModel
    feeds: Feeds
    callbacks: list[Callback]
    files: RunFiles
    notes: list[str]


def assemble(config: Config, world: World, console: Console, clock: Callable[[], float]) -> Parts:
    """Build all parts of a run; collective. `clock` returns seconds.

    Raises:
        ValueError: the configuration does not fit the documents, the device or the saved run.
        FileExistsError: the run directory holds another run.
    """
    opening = open_run(config, world)
    config, mesh, resumed = opening.config, opening.mesh, opening.resumed
    corpus = read_documents(config, mesh, console)
    start = find_start(config, corpus, resumed, world)
    model = open_model(config, corpus, start, mesh)
    config, engine = model.config, model.engine
    with console.notice(PLANNING):
        feeds = Feeds(model, console, clock, opening.run.path if resumed is not None else None)
    # From here on ranks draw their own random numbers (dropout), each from a reproducible stream.
    torch.manual_seed(int(np.random.SeedSequence([config.train.seed, world.rank]).generate_state(1)[0]))
    callbacks = build_callbacks(config, world, opening.run, console.line)
    source, template, foreign = dict[str, str](), corpus.chat_template, config.model.architecture
    if start.folder is not None:
        from multipack.training.source_files import chat_template_of, source_files

        source = source_files(start.folder, corpus.tokenizer)
        template = template or chat_template_of(start.folder)
    if foreign:  # what `model=` names, not `train.init_from`
        source["config.json"] = read_text(Path(model.shape.architecture) / "config.json")
    files = RunFiles(opening.run, world, config, corpus, template, source, console.line)
    notes = [*model.notes, *_outside_template(config, corpus, template), *start.notes]
    if config.train.eval_every and config.train.sample_tokens and not (engine.is_whole or foreign):
        notes.append("no samples, because no rank holds the whole model: use `multipack generate RUN`")
    return Parts(opening, model, feeds, callbacks, files, [*notes, *feeds.notes])


def _outside_template(config: Config, corpus: Corpus, template: str) -> list[str]:
    """A note if prompts and answers are text, though the initial weights or the tokenizer have a chat template."""
    documents = corpus.train if len(corpus.train) else corpus.validation
    if corpus.chat_template or config.data.source == "stdlib" or not len(documents):
        return []
    if not (documents.size > 1 or documents.prompt_length(0)):
        return []
    if not template and (not config.tokenizer.path or not load_tokenizer(config.tokenizer).chat_template):
        return []
    where = "when the store is prepared" if config.data.source in ("store", "mixture") else "here"
    return [
        "prompts and answers are trained as text, outside of the chat template that the weights or the tokenizer have:"
        f" data.as_chat=true {where} writes them as turns of it"
    ]


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
            from multipack.models.compile import keep_compiled_code_private

            keep_compiled_code_private()
        yield world


def open_run(config: Config, world: World) -> Opening:
    """Find the run directory, the checkpoint that the run resumes from, and the mesh of ranks; collective.

    Raises:
        FileExistsError: the directory of a new run is not empty.
        ValueError: the checkpoint is damaged, or all are missing.
    """
    out = world.from_main(config.out or str(unused_folder()))
    day = world.from_main(config.data.dated().template_date)  # ranks may begin on both sides of midnight
    config = replace(config, out=out, data=replace(config.data, template_date=day))
    run, checkpoint = _find_run(config, world)
    return Opening(config, run, checkpoint, build_mesh(config.parallel, world))


def _find_run(config: Config, world: World) -> tuple[RunDirectory, Checkpoint | None]:
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
    if parallel.tensor > 1:
        hosts = mesh.world.gather(socket.gethostname())
        first = mesh.world.rank - mesh.coordinate("tp")
        if len(set(hosts[first : first + parallel.tensor])) > 1:
            notes.append(
                f"parallel.tensor={parallel.tensor} spans several hosts: its ranks communicate in every layer, for"
                " which only links within a host are fast enough"
            )
    return packs, notes


def opens_documents(config: Config, mesh: Mesh) -> bool:
    """Whether this rank reads tokens from storage: with `data.readers` only some do."""
    if not config.data.readers:
        return True
    from multipack.parallel.readers import opens_tokens

    return opens_tokens(mesh, config.data.readers)


def read_documents(config: Config, mesh: Mesh, console: Console) -> Corpus:
    """The documents of the run; tokenized first, if necessary.

    Raises:
        ValueError: see `load_corpus`; or the prompt of samples has no tokens.
    """
    reads = opens_documents(config, mesh)
    with console.progress("reading documents") as advance:
        corpus = load_corpus(
            config.data,
            config.tokenizer,
            limit=config.document_limit,
            progress=advance,
            reads=reads,
        )
    prompt = config.train.sample_prompt
    if prompt and not corpus.tokenizer.encode(prompt):
        raise ValueError(f"train.sample_prompt={prompt!r} has no tokens")
    return corpus


def find_start(config: Config, corpus: Corpus, resumed: Checkpoint | None, world: World) -> Start:
    """Find the weights that a run starts with, and check its model; collective.

    Raises:
        ValueError: weights or model do not suit the documents, the settings or the saved run.
    """
    setting, path, base_hash = "train.init_from", config.train.init_from if resumed is None else "", ""
    if config.adapter.name != "none":  # frozen weights are in no checkpoint
        from multipack.training.frozen_files import check_base

        setting, path = "adapter.base", config.adapter.base
        base_hash = check_base(config.adapter, world)
    foreign, checkpoint = bool(config.model.architecture), resumed.path if resumed else None
    initial: TrainedWeights | None = None
    if path:
        from multipack.training.weights import adapt_weights, find_weights

        initial = find_weights(model_folder(path, setting), world=world, foreign=foreign)
    objective, tokenizer = objective_of(config, corpus), corpus.tokenizer
    shape = objective.shape(shape_of(config, tokenizer, initial, checkpoint))
    folder, notes = checkpoint, list[str]()
    weights: Reader | None = None
    if initial is not None:
        objective.shape(initial.shape)  # for its error: weights that do not suit the objective
        weights, note = adapt_weights(initial, shape, tokenizer)
        folder, notes = folder or initial.folder, [note] if resumed is None else []
    if foreign:
        from multipack.models.foreign import open_foreign
        from multipack.training.foreign_checks import FOREIGN_NOTES, check_corpus, check_isolated

        folder = folder or Path(config.model.architecture)
        check_corpus(shape, corpus)
        world.on_main(lambda: check_isolated(shape, world.device, config.data.share_prefixes != "off"))
        notes += FOREIGN_NOTES
        if initial is None and resumed is None:
            weights = open_foreign(shape, config.train.seed)
    return Start(shape, weights, folder, base_hash, notes)


def open_model(config: Config, corpus: Corpus, start: Start, mesh: Mesh) -> OpenModel:
    """Resolve the settings, and open the engine of the model that they describe; collective.

    Raises:
        ValueError: settings do not suit the documents, the device or the ranks.
    """
    # Again, now that the vocabulary is known: tensor parallelism divides it.
    config.parallel.check(
        start.shape, mesh.world.size, config.plan.capacity, resumed=config.train.resume != "false"
    )
    packs, notes = packs_per_step(config, mesh)
    config = replace(config, adapter=replace(config.adapter, base_hash=start.base_hash))
    config, chosen = resolve(config, objective_of(config, corpus), start.shape, packs, mesh.world)
    objective, dtype = objective_of(config, corpus), DTYPES[config.train.dtype]
    engine = open_engine(config, objective, start.shape, start.weights, mesh, dtype)
    cost_model = CostModel.from_shape(start.shape, adapter=config.adapter)
    return OpenModel(config, objective, start.shape, cost_model, engine, notes + chosen)


def objective_of(config: Config, corpus: Corpus) -> Objective:
    """`Preferences` if the documents are pairs, else next-token prediction."""
    if corpus.arriving is not None or corpus.train.size == 1:
        return Objective(config, corpus)
    from multipack.training.preferences import Preferences

    return Preferences(config, corpus)


def shape_of(
    config: Config,
    tokenizer: Tokenizer,
    initial: TrainedWeights | None = None,
    resumed: Path | None = None,
) -> ModelShape:
    """The decoder's shape with its vocabulary.

    A resumed run keeps the family of its checkpoint. A model of transformers is built from the checkpoint's
    config.json, because its folder may have changed. The family is the one of the `initial` weights, if there are any.

    Raises:
        ValueError: the vocabulary is smaller than the tokenizer's, or the resumed run names another model.
    """
    size = config.model.vocabulary_size
    if size and size < tokenizer.vocabulary_size:
        changed = "restore the documents of the run, or start a new one with another out="
        mend = "use 0 to take the tokenizer's" if config.train.resume == "false" else changed
        raise ValueError(
            f"model.vocabulary_size={size} is smaller than the tokenizer's {tokenizer.vocabulary_size}: {mend}"
        )
    rows = initial.shape.vocabulary_size if initial is not None else 0  # may exceed the number of tokens
    shape = config.shape_with(size or max(rows, tokenizer.vocabulary_size))
    if resumed is not None:
        saved = saved_shape(resumed)
        if saved.architecture:
            from multipack.training.foreign_checks import check_same_code

            check_same_code(config.model.architecture, resumed)
        return replace(shape, family=saved.family, architecture=saved.architecture)
    return replace(shape, family=shape.family or (initial.shape.family if initial is not None else ""))


def device_settings(config: Config, world: World) -> tuple[TrainConfig, list[str]]:
    """Choose dtype, compile and fixed_shape by the device where they are auto; collective.

    Returns:
        `config.train` with these choices, and notes on them for the header of the run.
    """
    on_gpu = world.device.type == "cuda"
    notes: list[str] = []
    train = replace(config.train, dtype=resolve_dtype(config.train.dtype, world.device))
    if config.model.architecture and train.compile == "auto":
        train = replace(train, compile="false")
    if train.fixed_shape == "auto":
        # On a CPU, oneDNN compiles half-precision products for each shape, about 12 for a new size of a pack, each in
        # 2 ms and 0.6 MiB, and keeps 1,024 of them. Beside plan.budget, the mean of packs, a fixed shape would be
        # mostly padding.
        fixed = (on_gpu or train.dtype != "fp32") and not config.plan.budget
        train = replace(train, fixed_shape="true" if fixed else "false")
    if train.compile == "auto":
        problem = ""
        if on_gpu:
            from multipack.models.compile import compiler_problem

            problem = next(filter(None, world.gather(compiler_problem(world.device))), "")
        notes += [Detail(f"train.compile is false: {problem}")] if problem else []
        wanted = on_gpu and not problem and config.model.kernels != "liger"  # compiled blocks have their own
        train = replace(train, compile="true" if wanted else "false")
    return train, notes


def resolve(
    config: Config, objective: Objective, shape: ModelShape, packs: int, world: World
) -> tuple[Config, list[str]]:
    """Resolve settings by the device, the initial weights and the kind of documents.

    Returns:
        The configuration with vocabulary, packs of a step and all choices, and notes for the header of the run.
    """
    optimizer, data = config.optimizer, config.data
    train, notes = device_settings(config, world)
    if train.eval_every and data.validation == 0 and not data.validation_sets:
        train = replace(train, eval_every=0)
        notes.append("data.validation=0: there are no evaluations")
    if optimizer.lr < 0:
        lr = objective.fine_tuning_lr if train.init_from else NEW_MODEL_LR
        lr *= ADAPTER_LR_SCALE if config.adapter.name != "none" else 1
        optimizer = replace(optimizer, lr=lr)
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

    The engine's model must still have its initial weights: the objective may compute reference values.
    `resumed` is the run directory, if the run continues from a checkpoint; `clock` returns seconds.

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
        model: OpenModel,
        console: Console,
        clock: Callable[[], float],
        resumed: Path | None = None,
    ) -> None:
        config, objective, engine, cost_model = model.config, model.objective, model.engine, model.cost_model
        corpus, train = objective.corpus, config.train
        loaders = PackLoaders(config, objective, engine, cost_model)
        with console.progress("computing reference values") as advance:
            views, notes = objective.views(engine, advance, resumed)
        staged = [Detail(corpus.staged)] if corpus.staged else []
        warnings = corpus.arriving.warnings if corpus.arriving else corpus.train.store.warnings
        self.notes = [*staged, *warnings, *notes]
        self.training: Feed
        self.steps = train.steps  # 0 = as many as `train.epochs` has, except for a stream
        if corpus.arriving is not None:  # documents are planned as they arrive; there is no plan of an epoch
            from multipack.training.stream_feed import StreamFeed

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
    config: Config, world: World, run: RunDirectory, report: Callable[[str], None]
) -> list[Callback]:
    """The callbacks that settings enable, in the order of their calls; only their files are imported.

    Raises:
        ValueError: a tracker's package is missing.
    """
    train, log, track = config.train, config.log, config.track
    callbacks: list[Callback] = []
    trace = run.path / "trace.json"
    if train.profile and world.is_main and not trace.exists():  # a resumed run keeps its earlier trace
        from multipack.training.callbacks.profiler import Trace

        callbacks.append(Trace(trace, world.device, report))
    if log.gradient_noise:
        from multipack.training.callbacks.gradient_noise import GradientNoise

        callbacks.append(GradientNoise())
    if train.spike != "off":
        from multipack.training.callbacks.spikes import SpikeGuard

        callbacks.append(SpikeGuard(train.spike, report))
    if train.patience:
        from multipack.training.callbacks.early_stopping import EarlyStopping

        callbacks.append(EarlyStopping(train.patience))
    if track.to and track.mode != "disabled":
        from multipack.training.callbacks.trackers import TrackedRun, Tracking, check_trackers

        world.on_main(lambda: check_trackers(track))
        callbacks.append(Tracking(TrackedRun(track, run.path, asdict(config)), report))
    return callbacks
