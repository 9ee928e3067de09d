"""The trainer: one loop over global steps, the same for every strategy.

for each step:  feed ▸ forward_backward ▸ clip ▸ step ▸ metrics ▸ (evaluate) ▸ (checkpoint)
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, cast

import torch

from multipack.models.decoder import Decoder
from multipack.models.sampling import Sampling
from multipack.parallel.engine import StepResult
from multipack.parallel.ranks import find_ranks
from multipack.parallel.world import connected
from multipack.planning.report import report
from multipack.reports.console import Console
from multipack.training.assemble import assemble, check_model
from multipack.training.compare import Comparison, compare_with_padding
from multipack.training.evaluate import validation_loss
from multipack.training.feed import StepData
from multipack.training.header import header_rows
from multipack.training.inference import complete_batch
from multipack.training.metrics import LEGEND, PREDICTED, SKIPPED, StepMeasure, format_line
from multipack.training.observer import RunStopped
from multipack.training.precision import deterministic
from multipack.training.run_report import corpus_notes, plan_rows, stream_rows
from multipack.training.schedule import learning_rate
from multipack.training.session import Session

if TYPE_CHECKING:
    from multipack.training.run_config import Config


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        run: its directory.
        step: steps taken.
        val_loss: of the last evaluation; None without one.
        stopped_by: the signal that stopped it early; None when it ran to its end.
        comparison: what padding would have cost; None where it was not measured.
    """

    run: str
    step: int
    val_loss: float | None
    stopped_by: signal.Signals | None
    comparison: Comparison | None


class StopRequest:
    """SIGTERM and Ctrl-C ask the loop to save and stop; a second Ctrl-C interrupts at once."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt  # of waiting for documents that have not arrived
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        self._interrupt()


def train(config: Config, clock: Callable[[], float] = time.perf_counter) -> RunResult:
    """Run what `config` says, from assembling documents to the last checkpoint.

    Args:
        config: resolved; see `multipack.training.run_config.compose_run`.
        clock: seconds; replaced in tests.

    Raises:
        ValueError: the configuration does not fit the documents, device or world.
        FileExistsError: the run directory is taken.
        RunStopped: training diverged (NonFiniteLoss) or a guard ended it; the last checkpoint is untouched, and named.
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
        session = assemble(config, world, console, clock)
        first = session.step
        try:
            _introduce(session, clock() - began)
            with StopRequest(session.feed.interrupt) as stop:
                val_loss = _loop(session, stop)
            if session.feed.late:
                raise ValueError(f"{session.feed.late} (the run is saved after step {session.step})")
            # From here on everything is saved: a signal may end the process at once.
            early = stop.signal if stop.signal is not None and session.step < session.steps else None
            comparison = _compare(session) if stop.signal is None and session.step > first else None
            result = RunResult(str(session.run.path), session.step, val_loss, early, comparison)
            _conclude(session, result)
        except BaseException as error:
            session.close(failed=True)
            if isinstance(error, RunStopped):
                raise type(error)(f"{error}. Last good checkpoint: {session.last_checkpoint()}") from error
            raise
        session.close()
    return result


def _loop(session: Session, stop: StopRequest) -> float | None:
    """Train to the last step, or until something ends the run; returns the last validation loss."""
    clock = session.clock
    last = session.step if session.config.train.eval_only else session.steps
    val_loss = None
    if _evaluation_due(session, session.step == last):  # also of a run that was stopped between a step and it
        val_loss = _evaluate(session)
        if session.step and _is_best(session):
            session.save()
    feed = iter(session.feed)
    with session.console.progress("training") as advance:
        mark = clock()
        while session.step < last and not session.ending:
            session.observers.before_step(session.step + 1)
            data = next(feed, None)
            if data is None and session.feed.ended:
                session.ending = "the stream of documents has ended"
            elif (
                data is None
            ):  # this rank or another was asked to stop, or gave up, while it waited for documents
                _interrupt(session, stop)
            else:
                mark = _step(session, data, stop, mark, advance)
            final = session.step == last or bool(session.ending)
            if not session.interrupted and _evaluation_due(session, final):
                val_loss = _evaluate(session)
                mark = clock()
            if _checkpoint_due(session, final or bool(session.ending)):
                session.save()
                mark = clock()
    return val_loss


