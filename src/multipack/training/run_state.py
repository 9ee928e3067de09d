"""The state of a run: its progress, how it is saved, and how it is restored from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from typing import Any, NoReturn

import torch

from multipack.atomic import write_atomically
from multipack.data.shards import CHAT_TEMPLATE
from multipack.parallel.state import local
from multipack.run import config_yaml
from multipack.training.callbacks.callback import RunStopped
from multipack.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Content,
    name_of,
    restore_rng,
)
from multipack.training.metrics import RunningLoss
from multipack.training.run_cost import cost_files
from multipack.training.run_log import RunLog
from multipack.training.run_parts import RunParts


class NonFiniteLoss(RunStopped):
    """A loss, gradient or weight is NaN or infinite; the last checkpoint is valid."""


class RunState(RunParts):
    """The parts of a run, and its progress. Takes the run directory and restores the checkpoint on creation.

    Errors are found before anything is changed. Evaluating a saved run changes nothing of it.

    Args:
        config, world, console, clock: see `RunParts`.

    Attributes:
        step: steps taken.
        saved: the step of the last checkpoint; -1 = none.
        evaluated: the step of the last evaluation; -1 = none.
        val_loss: validation loss of this process's last evaluation.
        best, best_step: the lowest validation loss so far, and its step; -1 = unknown.
        running: loss since the last evaluation.
        ending: why the loop stops before its last step; empty while it continues.
        interrupted: all ranks have agreed to stop because one received a signal.
        log: append-only files of records and samples; on rank 0 only.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        train = self.config.train
        self.step, self.saved, self.evaluated, self.best_step = 0, -1, -1, -1
        self.val_loss: float | None = None
        self.best: float | None = None
        self.running = RunningLoss(loss_weighting=train.loss_weighting)
        self.ending, self.interrupted = "", False
        self.log: RunLog | None = None
        self.writer = CheckpointWriter(
            self.run,
            self.world,
            train.keep_checkpoints,
            train.checkpoint_async,
            self.config.parallel.timeout_seconds,
        )
        if self.resumed is not None:
            self._restore(self.resumed)
        if not (train.eval_only and train.resume != "false"):
            self.world.on_main(self._open_files)

    def save(self) -> str:
        """Write a checkpoint; collective. Returns its path.

        `checkpoints/best` names it if the evaluation at this step was the best so far. With `train.checkpoint_async` it
        is written in the background, except the last one.

        Raises:
            NonFiniteLoss: the weights are not finite; nothing was written.
            ValueError: this checkpoint, or the previous one in the background, could not be written.
        """
        state = self.engine.state()
        state["observers"] = self.callbacks.all_tensors()
        broken = [
            name for name, tensor in state["model"].items() if not bool(torch.isfinite(local(tensor)).all())
        ]
        ranks = self.world.gather(json.dumps(broken))
        everywhere = sorted({name for text in ranks for name in json.loads(text)})
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
        self.saved = self.step
        return str(path)

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
        """Path of the newest complete checkpoint, for messages."""
        return str(self.run.latest_checkpoint()) if self.run.latest.is_file() else "none so far"

    def close(self, failed: bool = False) -> None:
        """Wait for a checkpoint in the background, stop threads, and close callbacks and files.

        Raises:
            ValueError: on every rank: that checkpoint could not be written. After a failure it is printed instead,
                because other ranks may not be there to agree.
        """
        try:
            if not failed:
                self.writer.wait()
            elif problem := self.writer.abandon():
                self.console.line(problem)
        finally:
            self.callbacks.close(failed)
            self.feed.close()
            if self.validation is not None:
                self.validation.close()
            if self.log is not None:
                self.log.close()

    def _restore(self, checkpoint: Checkpoint) -> None:
        progress = checkpoint.progress
        for what, digest in self._corpus_hashes().items():
            saved = progress["corpus"][what]
            if saved != digest:
                raise ValueError(
                    f"the run was trained on other {what} (hash {saved[:12]}, now {digest[:12]});"
                    " go on with the same ones, or start a new run with another out="
                )
        self.engine.load_state(checkpoint.source)
        self.feed.load_state_dict(progress["data"])
        self.step = self.saved = checkpoint.step
        self.evaluated, self.best = progress["evaluated"], progress.get("best")
        self.best_step = progress.get("best_step", -1)
        self.running = RunningLoss(*progress["running"])
        self.callbacks.load_states(progress.get("observers", {}))
        self.callbacks.load_all_tensors(checkpoint.source, self.engine)
        self.notes += self.running.weigh(self.config.train.loss_weighting)
        if not restore_rng(self.world, checkpoint.source):
            self.notes.append(
                "some ranks are new: their dropout starts from the seed, not from the checkpoint"
            )
        if (progress["world_size"], progress["threads"]) != (self.world.size, torch.get_num_threads()):
            self.notes.append(
                f"the checkpoint was written by {progress['world_size']} processes with {progress['threads']} threads:"
                " the same documents follow, but sums round differently"
            )

    def _open_files(self) -> None:
        """Create the run directory, or truncate its files to what the checkpoint saw; on rank 0."""
        starts = self.config.train.resume == "false"
        if starts:
            self.run.create(self._saved_config())
        files = cost_files(self.cost_model) | ({} if self.resumed else self.objective.run_files())
        for name, content in files.items():
            write_atomically(self.run.path / name, content)
        self.log = RunLog(self.run)
        if starts:
            return
        checkpoint = self.resumed
        self.log.cut(checkpoint.progress["marks"] if checkpoint else None)
        write_atomically(self.run.config, self._saved_config().encode())
        if checkpoint is None:
            return
        self.run.point_to(checkpoint.path)
        best = self.run.checkpoints / name_of(self.best_step)
        if best.is_dir():
            self.run.point_to(best, self.run.best)
        elif self.best_step >= 0:  # the best checkpoint of a course that is abandoned
            self.run.best.unlink(missing_ok=True)

    def _corpus_hashes(self) -> dict[str, str]:
        documents = self.corpus.arriving or self.corpus.train
        return {"documents": documents.fingerprint, "tokens": self.corpus.tokenizer.hash}

    def _progress(self) -> dict[str, Any]:
        """The progress of the run, as plain values."""
        assert self.log is not None
        return {
            "data": self.feed.state_dict(),
            "running": list(astuple(self.running)),
            "evaluated": self.evaluated,
            "best": self.best,
            "best_step": self.best_step,
            "observers": self.callbacks.states(),
            "marks": self.log.marks(),
            "corpus": self._corpus_hashes(),
            "world_size": self.world.size,
            "threads": torch.get_num_threads(),
        }

    def _files(self) -> dict[str, str]:
        """Texts that a checkpoint holds."""
        files = {"config.yaml": self._saved_config(), "tokenizer.json": self.corpus.tokenizer.to_json()}
        if self.chat_template:
            files[CHAT_TEMPLATE] = self.chat_template
        return files

    def _saved_config(self) -> str:
        """The configuration that starts such a run anew, in a directory of its own."""
        train = replace(self.config.train, resume="false", eval_only=False)
        return config_yaml(replace(self.config, train=train, out=""))
