"""`multipack doctor RUN`: checks that a run directory is complete and undamaged, and where the run would resume."""

from __future__ import annotations

import json
import math
import operator
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from multipack.atomic import PARTIAL
from multipack.machine import Finding, Status
from multipack.run import RunDirectory, check_format, find_run, resume_command
from multipack.training.checkpoint import Checkpoint, check_progress, damage, load_checkpoint
from multipack.training.run_config import compose
from multipack.training.run_files import divide_log
from multipack.words import read_yaml

FINITE = ("loss", "val_loss", "train_loss", "lr")
"""Values of records that are never infinite or NaN."""


def examine_run(path: Path, progress: Callable[[str], None] = lambda area: None) -> list[Finding]:
    """Check the files of a run without changing any.

    Args:
        path: the run directory, or one of its checkpoints.
        progress: called with the name of a part before it is checked.

    Raises:
        FileNotFoundError: `path` is neither.
    """
    run, _ = find_run(path)
    opened: dict[str, Checkpoint] = {}
    checks = {
        "files": _files(run),
        "checkpoints": _checkpoints(run, opened),
        "records": _records(run),
        "resume": _resume(run, opened),
    }
    found: list[Finding] = []
    for area, findings in checks.items():
        progress(area)
        found += [replace(finding, area=area) for finding in findings]
    return found


def _files(run: RunDirectory) -> Iterator[Finding]:
    """Check the configuration, and leftovers of killed processes."""
    try:
        compose([], read_yaml(run.config))
        yield Finding("config.yaml", "ok", "readable")
    except (ValueError, OSError) as error:
        yield Finding(
            "config.yaml", "fail", str(error), "restore it, or copy config.yaml of the latest checkpoint"
        )
    folders = [path for path in (run.path, run.checkpoints) if path.is_dir()]
    left = [path for folder in folders for path in folder.glob(".*") if path.suffix in (PARTIAL, ".old")]
    if left:
        names = ", ".join(path.name for path in left[:3])
        remedy = (
            "nothing: the next checkpoint removes what is in checkpoints/ (if no process is writing it now)"
        )
        yield Finding("leftovers", "warn", f"{len(left)} of killed processes: {names}", remedy)


def _checkpoints(run: RunDirectory, opened: dict[str, Checkpoint]) -> Iterator[Finding]:
    """Check every checkpoint and the pointers to them; add undamaged ones to `opened`."""
    usable = set[str]()
    for path in sorted(run.checkpoints.glob("step-*")):
        remedy = f"restore it from a copy, or remove it: rm -r {shlex.quote(str(path))}"
        try:
            check_format(path)
        except ValueError as error:  # nothing is damaged: nothing is to be removed
            usable.add(path.name)
            reason, _, remedy = str(error).partition(": ")
            yield Finding(path.name, "fail", reason, remedy)
            continue
        try:
            checkpoint = load_checkpoint(path)
            check_progress(checkpoint)
        except (ValueError, OSError) as error:
            yield Finding(path.name, "fail", str(error), remedy)
            continue
        usable.add(path.name)
        opened[path.name] = checkpoint
        yield Finding(path.name, "ok", "complete, all checksums agree")
    newest = max(opened, default="")
    for file, digest in opened[newest].progress["files"].items() if newest else ():
        problem = damage(run.path, {file: digest}, checked=[file])
        status: Status = "fail" if problem else "ok"
        yield Finding(file, status, problem or "its checksum agrees", "restore it from a copy of the run")
    for pointer in (run.latest, run.best):
        where = shlex.quote(str(pointer))
        mend = f"echo {newest} > {where}" if newest and pointer == run.latest else f"rm {where}"
        if not pointer.is_file():
            if newest and pointer == run.latest:
                yield Finding(pointer.name, "warn", "missing; the newest complete checkpoint is taken", mend)
            continue
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
        if name in usable:
            yield Finding(pointer.name, "ok", name)
        else:
            reason = f"names {name[:40]!r}, which is not complete or damaged"
            yield Finding(pointer.name, "fail", reason, mend)


def _records(run: RunDirectory) -> Iterator[Finding]:
    """Check that metrics.jsonl has every step once, in order, with finite losses."""
    if not run.metrics.is_file():
        if run.has_checkpoints:
            yield Finding("metrics.jsonl", "fail", "missing", "restore it from a copy of the run")
        else:
            yield Finding("metrics.jsonl", "warn", "missing: no step was taken")
        return
    problems, step, evaluated, steps = [], 0, -1, 0
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    torn = bool(lines) and not lines[-1].endswith(b"\n")
    for number, line in enumerate(lines[: len(lines) - torn], start=1):
        try:
            record = json.loads(line)
            at, is_evaluation = operator.index(record["step"]), "val_loss" in record
            broken = [name for name in FINITE if not math.isfinite(record.get(name, 0))]
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
            problems.append(f"line {number} is no record")
            continue
        if broken:
            problems.append(f"line {number}: {broken[0]} is not finite")
        if not (at == step and evaluated < at if is_evaluation else at == step + 1):
            problems.append(f"line {number} has step {at} after step {step}")
        if is_evaluation:
            evaluated = at
        else:
            step, steps = at, steps + 1
    if problems:
        more = f" ({len(problems)} lines in all)" if len(problems) > 1 else ""
        yield Finding("metrics.jsonl", "fail", problems[0] + more, "restore it from a copy of the run")
    else:
        yield Finding("metrics.jsonl", "ok", f"{steps:,} steps, each once and in order")
    if torn:
        yield Finding(
            "last line", "warn", "incomplete: its writer was killed", "nothing: resuming cuts it off"
        )


def _follows(run: RunDirectory, checkpoint: Checkpoint | None) -> bool:
    """Whether the run log begins with what an undamaged checkpoint recorded, so that the run continues from it."""
    try:
        return checkpoint is not None and bool(divide_log(run, checkpoint.progress["marks"]))
    except (OSError, ValueError):
        return False


def _resume(run: RunDirectory, opened: dict[str, Checkpoint]) -> Iterator[Finding]:
    """Say what `train.resume=true` does."""
    command = resume_command(run.path)
    others = [path.name for path in run.complete_checkpoints() if _follows(run, opened.get(path.name))]
    try:
        if not run.has_checkpoints:
            run.check_unsaved()
            yield Finding("resume", "warn", "no checkpoint yet: the run starts again with step 1", command)
            return
        name = run.latest_checkpoint().name
        if name not in opened:
            raise ValueError(f"{name} cannot be read: see checkpoints, above")
        later = divide_log(run, opened[name].progress["marks"])["metrics"][1].count(b"\n")
    except (OSError, ValueError) as error:
        remedy = "restore it from a copy of the run"
        if others:
            remedy = shlex.join(["multipack", "train", f"train.resume={run.checkpoints / others[-1]}"])
        yield Finding("resume", "fail", str(error), remedy)
        return
    moved = f"; {later} later records move to metrics.jsonl.cut" if later else ""
    yield Finding("resume", "ok", f"continues after step {opened[name].step:,} ({name}){moved}")
