"""`audit`: checks from a run directory alone that every document of every epoch was trained exactly once.

    documents.jsonl   the documents of each step, and in an epoch's first step the documents that it carries and drops
    metrics.jsonl     the numbers of steps and of documents, and which steps were skipped: written apart
    checkpoints       the position from which a run resumes, and the hash of documents.jsonl at that step

An epoch of N documents is exact if the documents that it trains, drops and carries are the documents 0 … N − 1 and the
documents that it received from the epoch before, each once. An epoch that has not ended must not repeat any.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multipack.atomic import read_file
from multipack.checksums import begins_with
from multipack.reports.recorded import integers, whole
from multipack.reports.run_data import Columns, Lines, RunData
from multipack.run import STATE, RunDirectory

Integers = NDArray[np.int64]

NONE: Integers = np.empty(0, dtype=np.int64)
MOST_NAMED = 5
"""Documents or steps that a sentence names."""


@dataclass
class EpochAudit:
    """The documents of an epoch.

    Attributes:
        epoch: number of the epoch, from 0.
        total: number of documents, without carried-in ones; None = unknown, as for a stream or without a first step.
        steps, planned: recorded steps, and steps of its plan (None: unknown).
        trained: documents in these steps, each counted as often as it was trained.
        carried_in, carried, dropped: numbers of documents.
        repeated, lost: numbers of documents trained too often, and of documents in no step.
        is_complete: whether its last step is recorded.
    """

    epoch: int
    total: int | None
    steps: int
    planned: int | None
    trained: int
    carried_in: int
    carried: int
    dropped: int
    repeated: int
    lost: int
    is_complete: bool


@dataclass
class Audit:
    """The result of `audit`: `problems` is empty if every document is accounted for; `notes` are other remarks."""

    epochs: list[EpochAudit] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Plan(NamedTuple):
    """The record of an epoch's plan with its first step; nothing is known without it."""

    documents: int | None = None
    steps: int | None = None
    carried_in: Integers = NONE
    carried: Integers = NONE
    dropped: Integers = NONE
    is_damaged: bool = False

    @classmethod
    def of(cls, record: Any) -> _Plan:
        """Read a record; None = there is none."""
        if not isinstance(record, dict):
            return cls()
        values: list[Any] = [whole(record.get(name)) for name in ("documents", "steps")]
        values += [integers(record.get(name)) for name in ("carried_in", "carried", "dropped")]
        return cls(is_damaged=True) if any(each is None for each in values) else cls(*values)


@dataclass(frozen=True)
class _Step:
    """A record of documents.jsonl."""

    step: int
    epoch: int
    index: int  # in the epoch, from 0
    documents: Integers
    plan: _Plan

    @classmethod
    def of(cls, record: dict[str, Any]) -> _Step | None:
        """Read a record; None = it is not of a step."""
        documents = integers(record.get("documents"))
        step, epoch, index = (whole(record.get(name)) for name in ("step", "epoch", "index"))
        if documents is None or step is None or epoch is None or index is None:
            return None
        return cls(step, epoch, index, documents, _Plan.of(record.get("plan") if index == 0 else None))


Recorded = dict[int, tuple[int, int, int]]
"""Step → its epoch, steps of the epoch up to this one, and number of documents."""


def audit(path: str | Path) -> Audit:
    """Account for every document of a run.

    Raises:
        FileNotFoundError: `path` is not a run directory.
        ValueError: the run has no documents.jsonl: it is of an earlier version, or of log.documents=false.
    """
    data = RunData(path)
    run = data.run
    if not run.documents.exists() or not run.documents.stat().st_size:
        raise ValueError(
            f"{run.path} has no record of documents ({run.documents.name}): no step was taken, or the run is of an"
            " earlier version or of log.documents=false"
        )
    found, recorded, lines = Audit(), Recorded(), Lines(run.documents)
    starts = [whole(event.get("step")) or 0 for event in data.history if event.get("event") == "start"]
    records = _in_order(lines, min(starts, default=0) + 1, found, recorded)
    epochs = (list(steps) for _, steps in groupby(records, key=lambda record: record.epoch))
    carried: Integers | None = None
    for steps, following in pairwise(chain(epochs, [None])):
        assert steps is not None
        carried = _account(steps, following is None, carried, _end_of_stream(data.history), found)
    if lines.torn:
        found.notes.append(
            "the last line of documents.jsonl is incomplete: its writer was killed, or is writing"
        )
    found.problems += [problem for problem in lines.problems if "cannot be read" in problem]
    _compare_metrics(data.steps, recorded, found)
    _compare_checkpoints(run, recorded, found)
    return found


