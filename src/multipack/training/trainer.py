"""`Trainer`: builds the parts of a run, and has one loop over global steps for every parallel strategy.

config ─▶ corpus ─▶ sampler (plan) ─▶ loader ─▶ feed
   └────▶ shape ──▶ blueprint ─▶ engine (model, optimizer)

for each step:  feed ▸ forward_backward ▸ clip ▸ step ▸ record ▸ (evaluate) ▸ (save)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from multipack.data.text.vocabularies import read_text
from multipack.hub import model_folder
from multipack.models.decoder import Decoder
from multipack.models.foreign import open_foreign
from multipack.models.sampling import Sampling
from multipack.parallel.mesh import build_mesh
from multipack.parallel.world import World
from multipack.reports.console import PLANNING, Console
from multipack.run import unused_folder
from multipack.training.apply import StepApplier, may_read_later
from multipack.training.blueprint import open_engine
from multipack.training.callbacks.callback import Callbacks
from multipack.training.checkpoint import Checkpoint, restore_rng
from multipack.training.feed import StepData
from multipack.training.foreign_checks import FOREIGN_NOTES, check_corpus, check_isolated
from multipack.training.frozen_files import check_base
from multipack.training.inference import complete_batch
from multipack.training.metrics import evaluation_line, format_line, sample_line
from multipack.training.objective import objective_of
from multipack.training.precision import DTYPES, mean_peak
from multipack.training.progress import checked_progress
from multipack.training.run_config import Config
from multipack.training.run_cost import cost_files, run_cost
from multipack.training.run_files import RunFiles
from multipack.training.run_parts import (
    Feeds,
    build_callbacks,
    open_run,
    packs_per_step,
    read_documents,
    resolve,
    shape_of,
)
from multipack.training.schedule import rate_factor
from multipack.training.source_files import chat_template_of, outside_template, source_files
from multipack.training.stop_request import StopRequest
from multipack.training.weights import adapt_weights, find_weights

RESULTS = ("evaluated", "best", "best_step")
"""Attributes of `Trainer` on evaluations, which a checkpoint stores."""


class Trainer(StepApplier):
    """Builds a run, restores it from its checkpoint, and trains it.

    Files are written only after all parts are built and the checkpoint is loaded.

    Args:
        config: configuration of the run; see `compose_run`.
        world: the ranks.
        console: prints progress.
        clock: returns seconds; replaced in tests.

    Attributes:
        config: the configuration with everything resolved that settings leave to the run.
        resumed: the checkpoint that the run resumes from; None = a new run.
        lr_factor: factor of learning rates from `optimizer.lr_scaling`.
        peak_flops: peak of matrix products on one device, in FLOP/s.
        step, steps: number of steps taken, and of the last step of the run.
        saved, evaluated, best_step: steps of the last checkpoint, the last evaluation, the best checkpoint; -1 = none.
        val_loss, best: validation losses of this process's last evaluation, and the lowest of a checkpoint so far.
        val_losses: those of each source of a mixture, by the names of their metrics.
        val_metrics: the objective's metrics of that evaluation.
        running: summed loss since the last evaluation, and what it is divided by.
        ending: reason to stop before the last step; empty while the loop continues.
        started: step and time of the loop's beginning, to estimate the time left.
        interrupted: whether a rank received a signal, or waited too long for documents; equal on every rank.
        stop: records the signal that asks to stop.

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
        self.world, self.console, self.clock = world, console, clock
        out = world.from_main(config.out or str(unused_folder()))
        day = world.from_main(config.data.dated().template_date)  # ranks may begin on both sides of midnight
        config = replace(config, out=out, data=replace(config.data, template_date=day))
        self.run, self.resumed = open_run(config, world)
        self.mesh = build_mesh(config.parallel, world)
        packs, self.notes = packs_per_step(config, self.mesh)
        self.corpus = read_documents(config, self.mesh, console)
        self.objective = objective_of(config, self.corpus)
        setting, start = "train.init_from", config.train.init_from if self.resumed is None else ""
        if config.adapter.name != "none":  # frozen weights are in no checkpoint
            setting, start = "adapter.base", config.adapter.base
            config.adapter.base_hash = check_base(config.adapter, world)
        foreign = bool(config.model.architecture)
        initial = find_weights(model_folder(start, setting), world=world, foreign=foreign) if start else None
        resumed = self.resumed.path if self.resumed else None
        self.shape = self.objective.shape(shape_of(config, self.corpus.tokenizer, initial, resumed))
        config, notes = resolve(config, self.objective, self.shape, packs, world)
        self.config, self.notes, self.dtype = config, self.notes + notes, DTYPES[config.train.dtype]
        self.objective.config = config
        self.cost_model = run_cost(config, self.shape, self.run, self.resumed)
        before = resumed or (initial.folder if initial else None)
        if before is None and foreign:
            before = Path(config.model.architecture)
        template = chat_template_of(self.corpus, before)
        self.notes += outside_template(config, self.corpus, template)
        weights = None
        if initial is not None:
            self.objective.shape(initial.shape)
            weights, note = adapt_weights(initial, self.shape, self.corpus.tokenizer)
            self.notes += [note] if self.resumed is None else []
        if foreign:
            shares = config.data.share_prefixes != "off"
            check_corpus(self.shape, self.corpus)
            world.on_main(lambda: check_isolated(self.shape, world.device, shares))
            self.notes += FOREIGN_NOTES
        if foreign and initial is None and self.resumed is None:
            weights = open_foreign(self.shape, config.train.seed)
        self.engine = open_engine(config, self.objective, self.shape, weights, self.mesh, self.dtype, clock)
        if config.train.eval_every and config.train.sample_tokens and not (self.engine.is_whole or foreign):
            self.notes.append(
                "no samples, because no rank holds the whole model: use `multipack generate RUN`"
            )
        folder = self.run.path if self.resumed is not None else None
        with console.notice(PLANNING):
            self.feeds = Feeds(config, self.objective, self.engine, self.cost_model, console, clock, folder)
        self.feed, self.steps = self.feeds.training, self.feeds.steps
        self.notes += self.feeds.notes
        # From here on ranks draw their own random numbers (dropout), each from a reproducible stream.
        torch.manual_seed(int(np.random.SeedSequence([config.train.seed, world.rank]).generate_state(1)[0]))
        callbacks = build_callbacks(config, world, self.run, self.feed.micro_batches, console.line)
        self.callbacks = Callbacks(callbacks)
        self.lr_factor = rate_factor(config.optimizer, self.feed.targets_per_step)
        self.peak_flops = mean_peak(world, self.dtype)
        self.step, self.saved, self.evaluated, self.best_step = 0, -1, -1, -1
        self.val_loss: float | None = None
        self.val_losses: dict[str, float] = {}
        self.val_metrics: dict[str, float] = {}
        self.best: float | None = None
        self.running: list[float] = [0.0, 0]
        self.ending, self.interrupted, self.loss = "", False, math.nan
        source = source_files(before, self.corpus.tokenizer)
        if foreign:  # what `model=` names, not `train.init_from`
            source["config.json"] = read_text(Path(self.shape.architecture) / "config.json")
        self.files = RunFiles(self.run, world, config, self.corpus, template, source, console.line)
        if self.resumed is not None:
            self._restore(self.resumed)
        files = cost_files(self.cost_model) | self.objective.run_files
        world.on_main(lambda: self.files.open(files, self.resumed, self.best_step))
        self.stop = StopRequest(self.feed.interrupt, self.console.enabled and world.launcher != "torchrun")
        self._unread: Callable[[], None] = lambda: None
        self._forward_seconds = 0.0
        self._reads_later = not self.objective.legend and may_read_later(self.engine, self.callbacks)
        self._mark: Any = self.engine.clock.mark()  # when the last step, evaluation or checkpoint ended

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
            (self._apply_ahead if self._reads_later else self._apply)(step, data, result)
            if self._evaluation_due():
                self.evaluate()
            if self._checkpoint_due(self._is_best()):
                self.save()
        self._settle()
        if self.ending:  # the feed may have ended without a further step
            if due := self._evaluation_due():
                self.evaluate()
            if due or self.step > self.saved:
                self.save()

    def evaluate(self) -> None:
        """Compute the validation loss with every set of weights, and generate a sample of text; collective."""
        self._settle()
        losses: dict[str, float] = {}
        assert self.feeds.validation is not None
        for suffix, weights in [("", nullcontext()), *self.callbacks.weight_sets(self.engine)]:
            with weights:
                found = self.feeds.validation.losses()
                losses |= {f"val_loss{suffix}{source}": loss for source, loss in found.items()}
        values: dict[str, float] = {"step": self.step}
        loss_sum, denominator = self.running
        if denominator:
            values["train_loss"] = loss_sum / denominator
        self.running = [0.0, 0]
        self.val_metrics = self.objective.metrics(self.engine, training=False)
        self.val_losses = {name: loss for name, loss in losses.items() if "/" in name}
        values |= {**losses, **self.val_metrics}
        self.evaluated, self.val_loss = self.step, losses["val_loss"]
        first = [f"val_{name}" for name in self.objective.last_line]
        brief = evaluation_line(values, not self.objective.legend, first)
        whole = f"evaluation {format_line(values)}"
        self.console.line(whole if self.config.log.verbose else brief, style="bold")
        if not math.isfinite(self.val_loss):
            self.diverged(f"the validation loss after step {self.step} is not finite", [])
        self._publish(values)
        # The best checkpoint is one of those that are saved: other evaluations do not count.
        saved = self.step > 0 and (self.saved == self.step or self._checkpoint_due(best=True))
        if saved and (self.best is None or self.val_loss < self.best):
            self.best, self.best_step = self.val_loss, self.step
        self.ending = self.ending or self.callbacks.stop_reason(self.step, self.val_loss)
        self.sample()
        self._mark = self.engine.clock.mark()

    def sample(self) -> None:
        """Generate a sample of text with rank 0's replica, print it and append it to the run's samples."""
        train = self.config.train
        prompts = [train.sample_prompt] if train.sample_prompt else self.corpus.prompts
        whole = self.engine.is_whole and not self.shape.architecture
        if not (prompts and train.sample_tokens and whole and self.world.is_main):
            return
        sampling = Sampling(
            train.sample_tokens, train.sample_temperature, train.sample_top_k, seed=train.seed + self.step
        )
        with self.engine.evaluating() as model:
            (completion,) = complete_batch(cast(Decoder, model), self.corpus.tokenizer, prompts[:1], sampling)
        text = f"{prompts[0]}▌{completion.text}"
        if self.files.log is not None:
            self.files.log.sample(self.step, text)
            self.callbacks.sample(self.step, text)
        verbose = self.config.log.verbose
        shown = text.splitlines() if verbose else [sample_line(prompts[0], completion.text)]
        if verbose or self.step:  # before the first step in the file only
            self.console.line("\n".join("    " + line for line in shown))

    def save(self) -> None:
        """Write a checkpoint; collective.

        Raises:
            NonFiniteLoss: the weights are not finite; nothing was written.
            ValueError: this checkpoint, or the previous one in the background, could not be written.
        """
        self._settle()
        if broken := self.engine.nonfinite_parameters():
            count, first = len(broken), ", ".join(broken[:3])
            self.diverged(f"after step {self.step} {count} weight tensors are not finite ({first})", [])
        state = self.engine.state() | {"callbacks": self.callbacks.all_tensors()}
        self.files.save(self.step, state, self._progress, best=self._is_best(), last=self._is_last())
        self.saved, self._mark = self.step, self.engine.clock.mark()

    def close(self, failed: bool = False) -> None:
        """Wait for a checkpoint in the background, stop threads, and close callbacks and files; collective."""
        try:
            if problem := self.files.close(failed):
                self.console.line(problem)
        finally:
            self.callbacks.close(failed)
            self.feeds.close()

    def _steps(self) -> Iterator[tuple[int, StepData]]:
        """Yield the number and the data of each step until the run ends."""
        self.started = self.step, time.monotonic()
        feed = iter(self.feed)
        with self.console.progress("training") as advance:
            self._mark = self.engine.clock.mark()
            while self.step < self.steps and not self.ending:
                self.world.watch.at_step(self.step + 1)
                self.callbacks.before_step(self.step + 1)
                data = next(feed, None)
                if data is not None:
                    yield self.step + 1, data
                    advance(self.step, self.steps, f"loss {self.loss:.3f}")
                elif self.feed.ended:
                    self.ending = "the stream of documents has ended"
                else:  # while waiting for documents, a rank received a signal or exceeded its timeout
                    self._interrupt()

    def _watch(self, data: StepData, index: int) -> None:
        """Call the callbacks after micro-batch `index` of a step."""
        own = sum(batch.denominator for batch in data.micro_batches[: index + 1])
        self.callbacks.micro_batch(index, self.engine, float(own), float(data.denominator))

    def _is_last(self) -> bool:
        return self.step == self.steps or bool(self.ending)

    def _is_best(self) -> bool:
        return self.best_step == self.step

    def _evaluation_due(self) -> bool:
        every = self.config.train.eval_every
        due = every > 0 and (self.step % every == 0 or self._is_last())
        return due and self.evaluated != self.step and not self.interrupted

    def _checkpoint_due(self, best: bool) -> bool:
        """Whether this step is saved; `best`: its validation loss is the lowest so far."""
        train, every = self.config.train, self.config.train.checkpoint_every
        return self._is_last() or (best and train.keep_best) or (every > 0 and self.step % every == 0)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint into all parts of the run."""
        progress = checked_progress(checkpoint, self.callbacks.states())
        self.notes += self.files.check_origin(progress)
        self.engine.load_state(checkpoint.source)
        self.feed.load_state_dict(progress["data"])
        self.step = self.saved = checkpoint.step
        self.evaluated, self.best, self.best_step = (progress[name] for name in RESULTS)
        *running, before = progress["running"]
        if before == (weighting := self.config.train.loss_weighting):
            self.running = running
        else:
            self.notes.append(
                f"train.loss_weighting changes from {before} to {weighting}: logged losses before and after are means"
                " over different units"
            )
        self.objective.load_state(self.engine, progress.get("objective", {}))
        self.callbacks.load_states(progress["callbacks"])
        self.callbacks.load_all_tensors(checkpoint.source, self.engine)
        drops = self.config.model.dropout or self.config.adapter.dropout
        if not restore_rng(self.world, checkpoint.source) and drops:
            self.notes.append(
                "some ranks are new: their dropout starts from the seed, not from the checkpoint"
            )

    def _progress(self) -> dict[str, Any]:
        """The progress of the run, as plain values for a checkpoint."""
        return {
            "data": self.feed.state_dict(),
            "running": [*self.running, self.config.train.loss_weighting],
            **{name: getattr(self, name) for name in RESULTS},
            "callbacks": self.callbacks.states(),
            "objective": self.objective.state(self.engine),
        }
