"""A run's parts in one place, how they are saved, and how they are put back where a checkpoint has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from multipack.atomic import write_atomically
from multipack.data.corpus import Corpus
from multipack.data.loader import PackedLoader
from multipack.data.shard import CHAT_TEMPLATE
from multipack.parallel.engine import ModelEngine
from multipack.parallel.state import local
from multipack.parallel.world import World
from multipack.planning.cost import CostModel
from multipack.reports.console import Console
from multipack.run import RunDirectory, config_yaml
from multipack.shapes import ModelShape
from multipack.training.calibrate import cost_files
from multipack.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Content,
    name_of,
    restore_rng,
)
from multipack.training.feed import Steps
from multipack.training.metrics import Prediction, RunningLoss
from multipack.training.objective import Objective
from multipack.training.observer import Observers, RunStopped
from multipack.training.precision import mean_peak, resolve_dtype
from multipack.training.run_log import RunLog

if TYPE_CHECKING:
    from multipack.training.run_config import Config


class NonFiniteLoss(RunStopped):
    """A loss, gradient or weight is NaN or infinite; the last checkpoint is still good."""


@dataclass
class Session:
    """All parts of a run; the loop in trainer.py moves them.

    Attributes:
        steps: the last step of the run.
        step: steps taken.
        lr_factor: what `optimizer.lr_scaling` multiplies the learning rate by.
        targets_per_step: mean targets of a step when the run began, which that follows from.
        evaluated: the step of the last evaluation.
        best: the lowest validation loss so far, and
        best_step: the step of it; -1 = not known.
        ending: why the loop stops before its last step; empty while it goes on.
        chat_template: that the weights are to be talked to with, as JSON; empty = none.
        interrupted: whether that is a signal, as all ranks have agreed: a rank's own signal may come at any moment.
        writer: of checkpoints.
    """

    config: Config
    world: World
    console: Console
    run: RunDirectory
    corpus: Corpus
    shape: ModelShape
    cost_model: CostModel
    objective: Objective
    feed: Steps
    validation: PackedLoader | None
    validation_packs: int
    engine: ModelEngine
    steps: int
    peak_flops: float
    clock: Callable[[], float]
    running: RunningLoss
    observers: Observers
    prediction: Prediction = field(default_factory=Prediction)
    lr_factor: float = 1.0
    targets_per_step: float = 0.0
    step: int = 0
    evaluated: int = -1
    best: float | None = None
    best_step: int = -1
    ending: str = ""
    interrupted: bool = False
    chat_template: str = ""
    ledger: RunLog | None = None
    notes: list[str] = field(default_factory=list)
    writer: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is written so far."""
        train, seconds = self.config.train, self.config.parallel.timeout_seconds
        self.writer = CheckpointWriter(
            self.run, self.world, train.keep_checkpoints, train.checkpoint_async, seconds
        )

    @property
    def predicts(self) -> bool:
        """Whether a rank takes as long as the cost predicts, which is of ranks that hold the whole model."""
        return self.config.parallel.model_ranks == 1

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Take the run directory and, from a checkpoint, put everything where it was.

        Whatever can be wrong is found before anything is changed. Evaluating a saved run changes nothing of it.
        """
        train = self.config.train
        only_looks = train.eval_only and train.resume != "false"
        if checkpoint is not None:
            self._check_same_documents(checkpoint)
            self.engine.load_state(checkpoint.source)
            self.feed.load_state_dict(checkpoint.progress["data"])
            self.step, self.evaluated = checkpoint.step, checkpoint.progress["evaluated"]
            self.best = checkpoint.progress.get("best")
            self.best_step = checkpoint.progress.get("best_step", -1)
            self.running = RunningLoss(*checkpoint.progress["running"])
            self.observers.load_state(checkpoint.progress.get("observers", {}))
            self.observers.load_tensors(checkpoint.source, self.engine)
            self.notes += self.running.weigh(train.loss_weighting)
            if not restore_rng(self.world, checkpoint.source):
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
        self.ledger = RunLog(self.run)
        if self.config.train.resume == "false":
            return
        self.ledger.cut(checkpoint.progress["marks"] if checkpoint else None)
        write_atomically(self.run.config, self._saved_config().encode())
        if checkpoint is not None:
            self.run.point_to(checkpoint.path)
            self._point_to_best()

    def _point_to_best(self) -> None:
        """Let `best` name the checkpoint that was best so far, and none of a course that is abandoned."""
        best = self.run.checkpoints / name_of(self.best_step)
        if best.is_dir():
            self.run.point_to(best, self.run.best)
        elif self.best_step >= 0:
            self.run.best.unlink(missing_ok=True)

    def _check_same_documents(self, checkpoint: Checkpoint) -> None:
        saved, own = checkpoint.progress["corpus"], self._corpus_hashes()
        for what, digest in own.items():
            if saved[what] != digest:
                raise ValueError(
                    f"the run was trained on other {what} (hash {saved[what][:12]}, now {digest[:12]});"
                    " go on with the same ones, or start a new run with another out="
                )

    def _corpus_hashes(self) -> dict[str, str]:
        documents = self.corpus.arriving or self.corpus.train
        return {"documents": documents.fingerprint, "tokens": self.corpus.tokenizer.hash}

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
            self.peak_flops = max(self.peak_flops, mean_peak(self.world, dtype, seconds=0.1))

    def close(self, failed: bool = False) -> None:
        """Stop the loader's thread, observers, and close files; a checkpoint in the background is waited for.

        Raises:
            ValueError: on every rank: that checkpoint could not be written. After a failure it is told instead, because
                other ranks may not be there to agree.
        """
        try:
            if not failed:
                self.writer.wait()
            elif told := self.writer.abandon():
                self.console.line(told)
        finally:
            self.observers.close(failed)
            self.feed.close()
            if self.validation is not None:
                self.validation.close()
            if self.ledger is not None:
                self.ledger.close()

    def improve(self, val_loss: float) -> bool:
        """Whether a validation loss is the lowest so far; it is remembered."""
        better = self.best is None or val_loss < self.best
        if better:
            self.best, self.best_step = val_loss, self.step
        return better

    def save(self) -> str:
        """Write a checkpoint; every rank takes part. Returns its path.

        `checkpoints/best` names it if the evaluation at this step was the best so far. With `train.checkpoint_async` it
        is written in the background, but for the last one.

        Raises:
            NonFiniteLoss: the weights are not finite; nothing was written.
            ValueError: this checkpoint, or the one before it in the background, could not be written.
        """
        state = self.engine.state()
        state["observers"] = self.observers.tensors()
        broken = [
            name for name, tensor in state["model"].items() if not bool(torch.isfinite(local(tensor)).all())
        ]
        everywhere = sorted(
            {name for text in self.world.gather(json.dumps(broken)) for name in json.loads(text)}
        )
        if everywhere:
            count, first = len(everywhere), ", ".join(everywhere[:3])
            self.diverged(f"after step {self.step} {count} weight tensors are not finite ({first})", [])
        progress, files = dict[str, Any](), dict[str, str]()

        def describe() -> None:
            progress.update(self._progress())
            files.update(self._files())

        self.world.on_main(describe)
        best = self.best_step == self.step
        path = self.writer.save(Content(self.step, state, progress, files, best))
        if self.step >= self.steps or self.ending:
            self.writer.wait()
        return str(path)

    def _progress(self) -> dict[str, Any]:
        """Where the run stands, as plain values."""
        assert self.ledger is not None
        return {
            "data": self.feed.state_dict(),
            "running": list(astuple(self.running)),
            "evaluated": self.evaluated,
            "best": self.best,
            "best_step": self.best_step,
            "observers": self.observers.state(),
            "marks": self.ledger.marks(),
            "corpus": self._corpus_hashes(),
            "world_size": self.world.size,
            "threads": torch.get_num_threads(),
        }

    def _files(self) -> dict[str, str]:
        """Texts that a checkpoint holds."""
        files = {"config.yaml": self._saved_config(), "tokenizer.json": self.corpus.tokenizer.to_json()}
        files |= cost_files(self.cost_model)
        if self.chat_template:
            files[CHAT_TEMPLATE] = self.chat_template
        return files

    def diverged(self, what: str, documents: list[int]) -> NoReturn:
        """Raise NonFiniteLoss, naming documents."""
        names = [f"{number} ({self.feed.names(number)})" for number in documents[:20]]
        more = f" and {len(documents) - 20} more" if len(documents) > 20 else ""
        of = f" Its documents: {', '.join(names)}{more}." if names else ""
        raise NonFiniteLoss(
            f"{what}.{of} Lower optimizer.lr (now {self.config.optimizer.lr:g})"
            + (", or look at these documents" if names else "")
        )

    def last_checkpoint(self) -> str:
        """The newest complete checkpoint, for people."""
        return str(self.run.latest_checkpoint()) if self.run.latest.is_file() else "none so far"

    def _saved_config(self) -> str:
        """The configuration that starts such a run again: anew, in a directory of its own."""
        train = replace(self.config.train, resume="false", eval_only=False)
        return config_yaml(replace(self.config, train=train, out=""))
