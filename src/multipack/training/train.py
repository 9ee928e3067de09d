"""`train`: a run from its configuration to its closing report."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Timer
from typing import TYPE_CHECKING

from multipack.parallel.failures import LostRank
from multipack.parallel.ranks import find_ranks
from multipack.parallel.world import World
from multipack.reports.console import Console
from multipack.training.assemble import assemble, run_world
from multipack.training.callbacks.callback import RunStopped
from multipack.training.checks import check
from multipack.training.run_config import Config
from multipack.training.run_report import end_record, print_header, print_result
from multipack.training.trainer import Trainer

if TYPE_CHECKING:
    from multipack.training.compare import Comparison

CLOSE_SECONDS = 30.0
"""Time that a failed rank waits for its threads, such as one that writes a checkpoint."""


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


def train(
    config: Config, clock: Callable[[], float] = time.perf_counter, *, compare_padding: bool = False
) -> RunResult:
    """Train a model: read documents, plan, train, evaluate, save checkpoints, and print a report.

    Args:
        config: configuration of the run; see `multipack.training.run_config.compose_run`.
        clock: returns seconds; replaced in tests.
        compare_padding: measure the cost of padding after the last step; in one process, and not with a stream.

    Raises:
        ValueError: the configuration does not fit the documents, the device or the ranks.
        FileExistsError: the run directory holds another run.
        RunStopped: training diverged (NonFiniteLoss) or a callback stopped it; the message names the last checkpoint.
    """
    began = clock()
    config = replace(config, data=config.data.dated())
    ranks = find_ranks(os.environ)
    console = Console(ranks.rank)
    check(config, ranks.size)
    with run_world(config) as world:
        trainer = Trainer(assemble(config, world, console, clock), console)
        first = trainer.step
        try:
            print_header(trainer, clock() - began)
            with trainer.stop:
                trainer.loop()
            if trainer.feed.late:
                raise ValueError(f"{trainer.feed.late} (the run is saved after step {trainer.step})")
            # The loop has saved everything, and `trainer.stop` no longer handles signals: they end the process.
            stopped = trainer.stop.signal
            compared = compare_padding and stopped is None and trainer.step > first
            result = RunResult(
                run=str(trainer.run.path),
                step=trainer.step,
                val_loss=trainer.val_loss,
                stopped_by=stopped if trainer.step < trainer.steps else None,
                comparison=_compare_padding(trainer, clock) if compared else None,
            )
            print_result(trainer, result.stopped_by, result.comparison)
        except BaseException as error:
            failure = _error_to_raise(trainer, error)
            with suppress(OSError):  # a full disk may be the failure
                if trainer.files.log is not None:
                    trainer.files.log.event(
                        "end", end_record(trainer, str(failure) or type(failure).__name__)
                    )
            with _closing(world, failure):
                trainer.close(failed=True)
            if failure is error:
                raise
            raise failure from (None if isinstance(failure, LostRank) else error)
        trainer.close()
    return result


def _error_to_raise(trainer: Trainer, error: BaseException) -> BaseException:
    """The error with the name of the last checkpoint or of the missing rank; with several ranks one prints it."""
    if not isinstance(error, RunStopped):
        return trainer.world.watch.report(error)
    run = trainer.run
    last = run.latest_checkpoint() if run.latest.is_file() else "none so far"
    error = type(error)(f"{error}. Last good checkpoint: {last}").with_traceback(error.__traceback__)
    return trainer.world.watch.report(error, one_line=True)


@contextmanager
def _closing(world: World, failure: BaseException) -> Iterator[None]:
    """Context in which the files of a rank that failed are closed.

    One of several ranks ends its process after CLOSE_SECONDS: a thread may wait for a rank that is lost.
    """
    code = 2 if isinstance(failure, (ValueError, OSError, RunStopped)) else 1
    timer = Timer(CLOSE_SECONDS, os._exit, [code])
    timer.daemon = True
    if world.size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _compare_padding(trainer: Trainer, clock: Callable[[], float]) -> Comparison | None:
    """Time the same documents packed and padded; None with a stream or several ranks, or where memory is too small."""
    import torch

    plan, console = trainer.feed.plan, trainer.console
    if plan is None or trainer.world.size > 1:
        return None
    console.line(
        "\nmeasuring the cost of padding: alternating packed and padded steps on the same documents …"
    )
    from multipack.training.compare import compare_with_padding

    slots = trainer.config.pack_slots
    try:
        return compare_with_padding(trainer.engine, trainer.corpus.train, plan, clock=clock, pad_to=slots)
    except torch.OutOfMemoryError:
        console.line("padded batches do not fit into memory")
        return None