def _in_order(lines: Lines, first: int, found: Audit, recorded: Recorded) -> Iterator[_Step]:
    """The records; adds to `recorded`, and to `found` where steps, epochs and indices do not follow each other.

    `first` is the first step of the first process that wrote records: above 1 where an earlier version began the run.
    """
    before: _Step | None = None
    for number, values in lines.new():
        record = _Step.of(values)
        if record is None:
            found.problems.append(f"documents.jsonl: line {number} is no record of a step")
            continue
        step, epoch, index = record.step, record.epoch, record.index
        expected = index if before is None else before.index + 1 if before.epoch == epoch else 0
        if before is None and step != first:
            found.problems.append(
                f"documents.jsonl begins with step {step:,}, and its run with step {first:,}"
            )
        elif before is None and step > 1:
            found.notes.append(
                f"documents are recorded from step {step:,} on: steps before it are not audited"
            )
        elif before is not None and step != before.step + 1:
            found.problems.append(
                f"documents.jsonl: step {step:,} follows step {before.step:,} in line {number}"
                + (f": {step - before.step - 1:,} steps have no record" if step > before.step else "")
            )
        if before is not None and epoch not in (before.epoch, before.epoch + 1):
            found.problems.append(f"epoch {epoch:,} follows epoch {before.epoch:,} in step {step:,}")
        if index != expected:
            found.problems.append(
                f"step {step:,} is step {index:,} of epoch {epoch:,}, and step {expected:,} is expected"
            )
        recorded[step] = epoch, index + 1, len(record.documents)
        before = record
        yield record


def _account(
    steps: list[_Step],
    is_last: bool,
    carried: Integers | None,
    stream: tuple[Integers, int] | None,
    found: Audit,
) -> Integers | None:
    """Account for the documents of an epoch; returns the documents that it carries, None if unknown.

    Args:
        steps: the records of the epoch.
        is_last: whether no record of another epoch follows.
        carried: documents that the epoch before carried; None: unknown.
        stream: leftover documents and number of documents of a stream that has ended.
        found: gets the epoch, and problems.
    """
    number, plan, done = steps[0].epoch, steps[0].plan, steps[-1].index + 1
    name, trained = f"epoch {number}", np.concatenate([each.documents for each in steps])
    if plan.is_damaged:
        found.problems.append(f"{name}: the record of its plan is damaged")
    is_complete = plan.steps is not None and done == plan.steps
    if plan.steps is not None and not is_complete and not is_last:
        found.problems.append(f"{name}: another epoch follows after {done:,} of its {plan.steps:,} steps")
        is_complete = True  # no step of it will follow
    if plan.steps is None or carried is None:
        carried = plan.carried_in
    if not np.array_equal(np.sort(carried), np.sort(plan.carried_in)):
        found.problems.append(
            f"{name}: it begins with {_named('document', plan.carried_in)} carried in, but the epoch before carried"
            f" {_named('document', carried)}"
        )
    if stream is not None and plan.steps is None and number == 0:
        plan, is_complete = plan._replace(dropped=stream[0], documents=stream[1]), True
    everything = np.concatenate([trained, plan.carried, plan.dropped])
    total = plan.documents if is_complete else None
    repeated, lost, lost_count = _repeated_and_lost(everything, plan.carried_in, total)
    if plan.documents is not None:
        foreign = trained[trained >= plan.documents]
        if len(foreign):
            found.problems.append(
                f"{name}: {_named('document', foreign)} trained, and there are {plan.documents:,} (from 0)"
            )
    found.problems += _repetitions(name, steps, plan, repeated)
    if lost_count:
        found.problems.append(
            f"{name}: {_named('document', lost, lost_count)} lost: in no step, not carried, not dropped"
        )
    found.epochs.append(
        EpochAudit(
            epoch=number,
            total=plan.documents,
            steps=len(steps),
            planned=plan.steps,
            trained=len(trained),
            carried_in=len(plan.carried_in),
            carried=len(plan.carried),
            dropped=len(plan.dropped),
            repeated=len(repeated),
            lost=lost_count,
            is_complete=is_complete,
        )
    )
    return plan.carried if is_complete else None


def _repeated_and_lost(
    documents: Integers, twice: Integers, total: int | None
) -> tuple[Integers, Integers, int]:
    """Documents that occur too often; too rarely of `total`, None: none of them; and the number of these.

    A document may occur 1 + n times, if it is n times in `twice`. Of the lost documents at least some are returned.
    """
    values, counts = np.unique(documents, return_counts=True)
    again = np.sort(twice)
    allowed = 1 + np.searchsorted(again, values, "right") - np.searchsorted(again, values)
    repeated, fewer = values[counts > allowed], values[counts < allowed]
    if total is None:
        return repeated, NONE, 0
    inside = np.concatenate([[-1], values[values < total], [total]])
    widths = np.diff(inside) - 1
    gaps = np.flatnonzero(widths)[:MOST_NAMED]  # `total` may be huge: no array has this length
    shown = [inside[gap] + 1 + np.arange(min(widths[gap], MOST_NAMED)) for gap in gaps.tolist()]
    return repeated, np.unique(np.concatenate([*shown, fewer])), int(widths.sum()) + len(fewer)


