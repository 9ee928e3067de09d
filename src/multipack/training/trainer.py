"""`train` and `Trainer`: one loop over global steps, the same for every parallel strategy.

    for each step:  feed ▸ forward_backward ▸ clip ▸ step ▸ record ▸ (evaluate) ▸ (save)

`RunParts` builds the parts of a run, its subclass `RunState` saves and restores them, its subclass `Trainer` trains.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch

from multipack.models.decoder import Decoder
from multipack.models.sampling import Sampling
from multipack.parallel.engine import StepResult
from multipack.parallel.ranks import find_ranks
from multipack.parallel.world import connected
from multipack.reports.console import Console
from multipack.training.callbacks.callback import RunStopped
from multipack.training.compare import Comparison, compare_with_padding
from multipack.training.feed import StepData
from multipack.training.inference import complete_batch
from multipack.training.metrics import format_line, step_metrics
from multipack.training.precision import deterministic, mean_peak
from multipack.training.run_config import Config
from multipack.training.run_parts import check_model
from multipack.training.run_report import print_header, print_result
from multipack.training.run_state import RunState
from multipack.training.schedule import learning_rate
from multipack.training.stop_request import StopRequest


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        run: path of the run directory.
        step: number of steps taken.
        val_loss: validation loss of the last evaluation; None without one.
        stopped_by: signal that stopped the run early; None if it ran to its end.
        comparison: measured cost of padding; None if it was not measured.
    """

    run: str
    step: int
    val_loss: float | None
    stopped_by: signal.Signals | None
    comparison: Comparison | None


def train(config: Config, clock: Callable[[], float] = time.perf_counter) -> RunResult:
    """Train a model, from reading documents to the last checkpoint.

    Args:
        config: configuration of the run; see `multipack.training.run_config.compose_run`.
        clock: returns seconds; replaced in tests.

    Raises:
        ValueError: the configuration does not fit the documents, the device or the ranks.
        FileExistsError: the run directory holds another run.
        RunStopped: training diverged (NonFiniteLoss) or a callback stopped it; the message names the last checkpoint.
    """
    began = clock()
    ranks = find_ranks(os.environ)
    console = Console(ranks.rank, config.log.all_ranks)
    config.check(ranks.size)
    check_model(config, ranks.size, console)
    with (
        connected(config.train.device, config.parallel.timeout_seconds) as world,
        deterministic(config.train.deterministic, world.device),
    ):
        trainer = Trainer(config, world, console, clock)
        first = trainer.step
        try:
            print_header(trainer, clock() - began)
            with trainer.stop:
                trainer.loop()
            if trainer.feed.late:
                raise ValueError(f"{trainer.feed.late} (the run is saved after step {trainer.step})")
            # Everything is saved: from here on a signal ends the process immediately.
            stopped = trainer.stop.signal
            result = RunResult(
                run=str(trainer.run.path),
                step=trainer.step,
                val_loss=trainer.val_loss,
                stopped_by=stopped if trainer.step < trainer.steps else None,
                comparison=trainer.compare_padding() if stopped is None and trainer.step > first else None,
            )
            print_result(trainer, result.stopped_by, result.comparison)
        except BaseException as error:
            trainer.close(failed=True)
            if isinstance(error, RunStopped):
                raise type(error)(f"{error}. Last good checkpoint: {trainer.last_checkpoint()}") from error
            raise
        trainer.close()
    return result


