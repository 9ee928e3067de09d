"""A run assembled: documents, plan, model, engine and files, ready for the loop.

    config ─▶ corpus ─▶ sampler (plan) ─▶ loader ─▶ feed
       └────▶ shape ──▶ decoder ─▶ optimizer ─▶ engine

Nothing is written before everything is known to fit together.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch

import multipack
from multipack.atomic import write_atomically
from multipack.data.collate import PackedCollator
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.prepare import Corpus, load_corpus
from multipack.data.sampler import PackedBatchSampler
from multipack.models.attention import select
from multipack.models.decoder import Decoder
from multipack.parallel.engine import Engine, build_engine
from multipack.parallel.world import Device, World, hosts
from multipack.planning.cost import CostModel
from multipack.planning.options import LossWeighting
from multipack.reports.console import Console
from multipack.run import RunDirectory, config_yaml, find_run
from multipack.shapes import ModelShape
from multipack.training.calibrate import cost_files, cost_rows, run_cost
from multipack.training.checkpoint import (
    Checkpoint,
    gather_rng,
    load_checkpoint,
    restore_rng,
    save_checkpoint,
)
from multipack.training.feed import Feed
from multipack.training.ledger import NOTHING, Ledger
from multipack.training.metrics import RunningLoss
from multipack.training.optimizer import build_optimizer
from multipack.training.peak import matmul_peak

if TYPE_CHECKING:
    from multipack.config import Config


class NonFiniteLoss(RuntimeError):
    """A loss, gradient or weight is NaN or infinite; the last checkpoint is still good."""


@dataclass
class TrainConfig:
    """The life of a run."""

    steps: int = 0
    """Global steps; 0 = train.epochs passes over the documents."""
    epochs: float = 1.0
    """Passes over the documents, where train.steps is 0."""
    eval_every: int = 50
    """Steps between evaluations with a sample; there is one before the first step and one at the end too. 0 = never."""
    eval_packs: int = 0
    """Most validation packs of an evaluation, rounded up to whole global steps; 0 = all."""
    eval_only: bool = False
    """Evaluate, write a sample and stop."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 = at evaluations. There is one at the end in any case."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept; 0 = all."""
    resume: str = "false"
    """`true` continues the run in out=; a run directory or checkpoint continues that one."""
    loss_weighting: LossWeighting = "token"
    """What the loss is a mean over: every target `token` alike, or every `document` alike (a cut piece is one)."""
    seed: int = 0
    """Of the initial weights, the order of documents, dropout and samples."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of forward passes; auto = bf16 (bfloat16 autocast) where the device computes it natively."""
    device: Device = "auto"
    """Where to train; auto = a GPU if there is one."""
    sample_prompt: str = ""
    """What samples begin with; empty = a prompt from the validation documents."""
    sample_tokens: int = 64
    """Tokens of a sample."""
    sample_temperature: float = 0.8
    """Temperature of samples; 0 = greedy."""
    sample_top_k: int = 50
    """Samples draw from this many likeliest tokens; 0 = all."""
    compare_padding: bool = True
    """At the end, measure what padding would have cost (one process only)."""
    padded_batch_size: int = 8
    """Documents in a batch of the padded training that the run is compared with."""
    fixed_shape: bool = False
    """Fill every pack up to plan.capacity with a padding document, so that all batches have one shape."""
    prefetch: int = 2
    """Packs collated ahead in a background thread; 0 = none."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        counts = ("steps", "eval_every", "eval_packs", "checkpoint_every", "keep_checkpoints", "prefetch")
        for name in (*counts, "sample_temperature", "sample_top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} must not be negative, got {getattr(self, name)}")
        if self.steps == 0 and self.epochs <= 0:
            raise ValueError("set train.steps, or train.epochs above 0")
        # YAML's booleans and an empty word mean what they look like.
        self.resume = {"True": "true", "False": "false", "": "false"}.get(self.resume, self.resume)
        if self.padded_batch_size < 1 or self.sample_tokens < 1:
            raise ValueError("train.padded_batch_size and train.sample_tokens must be at least 1")


@dataclass
class LogConfig:
    """What is printed."""

    every: int = 10
    """Steps between log lines; 0 = none. metrics.jsonl has every step."""
    all_ranks: bool = False
    """Every rank prints, each line with its time and rank."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.every < 0:
            raise ValueError(f"log.every must not be negative, got {self.every}")