def _repetitions(name: str, steps: list[_Step], plan: _Plan, repeated: Integers) -> Iterator[str]:
    """The steps of each of the first repeated documents of an epoch, and the number of others."""
    lists = [(f"step {each.step:,}", each.documents) for each in steps]
    lists += [("the carried documents", plan.carried), ("the dropped documents", plan.dropped)]
    for document in repeated[:MOST_NAMED].tolist():
        places = [place for place, each in lists for _ in range(int((each == document).sum()))]
        yield f"{name}: document {document:,} is repeated: it is in {' and in '.join(places)}"
    if len(repeated) > MOST_NAMED:
        yield f"{name}: {len(repeated) - MOST_NAMED:,} more documents are repeated"


def _end_of_stream(events: list[dict[str, Any]]) -> tuple[Integers, int] | None:
    """Leftover documents and number of documents of a stream; None if the history does not end with its end."""
    last = events[-1] if events else {}
    left, total = integers(last.get("dropped")), whole(last.get("documents"))
    return None if left is None or total is None else (left, total)


def _compare_metrics(metrics: Columns, recorded: Recorded, found: Audit) -> None:
    """Compare steps and numbers of documents with metrics.jsonl, and name steps that were skipped."""
    rows = list(zip(*(metrics.column(name) for name in ("step", "sps", "dt", "skipped")), strict=True))
    first, last = min(recorded, default=1), max(recorded, default=0)
    known = {int(step) for step, *_ in rows if step >= first}
    if missing := sorted(known - recorded.keys()):
        found.problems.append(f"metrics.jsonl has {_named('step', missing)} without documents")
    if missing := sorted(recorded.keys() - known - {last}):  # documents are written first
        found.problems.append(f"documents.jsonl has {_named('step', missing)} without metrics")
    different = []
    for step, rate, seconds, _ in rows:  # documents per second, seconds of the step
        if step in recorded and seconds > 1e-9 and 0.5 < abs(rate * seconds - recorded[int(step)][2]) < 1e15:
            different.append(int(step))
    if different:
        found.problems.append(
            f"metrics.jsonl counts other numbers of documents in {_named('step', different)}"
        )
    if skipped := sorted(int(step) for step, *_, was_skipped in rows if was_skipped > 0):
        found.notes.append(
            f"skipped, by fp16 overflow or a spike: the documents of {_named('step', skipped)} changed no weight"
        )


def _compare_checkpoints(run: RunDirectory, recorded: Recorded, found: Audit) -> None:
    """Compare positions and hashes that checkpoints saved with documents.jsonl, and say what a resume repeats."""
    steps = []
    for folder in run.complete_checkpoints():
        try:
            state = json.loads(read_file(folder / STATE))
            step, data, marks = whole(state["step"]), state["progress"]["data"], state["progress"]["marks"]
            # Of a stream: steps of earlier windows, and of this window.
            done = whole(data["step"] + data.get("taken", 0))
            place = whole(data.get("epoch", 0)), done
            mark, metrics = marks.get("documents"), marks["metrics"]
            agrees = mark is None or _begins_with(run.documents, mark)
            is_cut_off = not agrees and not _begins_with(run.metrics, metrics)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            command = shlex.join(["multipack", "doctor", str(run.path)])
            found.notes.append(f"{folder.name} cannot be read; `{command}` says why")
            continue
        if is_cut_off:
            found.notes.append(
                f"{folder.name} is of steps that a resume from an older checkpoint has cut off"
            )
            continue
        steps.append(step or 0)
        if not agrees:
            found.problems.append(
                f"documents.jsonl does not begin with what {folder.name} recorded: it was edited"
            )
        if step in recorded and place != recorded[step][:2]:
            at, done, _ = recorded[step]
            found.problems.append(
                f"{folder.name} resumes in epoch {place[0]} after {place[1]} steps, and documents.jsonl has epoch {at}"
                f" after {done}"
            )
    last = max(recorded, default=0)
    if steps and max(steps) < last:
        later = _named("step", range(max(steps) + 1, last + 1))
        found.notes.append(
            f"after the last checkpoint: {later}; resuming cuts the record and trains them again"
        )


def _begins_with(path: Path, mark: dict[str, Any]) -> bool:
    """Whether a file begins with the bytes of a mark."""
    size = whole(mark.get("bytes"))
    return size is not None and begins_with(path, size, str(mark.get("sha256")))


def _named(noun: str, numbers: Sequence[int] | Integers, count: int | None = None) -> str:
    """`step 5`, or `7 steps (1, 2, 3, 4, 5, …)`; `numbers` are some of `count`."""
    count = len(numbers) if count is None else count
    shown = ", ".join(f"{number:,}" for number in numbers[:MOST_NAMED])
    if count == 1:
        return f"{noun} {shown}"
    return f"{count:,} {noun}s" + (f" ({shown}{', …' if count > MOST_NAMED else ''})" if shown else "")
