"""`Trainer`: one loop over global steps for every parallel strategy.

for each step:  feed ▸ forward_backward ▸ clip ▸ step ▸ record ▸ (evaluate) ▸ (save)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from multipack.models.decoder import Decoder
from multipack.reports.console import Console
from multipack.training.apply import StepApplier, StopRequest, diverged
from multipack.training.assemble import Parts
from multipack.training.checkpoint import Checkpoint, check_progress, readable, restore_rng
from multipack.training.feed import StepData
from multipack.training.metrics import evaluation_line, format_line, sample_line, step_line

RESULTS = ("evaluated", "best", "best_step")
"""Attributes of `Trainer` on evaluations, which a checkpoint stores."""


class Trainer:
    """Restores a run from its checkpoint, and trains it.

    Files are written only after the checkpoint is loaded.

    Args:
        parts: parts of the run, see `assemble`; the parts that the loop calls are attributes.
        console: prints progress.

    Attributes:
        saved, evaluated, best_step: steps of the last checkpoint, the last evaluation, the best checkpoint; -1 = none.
        val_loss, best: validation losses of this process's last evaluation, and the lowest of a checkpoint so far.
        val_losses: validation loss of each source of a mixture, by its metric (val_loss/NAME).
        val_metrics: the objective's metrics of that evaluation.
        started: step and time of the loop's beginning, to estimate the time left.
        stop: records the signal that asks to stop.
        applied: the steps that were applied.

    Raises:
        ValueError: the checkpoint does not suit the run.
    """

    def __init__(self, parts: Parts, console: Console) -> None:
        opening, model = parts.opening, parts.model
        self.console, self.notes = console, list(parts.notes)
        self.run, self.resumed = opening.run, opening.resumed
        self.mesh, self.world = opening.mesh, opening.mesh.world
        self.config, self.objective, self.shape = model.config, model.objective, model.shape
        self.corpus, self.engine = model.objective.corpus, model.engine
        self.feeds, self.feed, self.steps = parts.feeds, parts.feeds.training, parts.feeds.steps
        self.callbacks, self.files = parts.callbacks, parts.files
        self.saved, self.evaluated, self.best_step = -1, -1, -1
        self.val_loss: float | None = None
        self.val_losses: dict[str, float] = {}
        self.val_metrics: dict[str, float] = {}
        self.best: float | None = None
        self._reason = ""
        self.stop = StopRequest(self.feed.interrupt, console.enabled and self.world.launcher != "torchrun")
        self.applied = StepApplier(parts, self.stop, self._record)
        if self.resumed is not None:
            check_progress(self.resumed)
            with readable(self.resumed.path):
                self._restore(self.resumed)
        self.world.on_main(lambda: self.files.open(self.objective.run_files, self.resumed, self.best_step))

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.applied.step

    @property
    def ending(self) -> str:
        """Reason to stop before the last step; empty while the loop continues."""
        return self.stop.signal.name if self.stop.agreed and self.stop.signal else self._reason

    def loop(self) -> None:
        """Train until the last step, or until a signal, a callback or the end of the documents ends the run."""
        # An evaluation is due before the first step, or if the run was stopped between a step and its evaluation.
        if self._evaluation_due():
            self.evaluate()
            if self._is_best():
                self.save()
        for step, data in self._steps():
            watch = partial(self._watch, data)
            result = self.engine.forward_backward(data.micro_batches, data.denominator, watch)
            self.applied.apply(step, data, result)
            if self._evaluation_due():
                self.evaluate()
            if self._checkpoint_due(self._is_best()):
                self.save()
        self.applied.settle()
        if self.ending:  # the feed may have ended without a further step
            if due := self._evaluation_due():
                self.evaluate()
            if due or self.step > self.saved:
                self.save()

    def evaluate(self) -> None:
        """Compute the validation loss, and generate a sample of text; collective."""
        self.applied.settle()
        assert self.feeds.validation is not None
        losses = {f"val_loss{source}": loss for source, loss in self.feeds.validation.losses().items()}
        values: dict[str, float] = {"step": self.step}
        loss_sum, denominator = self.applied.running
        if denominator:
            values["train_loss"] = loss_sum / denominator
        self.applied.running = [0.0, 0]
        self.val_metrics = self.objective.metrics(self.engine, training=False)
        self.val_losses = {name: loss for name, loss in losses.items() if "/" in name}
        values |= {**losses, **self.val_metrics}
        self.evaluated, self.val_loss = self.step, losses["val_loss"]
        first = [f"val_{name}" for name in self.objective.last_line]
        brief = evaluation_line(values, not self.objective.legend, first)
        whole = f"evaluation {format_line(values)}"
        self.console.line(whole if self.config.log.verbose else brief, style="bold")
        if not math.isfinite(self.val_loss):
            diverged(self.config, self.feed, f"the validation loss after step {self.step} is not finite")
        self._publish(values)
        # Only evaluations of saved steps count for the best checkpoint.
        saved = self.step > 0 and (self.saved == self.step or self._checkpoint_due(best=True))
        if saved and (self.best is None or self.val_loss < self.best):
            self.best, self.best_step = self.val_loss, self.step
        reasons = [callback.stop_reason(self.step, self.val_loss) for callback in self.callbacks]
        self._reason = self._reason or "; ".join(filter(None, reasons))
        self.sample()
        self.applied.restart_clock()

    def sample(self) -> None:
        """Generate a sample of text with rank 0's replica, print it and append it to the run's samples."""
        train = self.config.train
        prompts = [train.sample_prompt] if train.sample_prompt else self.corpus.prompts
        whole = self.engine.is_whole and not self.shape.architecture
        if not (prompts and train.sample_tokens and whole and self.world.is_main):
            return
        from multipack.models.sampling import Sampling
        from multipack.training.inference import complete_batch

        sampling = Sampling(train.sample_tokens, temperature=0.8, top_k=50, seed=train.seed + self.step)
        with self.engine.evaluating() as model:
            (completion,) = complete_batch(cast(Decoder, model), self.corpus.tokenizer, prompts[:1], sampling)
        text = f"{prompts[0]}▌{completion.text}"
        if self.files.log is not None:
            self.files.log.sample(self.step, text)
            for callback in self.callbacks:
                callback.sample(self.step, text)
        if self.step:  # before the first step in the file only
            self.console.line(f"    {sample_line(prompts[0], completion.text)}")

    def save(self) -> None:
        """Write a checkpoint; collective.

        Raises:
            NonFiniteLoss: the weights are not finite; nothing was written.
            ValueError: this checkpoint, or the previous one in the background, could not be written.
        """
        self.applied.settle()
        if broken := self.engine.nonfinite_parameters():
            count, first = len(broken), ", ".join(broken[:3])
            what = f"after step {self.step} {count} weight tensors are not finite ({first})"
            diverged(self.config, self.feed, what)
        self.files.save(
            self.step, self.engine.state(), self._progress, best=self._is_best(), last=self._is_last()
        )
        self.saved = self.step
        self.applied.restart_clock()

    def close(self, failed: bool = False) -> None:
        """Wait for a checkpoint in the background, stop threads, and close callbacks and files; collective."""
        try:
            if problem := self.files.close(failed):
                self.console.line(problem)
        finally:
            for callback in self.callbacks:
                callback.close(failed)
            self.feeds.close()

    def _steps(self) -> Iterator[tuple[int, StepData]]:
        """Yield the number and the data of each step until the run ends."""
        self.started = self.step, time.monotonic()
        feed = iter(self.feed)
        with self.console.progress("training") as advance:
            self.applied.restart_clock()
            while self.step < self.steps and not self.ending:
                self.world.watch.at_step(self.step + 1)
                for callback in self.callbacks:
                    callback.before_step(self.step + 1)
                data = next(feed, None)
                if data is not None:
                    yield self.step + 1, data
                    advance(self.step, self.steps, f"loss {self.applied.loss:.3f}")
                elif self.feed.ended:
                    self._reason = "the stream of documents has ended"
                else:  # while waiting for documents, a rank received a signal or exceeded its timeout
                    self.stop.agree()

    def _record(self, step: int, data: StepData, record: dict[str, float]) -> None:
        """Write the record of a step, and print it."""
        log = self.config.log
        if self.files.log is not None and log.documents:
            self.files.log.documents(step, data.documents.tolist(), data.index, data.plan)
        self._publish(record)
        first, began = self.started
        if log.every and (step % log.every == 0 or step in (first + 1, self.steps)):
            left = (time.monotonic() - began) / (step - first) * (self.steps - step)
            line = step_line(record, self.steps, self.val_loss, left)
            self.console.line(format_line(record) if log.verbose else line)

    def _publish(self, values: dict[str, float]) -> None:
        """Append a record to metrics.jsonl and pass it to callbacks; on rank 0."""
        if self.files.log is not None:
            self.files.log.record(values)
            for callback in self.callbacks:
                callback.record(values)

    def _watch(self, data: StepData, index: int) -> None:
        """Call the callbacks after micro-batch `index` of a step."""
        own = sum(batch.denominator for batch in data.micro_batches[: index + 1])
        for callback in self.callbacks:
            callback.micro_batch(index, self.engine, float(own), float(data.denominator))

    def _is_last(self) -> bool:
        return self.step == self.steps or bool(self.ending)

    def _is_best(self) -> bool:
        return self.best_step == self.step

    def _evaluation_due(self) -> bool:
        """Whether this step is evaluated: not twice, and not after a signal to stop."""
        every = self.config.train.eval_every
        due = every > 0 and (self.step % every == 0 or self._is_last())
        return due and self.evaluated != self.step and not self.stop.agreed

    def _checkpoint_due(self, best: bool) -> bool:
        """Whether this step is saved; `best`: its validation loss is the lowest so far."""
        train, every = self.config.train, self.config.train.checkpoint_every
        return self._is_last() or (best and train.keep_best) or (every > 0 and self.step % every == 0)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint into all parts of the run."""
        progress = checkpoint.progress
        self.notes += self.files.check_origin(progress)
        self.engine.load_state(checkpoint.source)
        self.feed.load_state_dict(progress["data"])
        self.applied.step = self.saved = checkpoint.step
        self.evaluated, self.best, self.best_step = (progress[name] for name in RESULTS)
        *running, before = progress["running"]
        if before == (weighting := self.config.train.loss_weighting):
            self.applied.running = running
        else:
            self.notes.append(
                f"train.loss_weighting changes from {before} to {weighting}: logged losses before and after are means"
                " over different units"
            )
        self.objective.load_state(self.engine, progress.get("objective", {}))
        for callback in self.callbacks:
            if callback.name in progress["callbacks"]:  # others start anew
                callback.load_state(progress["callbacks"][callback.name])
        restore_rng(self.world, checkpoint.source)

    def _progress(self) -> dict[str, Any]:
        """The progress of the run, as plain values for a checkpoint."""
        return {
            "data": self.feed.state_dict(),
            "running": [*self.applied.running, self.config.train.loss_weighting],
            **{name: getattr(self, name) for name in RESULTS},
            "callbacks": {each.name: state for each in self.callbacks if (state := each.state())},
            "objective": self.objective.state(self.engine),
        }