def _step(
    session: Session, data: StepData, stop: StopRequest, mark: float, advance: Callable[..., None]
) -> float:
    """One global step: forward and backward passes, clipping, optimizer, records. Returns when it ended."""
    config, engine, observers, clock = session.config, session.engine, session.observers, session.clock
    number = session.step + 1
    rate = session.lr_factor * learning_rate(number, session.steps, config.optimizer)

    def watch(index: int) -> None:
        own = sum(batch.denominator for batch in data.micro_batches[: index + 1])
        observers.micro_batch(index, engine, float(own), float(data.denominator))

    result = engine.forward_backward(data.micro_batches, data.denominator, watch)
    loss_sum, slots = _agree(session, data, result, stop)
    middle = clock()
    found = observers.gradient(number, engine)
    norm = engine.clip(config.optimizer.clip)
    applied = _may_apply(session, data, loss_sum, norm)
    if applied:
        engine.step(rate)
    else:
        engine.discard()
    session.step = number
    observers.after_step(number, engine, applied)
    engine.world.synchronize()
    now = clock()
    measure = _measure(session, data, result, loss_sum, slots, rate, norm, (now - mark, now - middle))
    session.prediction.add(measure.predicted_seconds, result.forward_seconds + result.backward_seconds)
    _record(session, replace(measure, skipped=not applied), found, advance)
    return now


def _agree(session: Session, data: StepData, result: StepResult, stop: StopRequest) -> tuple[float, float]:
    """Sum over ranks what all must know alike: the loss, the slots, a wish to stop, and which packs went wrong.

    Raises:
        NonFiniteLoss: on every rank, naming the documents of the packs whose loss is not finite.
    """
    world, mesh, packs = session.world, session.engine.mesh, len(result.losses)
    broken = [0.0] * (packs * mesh.data_size)
    for index, loss in enumerate(result.losses):
        broken[index * mesh.data_size + mesh.data_rank] = 0.0 if math.isfinite(loss) else 1.0
    finite_loss = sum(loss for loss in result.losses if math.isfinite(loss))
    own_slots = float(sum(batch.num_slots for batch in data.micro_batches)) if mesh.is_replica_leader else 0.0
    asked = float(stop.signal or 0)
    loss_sum, slots, asked, *flags = world.sum([finite_loss, own_slots, asked, *broken])
    if any(flags):
        documents = [int(number) for pack, flag in enumerate(flags) if flag for number in data.packs[pack]]
        # Of the very packs that went wrong.
        session.diverged(
            f"the loss of step {session.step + 1} is not finite; the step was not applied", documents
        )
    if asked:
        _interrupt(session, stop)
    return loss_sum, slots


def _interrupt(session: Session, stop: StopRequest) -> None:
    """All ranks know that one was asked to stop: each ends with this step, and none of them evaluates."""
    stop.signal = stop.signal or signal.SIGTERM  # another rank was asked; this one stops with it
    session.ending, session.interrupted = stop.signal.name, True


def _may_apply(session: Session, data: StepData, loss_sum: float, norm: float) -> bool:
    """Whether the step's gradient is applied: not where it overflowed in fp16, or an observer leaves the step out.

    Raises:
        NonFiniteLoss: the gradient is not finite, and that is no overflow.
    """
    if session.engine.overflowed:
        if session.engine.loss_scale < 1:
            what = f"the gradient of step {session.step + 1} overflows fp16 however little the loss is scaled"
            session.diverged(f"{what}; train in bf16 or fp32", [int(number) for number in data.documents])
        return False
    if not math.isfinite(norm):
        what = f"the gradient of step {session.step + 1} is not finite; the step was not applied"
        session.diverged(what, [int(number) for number in data.documents])
    return session.observers.judge(session.step + 1, loss_sum / max(data.denominator, 1), norm) == "apply"