class Trainer(RunState):
    """Trains a run.

    Args:
        config, world, console, clock: see `RunParts`.

    Attributes:
        stop: signal to stop that this rank received, if any.
        loss: training loss of the last step.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stop = StopRequest(self.feed.interrupt)
        # Time at which the last step, evaluation or checkpoint ended.
        self._mark = self.clock()
        self.loss = math.nan

    def loop(self) -> None:
        """Train until the last step, or until a signal, a callback or the end of the documents ends the run."""
        engine, callbacks, config = self.engine, self.callbacks, self.config
        # An evaluation is due before the first step, or if the run was stopped between a step and its evaluation.
        if self._evaluation_due():
            self.evaluate()
            if self.step and self._is_best():
                self.save()
        for step, data in self._steps():
            result = engine.forward_backward(data.micro_batches, data.denominator, self._watch(data))
            loss_sum, slots = self._agree(data, result)
            middle = self.clock()
            metrics = callbacks.gradient(step, engine)
            norm = engine.clip(config.optimizer.clip)
            applied = self._is_valid(data, norm) and callbacks.accept(
                step, loss_sum / max(data.denominator, 1), norm
            )
            rate = self.lr_factor * learning_rate(step, self.steps, config.optimizer)
            if applied:
                engine.step(rate)
            else:
                engine.discard()
            self.step = step
            callbacks.after_step(step, engine, applied)
            self._record(
                data,
                result,
                middle,
                metrics,
                loss_sum=loss_sum,
                slots=slots,
                learning_rate=rate,
                grad_norm=norm,
                skipped=not applied,
            )
            if self._evaluation_due():
                self.evaluate()
            if self._checkpoint_due():
                self.save()
        if self.ending and not config.train.eval_only:  # the feed may have ended without a further step
            due = self._evaluation_due()
            if due:
                self.evaluate()
            if due or self.step > self.saved:
                self.save()

    def evaluate(self) -> None:
        """Compute the validation loss with every set of weights, and generate a sample of text; collective."""
        losses = {}
        for suffix, weights in [("", nullcontext()), *self.callbacks.weight_sets(self.engine)]:
            with weights:
                losses[f"val_loss{suffix}"] = self.validation_loss()
        values: dict[str, float] = {"step": self.step}
        train_loss = self.running.take()
        if train_loss is not None:
            values["train_loss"] = train_loss
        values |= {**losses, **self.objective.evaluated(self.engine)}
        self.evaluated, self.val_loss = self.step, losses["val_loss"]
        if self.world.device.type == "cpu":  # other processes may have slowed down the first measurement
            self.peak_flops = max(self.peak_flops, mean_peak(self.world, self.dtype, seconds=0.1))
        self.console.line(f"evaluation {format_line(values)}", style="bold")
        if not math.isfinite(self.val_loss):
            self.diverged(f"the validation loss after step {self.step} is not finite", [])
        self._publish(values)
        if not self.config.train.eval_only:
            if self.best is None or self.val_loss < self.best:
                self.best, self.best_step = self.val_loss, self.step
            self.ending = self.ending or self.callbacks.stop_reason(self.step, self.val_loss)
        self.sample()
        self._mark = self.clock()

    def save(self) -> str:
        """See `RunState`."""
        path = super().save()
        self._mark = self.clock()
        return path

    def validation_loss(self) -> float:
        """Mean loss of the validation packs over all ranks, weighted as the training loss; collective."""
        assert self.validation is not None
        loss, denominator, count = 0.0, 0, self.feed.micro_batches
        batches = iter(self.validation)
        for _ in range(self.validation_packs // count):
            micro_batches = list(islice(batches, count))
            loss += sum(self.engine.evaluate(micro_batches))
            if self.mesh.is_replica_leader:
                denominator += sum(batch.denominator for batch in micro_batches)
        self.validation.close()
        total_loss, total = self.world.sum([loss, float(denominator)])
        return total_loss / max(total, 1.0)

    def sample(self) -> None:
        """Generate a sample of text, print it and append it to the run's samples; collective."""
        train = self.config.train
        prompts = [train.sample_prompt] if train.sample_prompt else self.corpus.prompts
        if not prompts or not train.sample_tokens:
            return
        prompt = prompts[(self.step // max(train.eval_every, 1)) % len(prompts)]
        with self.engine.gathered() as model:
            if model is None:
                return
            sampling = Sampling(
                train.sample_tokens,
                train.sample_temperature,
                train.sample_top_k,
                seed=train.seed + self.step,
            )
            (completion,) = complete_batch(cast(Decoder, model), self.corpus.tokenizer, [prompt], sampling)
            text = completion.text
        if self.log is not None:
            self.log.samples.write(f"=== step {self.step}\n{prompt}▌{text}\n\n")
            self.callbacks.sample(self.step, f"{prompt}▌{text}")
        self.console.line("\n".join("    " + line for line in f"{prompt}▌{text}".splitlines()))

    def compare_padding(self) -> Comparison | None:
        """Time the same documents packed and padded; None if disabled, or with a stream or several ranks."""
        train, plan = self.config.train, self.feed.plan
        if plan is None or not train.compare_padding or self.world.size > 1:
            return None
        self.console.line("\nmeasuring the cost of padding: the same documents, packed and padded in turns …")
        try:
            return compare_with_padding(
                self.engine, self.corpus.train, plan, batch_size=train.padded_batch_size, clock=self.clock
            )
        except torch.OutOfMemoryError:
            self.console.line(f"padded batches of {train.padded_batch_size} documents do not fit into memory")
            return None

    def _steps(self) -> Iterator[tuple[int, StepData]]:
        """Yield the number and the data of each step until the run ends."""
        last = self.step if self.config.train.eval_only else self.steps
        feed = iter(self.feed)
        with self.console.progress("training") as advance:
            self._mark = self.clock()
            while self.step < last and not self.ending:
                self.callbacks.before_step(self.step + 1)
                data = next(feed, None)
                if data is not None:
                    yield self.step + 1, data
                    advance(self.step, self.steps, f"loss {self.loss:.3f}")
                elif self.feed.ended:
                    self.ending = "the stream of documents has ended"
                else:  # a rank received a signal, or gave up, while it waited for documents
                    self._interrupt()

    def _watch(self, data: StepData) -> Callable[[int], None]:
        """The function that calls `Callbacks.micro_batch` after each micro-batch."""

        def watch(index: int) -> None:
            own = sum(batch.denominator for batch in data.micro_batches[: index + 1])
            self.callbacks.micro_batch(index, self.engine, float(own), float(data.denominator))

        return watch

    def _agree(self, data: StepData, result: StepResult) -> tuple[float, float]:
        """Sum the loss and the slots of a step over all ranks; share stop signals and non-finite losses.

        All of it takes one all-reduce.

        Returns:
            Summed loss, and number of slots.

        Raises:
            NonFiniteLoss: the loss of a pack is not finite; raised on every rank with the pack's documents.
        """
        mesh, packs = self.mesh, len(result.losses)
        broken = [0.0] * (packs * mesh.data_size)
        for index, loss in enumerate(result.losses):
            broken[index * mesh.data_size + mesh.data_rank] = 0.0 if math.isfinite(loss) else 1.0
        finite_loss = sum(loss for loss in result.losses if math.isfinite(loss))
        own_slots = (
            float(sum(batch.num_slots for batch in data.micro_batches)) if mesh.is_replica_leader else 0.0
        )
        asked = float(self.stop.signal or 0)
        loss_sum, slots, asked, *flags = self.world.sum([finite_loss, own_slots, asked, *broken])
        if any(flags):
            documents = [
                int(number) for pack, flag in enumerate(flags) if flag for number in data.packs[pack]
            ]
            self.diverged(
                f"the loss of step {self.step + 1} is not finite; the step was not applied", documents
            )
        if asked:
            self._interrupt()
        return loss_sum, slots

    def _interrupt(self) -> None:
        """End the run after this step without an evaluation, because a rank received a signal; called on all ranks."""
        self.stop.signal = self.stop.signal or signal.SIGTERM  # if another rank received it
        self.ending, self.interrupted = self.stop.signal.name, True

    def _is_valid(self, data: StepData, norm: float) -> bool:
        """Whether the gradient is finite; False for an fp16 overflow, after which the loss scale is lowered.

        Raises:
            NonFiniteLoss: the gradient is not finite, and that is not an overflow.
        """
        documents = [int(number) for number in data.documents]
        if self.engine.overflowed:
            if self.engine.loss_scale < 1:
                what = f"the gradient of step {self.step + 1} overflows fp16 at every loss scale"
                self.diverged(f"{what}; train in bf16 or fp32", documents)
            return False
        if not math.isfinite(norm):
            what = f"the gradient of step {self.step + 1} is not finite; the step was not applied"
            self.diverged(what, documents)
        return True

    def _record(
        self,
        data: StepData,
        result: StepResult,
        middle: float,
        metrics: Mapping[str, float],
        **values: Any,
    ) -> None:
        """Compute the metrics of the step that has just ended, and write its record.

        Args:
            data: data of the step.
            result: result of its forward and backward passes.
            middle: time at which its backward passes ended, in seconds.
            metrics: metrics of callbacks.
            values: see `step_metrics`.
        """
        self.world.synchronize()
        now = self.clock()
        record = step_metrics(
            self.step,
            data,
            result,
            flops=self.cost_model.flops(data.lengths),
            seconds=now - self._mark,
            optimizer_seconds=now - middle,
            devices=self.world.size,
            peak_flops=self.peak_flops,
            predicted_seconds=data.predicted_seconds if self.config.parallel.model_ranks == 1 else None,
            **values,
        )
        self._mark = now
        self.running.add(values["loss_sum"], data.denominator)
        self._publish({**record, **metrics})
        self.loss = record["loss"]
        every = self.config.log.every
        if every and (self.step % every == 0 or self.step == 1):
            self.console.line(format_line({**record, **metrics}))

    def _publish(self, values: dict[str, float]) -> None:
        """Append a record to metrics.jsonl and pass it to callbacks; on rank 0."""
        if self.log is not None:
            self.log.record(values)
            self.callbacks.record(values)

    def _is_last(self) -> bool:
        return self.step == self.steps or bool(self.ending)

    def _evaluation_due(self) -> bool:
        train, step = self.config.train, self.step
        if train.eval_only:
            return True
        due = train.eval_every > 0 and (step % train.eval_every == 0 or self._is_last())
        return due and self.evaluated != step and not self.interrupted

    def _checkpoint_due(self) -> bool:
        every = self.config.train.checkpoint_every or self.config.train.eval_every
        return self._is_last() or self._is_best() or (every > 0 and self.step % every == 0)

    def _is_best(self) -> bool:
        """Whether the current weights have the lowest validation loss so far."""
        return not self.config.train.eval_only and self.best_step == self.step