@dataclass
class Session:
    """All parts of a run; the loop in trainer.py moves them."""

    config: Config
    world: World
    console: Console
    run: RunDirectory
    corpus: Corpus
    shape: ModelShape
    cost_model: CostModel
    sampler: PackedBatchSampler
    feed: Feed
    validation: PackedLoader | None
    validation_packs: int
    engine: Engine
    steps: int
    peak_flops: float
    clock: Callable[[], float]
    running: RunningLoss
    step: int = 0
    evaluated: int = -1
    ledger: Ledger | None = None
    notes: list[str] = field(default_factory=list)

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Take the run directory and, from a checkpoint, put everything where it was.

        Whatever can be wrong is found before anything is changed. Evaluating a saved run changes nothing of it.
        """
        train = self.config.train
        only_looks = train.eval_only and train.resume != "false"
        if checkpoint is not None:
            self._check_same_documents(checkpoint)
            self.engine.load_state(checkpoint.tensors)
            self.feed.load_state_dict(checkpoint.progress["data"])
            self.step, self.evaluated = checkpoint.step, checkpoint.progress["evaluated"]
            self.running = RunningLoss(*checkpoint.progress["running"])
            self.notes += self.running.weigh(train.loss_weighting)
            if not restore_rng(self.world, checkpoint.rng):
                self.notes.append(
                    "some ranks are new: their dropout starts from the seed, not from the checkpoint"
                )
            self._note_rounding(checkpoint.progress)
        if not only_looks:
            self.world.on_main(lambda: self._take_files(checkpoint))

    def _take_files(self, checkpoint: Checkpoint | None) -> None:
        if self.config.train.resume == "false":
            self.run.create(self._saved_config())
        for name, text in cost_files(self.cost_model).items():
            write_atomically(self.run.path / name, text.encode())
        self.ledger = Ledger(self.run)
        if self.config.train.resume == "false":
            return
        marks = checkpoint.progress["marks"] if checkpoint else {"metrics": NOTHING, "samples": NOTHING}
        self.ledger.check(marks)
        self.ledger.cut(marks)
        write_atomically(self.run.config, self._saved_config().encode())
        if checkpoint is not None:
            self.run.point_to(checkpoint.path)

    def _check_same_documents(self, checkpoint: Checkpoint) -> None:
        saved, own = checkpoint.progress["corpus"], self._corpus_hashes()
        for what, digest in own.items():
            if saved[what] != digest:
                raise ValueError(
                    f"the run was trained on other {what} (hash {saved[what][:12]}, now {digest[:12]});"
                    " go on with the same ones, or start a new run with another out="
                )

    def _corpus_hashes(self) -> dict[str, str]:
        return {"documents": self.corpus.train.fingerprint, "tokens": self.corpus.tokenizer.hash}

    def _note_rounding(self, before: dict[str, Any]) -> None:
        if (before["world_size"], before["threads"]) != (self.world.size, torch.get_num_threads()):
            self.notes.append(
                f"the checkpoint was written by {before['world_size']} processes of {before['threads']} threads:"
                " the same documents follow, but sums round differently"
            )

    def look_again_at_peak(self) -> None:
        """Measure the matmul peak once more and keep the higher: beside other work it comes out too low."""
        if self.world.device.type == "cpu":
            dtype = resolve_dtype(self.config.train.dtype, self.world.device)
            self.peak_flops = max(self.peak_flops, _peak(self.world, dtype, seconds=0.1))

    def close(self) -> None:
        """Stop the loader's thread and close files."""
        self.feed.close()
        if self.validation is not None:
            self.validation.close()
        if self.ledger is not None:
            self.ledger.close()

    def save(self) -> str:
        """Write a checkpoint; every rank takes part. Returns its path.

        Raises:
            NonFiniteLoss: the weights are not finite; nothing was written.
        """
        state, rng = self.engine.state(), gather_rng(self.world)
        broken = sum(not bool(torch.isfinite(tensor).all()) for tensor in state["model"].values())
        if self.world.sum([float(broken)])[0]:
            self.diverged(f"after step {self.step} {broken} weight tensors are not finite", [])

        def write() -> str:
            assert self.ledger is not None
            progress = {
                "data": self.feed.state_dict(),
                "running": list(astuple(self.running)),
                "evaluated": self.evaluated,
                "marks": self.ledger.marks(),
                "corpus": self._corpus_hashes(),
                "world_size": self.world.size,
                "threads": torch.get_num_threads(),
            }
            files = {"config.yaml": self._saved_config(), "tokenizer.json": self.corpus.tokenizer.to_json()}
            files |= cost_files(self.cost_model)
            keep = self.config.train.keep_checkpoints
            return str(save_checkpoint(self.run, self.step, state, progress, rng, files, keep))

        return self.world.on_main(write)

    def diverged(self, what: str, documents: list[int]) -> NoReturn:
        """Raise NonFiniteLoss, naming documents and the checkpoint that is still good."""
        names = [f"{number} ({self.corpus.train.names(number)})" for number in documents[:20]]
        more = f" and {len(documents) - 20} more" if len(documents) > 20 else ""
        of = f" Its documents: {', '.join(names)}{more}." if names else ""
        kept = (
            self.run.latest.read_text(encoding="utf-8").strip()
            if self.run.latest.is_file()
            else "none so far"
        )
        raise NonFiniteLoss(
            f"{what}.{of} Last good checkpoint: {kept}. Lower optimizer.lr (now {self.config.optimizer.lr:g})"
            + (", or look at these documents" if names else "")
        )

    def _saved_config(self) -> str:
        """The configuration that starts such a run again: anew, in a directory of its own."""
        train = replace(self.config.train, resume="false", eval_only=False)
        return config_yaml(replace(self.config, train=train, out=""))


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
    limit = plan.capacity // plan.align * plan.align
    if config.model.positions == "learned":
        limit = min(limit, config.model.context)
    with console.progress("reading documents") as advance:
        corpus = load_corpus(config.data, config.tokenizer, limit=limit, progress=_reading(advance))
    if config.train.sample_prompt and not corpus.tokenizer.encode(config.train.sample_prompt):
        raise ValueError(f"train.sample_prompt={config.train.sample_prompt!r} has no tokens")
    shape = _shape(config, corpus)
    dtype = resolve_dtype(config.train.dtype, world.device)
    config = replace(
        config,
        model=replace(config.model, vocabulary_size=shape.vocabulary_size),
        train=replace(config.train, dtype="bf16" if dtype == torch.bfloat16 else "fp32"),
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
        peak_flops=_peak(world, dtype),
        clock=clock,
        running=RunningLoss(loss_weighting=config.train.loss_weighting),
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


def _shape(config: Config, corpus: Corpus) -> ModelShape:
    values = config.model.to_dict()
    values.pop("attention")
    size, tokenizer = config.model.vocabulary_size, corpus.tokenizer
    if size and size < tokenizer.vocabulary_size:
        raise ValueError(
            f"model.vocabulary_size={size} is smaller than the tokenizer's {tokenizer.vocabulary_size};"
            " use 0 to take the tokenizer's"
        )
    return ModelShape(**{**values, "vocabulary_size": size or tokenizer.vocabulary_size})


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of forward passes: `auto` is bf16 where the device has instructions for it."""
    if name != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # torch has no public word for it; where the private one is missing, fp32 is right everywhere.
        asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        native = any(getattr(torch.cpu, name, lambda: False)() for name in asks)
    return torch.bfloat16 if native else torch.float32


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


def _peak(world: World, dtype: torch.dtype, seconds: float = 0.4) -> float:
    """Mean over ranks of the matmul peak, measured at the same time: ranks on one CPU share it."""
    world.barrier()
    return world.sum([matmul_peak(world.device, dtype, seconds)])[0] / world.size


def header_rows(session: Session) -> list[tuple[str, str]]:
    """The run header: what anyone would ask of a log a month later."""
    world, config, shape = session.world, session.config, session.shape
    parameters = list(session.engine.state()["model"].values())
    decayed = [parameter.numel() for parameter in parameters if parameter.dim() >= 2]
    others = [parameter.numel() for parameter in parameters if parameter.dim() < 2]
    threads = torch.get_num_threads()
    cpu = f"{threads} thread{'s' if threads > 1 else ''}"
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else cpu
    family = "Llama" if shape.positions == "rope" else "GPT-2"
    return [
        ("device", f"{world.device} ({name})"),
        ("backend", f"{world.backend}, {config.parallel.data}, attention {_attention_row(session)}"),
        ("world size", f"{world.size} process{'es' if world.size > 1 else ''}"),
        ("hosts", ", ".join(hosts(world))),
        ("launcher", f"{world.launcher}: {world.command}"),
        (
            "versions",
            f"multipack {multipack.__version__}, Python {platform.python_version()}, torch {torch.__version__},"
            f" numpy {np.__version__}",
        ),
        (
            "model",
            f"{family} style, {shape.layers} layers, width {shape.d_model}, {shape.heads} heads"
            f" ({shape.kv_heads} kv), feed-forward {shape.d_ff}, vocabulary {shape.vocabulary_size:,}",
        ),
        ("parameters", f"{sum(decayed) + sum(others):,} ({config.train.dtype})"),
        (
            "optimizer",
            f"AdamW, lr {config.optimizer.lr:g}; decayed: {len(decayed)} tensors, {sum(decayed):,} parameters;"
            f" not decayed: {len(others)} tensors, {sum(others):,}",
        ),
        *cost_rows(session.cost_model),
        ("seed", str(config.train.seed)),
        ("corpus", session.corpus.description),
        ("corpus hash", session.corpus.corpus_hash[:16]),
        (
            "tokenizer",
            f"{session.corpus.tokenizer.vocabulary_size:,} tokens, hash {session.corpus.tokenizer.hash[:16]}",
        ),
        ("run directory", str(session.run.path)),
    ]


def _attention_row(session: Session) -> str:
    """The attention backend in effect, `auto` resolved."""
    shape, device = session.shape, session.world.device
    dtype = torch.bfloat16 if session.config.train.dtype == "bf16" else torch.float32
    q = torch.empty(1, shape.heads, shape.head_width, device=device, dtype=dtype, requires_grad=True)
    kv = torch.empty(1, shape.kv_heads, shape.head_width, device=device, dtype=dtype)
    return select(session.config.model.attention, q, kv, kv).name