def _measure(
    session: Session,
    data: StepData,
    result: StepResult,
    loss_sum: float,
    slots: float,
    rate: float,
    norm: float,
    times: tuple[float, float],
) -> StepMeasure:
    return StepMeasure(
        step=session.step,
        loss_sum=loss_sum,
        target_tokens=data.target_tokens,
        denominator=data.denominator,
        documents=len(data.documents),
        tokens=int(data.lengths.sum()),
        slots=int(slots),
        flops=session.cost_model.flops(data.lengths),
        seconds=times[0],
        forward_seconds=result.forward_seconds,
        backward_seconds=result.backward_seconds,
        optimizer_seconds=times[1],
        data_seconds=data.wait_seconds,
        devices=session.world.size,
        peak_flops=session.peak_flops,
        learning_rate=rate,
        grad_norm=norm,
        cost_spread=data.cost_spread,
        predicted_seconds=data.predicted_seconds if session.predicts else None,
    )


def _record(
    session: Session, measure: StepMeasure, found: dict[str, float], advance: Callable[..., None]
) -> None:
    values = {**measure.metrics(), **found}
    session.running.add(measure.loss_sum, measure.denominator)
    _publish(session, values)
    advance(session.step, session.steps, f"loss {values['loss']:.3f}")
    every = session.config.log.every
    if every and (session.step % every == 0 or session.step == 1):
        session.console.line(format_line(values))


def _publish(session: Session, values: dict[str, float]) -> None:
    """Append a record to metrics.jsonl and hand it to whoever else keeps records."""
    if session.ledger is not None:
        session.ledger.record(values)
        session.observers.record(values)


def _evaluation_due(session: Session, final: bool) -> bool:
    train, step = session.config.train, session.step
    due = train.eval_every > 0 and (step % train.eval_every == 0 or final)
    return train.eval_only or (due and session.evaluated != step)


def _checkpoint_due(session: Session, final: bool) -> bool:
    every = session.config.train.checkpoint_every or session.config.train.eval_every
    return final or _is_best(session) or (every > 0 and session.step % every == 0)


def _is_best(session: Session) -> bool:
    """Whether the weights are those with the lowest validation loss so far."""
    return not session.config.train.eval_only and session.best_step == session.step


def _evaluate(session: Session) -> float:
    """Validation loss on all ranks, with the run's weights and those of observers, and a sample from rank 0."""
    assert session.validation is not None
    losses: dict[str, float] = {}
    for suffix, weights in session.observers.weightings(session.engine):
        with weights:
            loss = validation_loss(
                session.engine, session.validation, session.validation_packs, session.feed.micro_batches
            )
        losses[f"val_loss{suffix}"] = loss
    values: dict[str, float] = {"step": session.step}
    train_loss = session.running.take()
    if train_loss is not None:
        values["train_loss"] = train_loss
    values |= {**losses, **session.objective.evaluated(session.engine)}
    session.evaluated = session.step
    session.look_again_at_peak()
    session.console.line(f"evaluation {format_line(values)}", style="bold")
    val_loss = losses["val_loss"]
    if not math.isfinite(val_loss):
        session.diverged(f"the validation loss after step {session.step} is not finite", [])
    _publish(session, values)
    if not session.config.train.eval_only:
        session.improve(val_loss)
        session.ending = session.ending or session.observers.evaluated(session.step, val_loss)
    _sample(session)
    return val_loss


def _sample(session: Session) -> None:
    """What the model writes at an evaluation."""
    train = session.config.train
    prompts = [train.sample_prompt] if train.sample_prompt else session.corpus.prompts
    if not prompts or not train.sample_tokens:
        return
    prompt = prompts[(session.step // max(train.eval_every, 1)) % len(prompts)]
    with session.engine.gathered() as model:
        if model is None:
            return
        sampling = Sampling(
            train.sample_tokens,
            train.sample_temperature,
            train.sample_top_k,
            seed=train.seed + session.step,
        )
        (completion,) = complete_batch(cast(Decoder, model), session.corpus.tokenizer, [prompt], sampling)
        text = completion.text
    if session.ledger is not None:
        session.ledger.samples.write(f"=== step {session.step}\n{prompt}▌{text}\n\n")
        session.observers.sample(session.step, f"{prompt}▌{text}")
    session.console.line("\n".join("    " + line for line in f"{prompt}▌{text}".splitlines()))


def _compare(session: Session) -> Comparison | None:
    train, plan = session.config.train, session.feed.plan
    if plan is None or not train.compare_padding or session.world.size > 1:
        return None
    session.console.line(
        "\nmeasuring what padding would have cost: the same documents, packed and padded by turns …"
    )
    try:
        return compare_with_padding(
            session.engine,
            session.corpus.train,
            plan,
            batch_size=train.padded_batch_size,
            clock=session.clock,
        )
    except torch.OutOfMemoryError:
        session.console.line(f"padded batches of {train.padded_batch_size} documents do not fit into memory")
        return None


def _introduce(session: Session, seconds: float) -> None:
    console = session.console
    console.section("run", header_rows(session))
    if console.enabled:
        ranks = session.engine.mesh.data_size
        plan, sync = session.feed.plan, session.config.parallel.sync
        rows = stream_rows(session) if plan is None else plan_rows(session, report(plan, ranks, sync))
        console.section("plan", rows)
    legend = LEGEND | session.observers.legend
    if session.cost_model.timed is not None and session.predicts:
        legend["dt_predicted"] = PREDICTED
    if session.config.train.dtype == "fp16":
        legend["skipped"] = SKIPPED
    console.table("legend", ["metric", "meaning"], list(legend.items()))
    for note in session.notes:
        console.paragraph(f"note: {note}")
    start = f"continuing after step {session.step}" if session.step else "starting"
    console.line(f"\nstart-up time {seconds:.1f} s; {start}, {session.steps} steps in all")
    if session.step >= session.steps and not session.config.train.eval_only:
        console.line(f"nothing to train: the run has taken {session.step} steps; raise train.steps to go on")


def _conclude(session: Session, result: RunResult) -> None:
    console, run, found = session.console, session.run, result.comparison
    if session.corpus.arriving is not None and (notes := corpus_notes(session.corpus)):
        console.section("what arrived", notes)
    if session.ending and result.stopped_by is None:
        console.line(f"\nended after step {result.step} of {session.steps}: {session.ending}")
    if result.stopped_by is not None:
        console.line(
            f"\n{result.stopped_by.name}: saved after step {result.step} of {session.steps}; go on with"
            f" `multipack train train.resume=true out={run.path}`"
        )
    if found is not None:
        console.section(
            "what padding would have cost (measured in this run)",
            [
                ("packed", f"{found.packed_tokens_per_second:,.0f} real tokens/s"),
                (
                    "padded",
                    f"{found.padded_tokens_per_second:,.0f} real tokens/s (random batches of {found.batch_size},"
                    f" {100 / found.pad_factor:.1f} % real tokens)",
                ),
                ("packed / padded", f"{found.ratio:.2f} x (over {found.steps} pairs of steps)"),
                ("pad factor", f"{found.pad_factor:.2f} (slots that padding computes per real token)"),
            ],
        )
    if session.prediction.steps:
        console.section("predicted and measured time", session.prediction.rows())
    written = [("config", run.config), ("metrics", run.metrics), ("samples", run.samples)]
    rows = [(name, str(path)) for name, path in written]
    if run.latest.is_file():
        rows.append(("checkpoint", str(run.latest_checkpoint())))
    if session.corpus.arriving is None:  # documents that arrive may never have been a store
        rows.append(("token store", str(session.corpus.store_path)))
    console.section("written", rows)
    if result.val_loss is not None and session.evaluated == result.step:
        console.line(f"\nfinal validation loss {result.val_loss:.4f} after {result.step} steps")
