"""The output of a run: the header, from which the run can be understood later, and the closing report."""

from __future__ import annotations

import math
import platform
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import multipack
from multipack.data.text.skipped import counted
from multipack.data.views.corpus import Corpus
from multipack.hub import hub_name
from multipack.ops.attention.table import BACKENDS, backend_index
from multipack.parallel.world import hosts
from multipack.planning.report import PADDED_BATCH_SIZE, PlanReport, padded_share, report
from multipack.reports.console import LINE, Detail, folded, wrapped
from multipack.run import resume_command
from multipack.training.blueprint import kernels_of
from multipack.training.compare import Comparison
from multipack.training.metrics import LEGEND, loss_text
from multipack.training.optimizer import meta_parameters, optimizer_text, schedule_text
from multipack.training.precision import DTYPES
from multipack.training.trainer import Trainer
from multipack.words import as_text

if TYPE_CHECKING:
    from multipack.reports.summary import Rows

HEADER_LINES = 8
"""Lines that a run prints before the last line of a brief header, which counts the notes beyond them.

The evaluation before the first step adds a line."""
EXECUTION = ("dtype", "fixed_shape", "compile", "recompute", "tiles", "deterministic")
"""Settings of `TrainConfig` that say how steps are computed."""


class MeasuredPlan(NamedTuple):
    """The first epoch's plan: its report for the ranks of the run, and the share of tokens in padded batches' slots."""

    report: PlanReport
    padded_share: float

    def rows(self, run: Trainer, advice: Sequence[str] = ()) -> Rows:
        """The rows of the report."""
        from multipack.reports.summary import report_rows

        return report_rows(*self, PADDED_BATCH_SIZE, run.mesh.data_size, run.config.plan, advice)


def print_header(run: Trainer, seconds: float) -> None:
    """Print model, documents, plan and device; building the run took `seconds`.

    With `log.verbose`, also everything that the run resolved, the planner's report, and the legend of metrics.
    """
    console, config = run.console, run.config
    rows = header_rows(run)  # collective
    if run.files.log is None:
        return
    plan = measure_plan(run)
    run.files.log.event("start", start_record(run, rows, plan))
    if run.step >= run.steps:
        console.line(f"\nnothing to train: the run has taken {run.step} steps; raise train.steps to continue")
        return
    continuing = f"continuing after step {run.step:,} of {run.steps:,}"
    start = continuing if run.step else f"starting {counted(run.steps, 'steps')}"
    start = f"start-up time {seconds:.1f} s; {start}"
    if config.log.verbose:
        console.section("run", rows)
        console.section("plan", plan_rows(run, plan))
        console.table("legend", ["metric", "meaning"], [*{**LEGEND, **run.objective.legend}.items()])
        for note in run.notes:
            console.paragraph(f"note: {note}")
        console.line(start)
        return
    for name, text in brief_rows(run, plan):
        console.line(f"  {name:<9}  {wrapped(text, LINE, 13)}")
    notes = [f"note: {note}" for note in run.notes if not isinstance(note, Detail)]
    too_long, skipped = _left_out(run.corpus)
    if texts := [*skipped, *(f"{text} ({kind})" for kind, text in too_long)]:
        notes.insert(0, f"left out or changed: {'; '.join(texts)}")
    lines, left = folded(notes, HEADER_LINES - console.printed)
    for line in lines:
        console.line(line)
    more = f"; log.verbose=true prints {counted(left, 'more notes') if left else 'more'}"
    whole = f"{start} in {run.run.path}{more}"
    console.line(whole if len(whole) <= LINE else start + more)


def brief_rows(run: Trainer, plan: MeasuredPlan | None) -> Rows:
    """The rows of the brief header."""
    config, corpus, world = run.config, run.corpus, run.world
    start = config.train.init_from if run.resumed is None else ""
    style, count = _style(run), parameter_count(run)
    packs = f"{counted(config.plan.packs_per_step, 'packs')} of {config.plan.capacity:,} tokens a step"
    if plan is not None:
        found, share = plan
        filled = "real tokens over slots" if found.slots < found.tokens else "filled"
        packs += f": {found.efficiency:.1%} {filled} (padded rows: {share:.1%})"
        dropped = found.dropped_documents
        packs += f"; {counted(dropped, 'documents')} dropped" if dropped else ""
    held = f"; {len(corpus.validation):,} for validation" if len(corpus.validation) else ""
    parallel = config.parallel.text(world.size).removeprefix("none: ")
    divided = "" if parallel == "one process" else f"; {parallel}"
    ranks = f"{counted(world.size, 'processes')} on {_device(run)}, {config.train.dtype}{divided}"
    return [
        ("model", f"{style}, {count:,} parameters{f', from {hub_name(start)[0]}' if start else ''}"),
        *([("adapter", _adapter_text(run))] if run.engine.saved is not None else []),
        ("documents", f"{corpus.description}{held}"),
        ("plan", packs),
        ("device", f"{ranks}, {_kernels(run)}"),
        ("optimizer", f"{_optimizer(run).partition(';')[0]}: {_schedule(run)}"),
    ]


def print_result(run: Trainer, stopped_by: signal.Signals | None, comparison: Comparison | None) -> None:
    """Print how the run ended, and where its files are."""
    from multipack.reports.run_data import RunData
    from multipack.reports.run_page import loss_curve, write_page

    console, folder, log = run.console, run.run, run.files.log
    if log is None:
        return
    if run.corpus.arriving is not None:
        notes = corpus_notes(run.corpus) + [("note", text) for text in run.corpus.arriving.warnings]
        if notes:
            console.section("documents that arrived", notes)
    if stopped_by is not None:
        resume = f"resume with `{resume_command(folder.path)}`"
        console.line(f"\n{stopped_by.name}: saved after step {run.step} of {run.steps}; {resume}")
    elif run.ending:
        console.line(f"\nended after step {run.step} of {run.steps}: {run.ending}")
    if comparison is not None:
        console.section("cost of padding (measured in this run)", _comparison_rows(comparison))
        console.line("\nloss by step\n" + "\n".join(loss_curve(RunData(folder.path), LINE)))
    files = [folder.path, *([folder.latest_checkpoint()] if folder.latest.is_file() else [])]
    if run.corpus.arriving is None:  # a stream may never become a store
        files.append(run.corpus.store_path)
    console.line(f"\nwritten: {', '.join(map(str, files))}")
    if run.val_loss is not None and run.evaluated == run.step:
        found = {
            name.replace("_", " "): run.val_metrics.get(f"val_{name}") for name in run.objective.last_line
        }
        found |= run.val_losses
        shown = [f"{name} {value:.4f}" for name, value in found.items() if value is not None]
        loss = loss_text(run.val_loss, tokens=not run.objective.legend)
        console.line(wrapped(f"{', '.join([f'final {loss}', *shown])} after {run.step} steps", LINE))
    log.event("end", end_record(run, run.ending if stopped_by is None else stopped_by.name, comparison))
    console.line(f"page of this run: {write_page(folder)}")


def end_record(run: Trainer, reason: str, comparison: Comparison | None = None) -> dict[str, Any]:
    """The record of a process's end in history.jsonl; `reason` is empty after the last step."""
    record: dict[str, Any] = {"step": run.step, "reason": reason}
    if comparison is not None:
        record["comparison"] = asdict(comparison)
    return record | run.feed.ending


def header_rows(run: Trainer) -> Rows:
    """The device, the software, the model, the optimizer and the data of a run."""
    world, config, shape, saved = run.world, run.config, run.shape, run.engine.saved
    tokenizer = run.corpus.tokenizer
    return [
        ("device", _device(run)),
        ("backend", f"{world.backend}, {_kernels(run)}"),
        ("world size", counted(world.size, "processes")),
        ("parallel", config.parallel.text(world.size)),
        ("hosts", ", ".join(hosts(world))),
        ("launcher", f"{world.launcher}: {world.command}"),
        (
            "versions",
            f"multipack {multipack.__version__}, Python {platform.python_version()}, torch {torch.__version__},"
            f" numpy {np.__version__}",
        ),
        (
            "model",
            f"{_style(run)}, {shape.layers} layers, width {shape.d_model}, {shape.heads} heads"
            f" ({shape.kv_heads} kv), feed-forward {shape.d_ff}, vocabulary {shape.vocabulary_size:,}",
        ),
        ("parameters", f"{parameter_count(run):,}{' in fp32' if saved is None else ''}"),
        *([] if saved is None else _adapter_rows(run)),
        ("execution", " ".join(f"train.{name}={as_text(getattr(config.train, name))}" for name in EXECUTION)),
        ("optimizer", _optimizer(run)),
        ("learning rate", _schedule(run)),
        ("seed", str(config.train.seed)),
        ("corpus", run.corpus.description),
        ("corpus hash", run.corpus.corpus_hash[:16]),
        ("tokenizer", f"{tokenizer.vocabulary_size:,} tokens, hash {tokenizer.hash[:16]}"),
        ("run directory", str(run.run.path)),
    ]


def _device(run: Trainer) -> str:
    device, threads = run.world.device, counted(torch.get_num_threads(), "threads")
    return f"{device} ({torch.cuda.get_device_name(device) if device.type == 'cuda' else threads})"


def _kernels(run: Trainer) -> str:
    """The attention backend in effect, and the functions that Liger's kernels compute."""
    config, shape, device = run.config, run.shape, run.world.device
    if shape.architecture:
        attention = "multipack in transformers"
    elif config.parallel.context > 1 and config.parallel.context_method != "ulysses":
        attention = "planned"
    else:
        # Fields of `Request`: causal attention, whose results are not merged over ranks.
        properties = DTYPES[config.train.dtype], shape.head_width, shape.explicit_scores, True, False
        compiled = config.train.compile == "true"
        attention = BACKENDS[backend_index(config.model.attention, device, *properties, compiled)].name
    liger = kernels_of(config, shape, device)
    return f"attention {attention}" + (f", liger ({', '.join(liger)})" if liger else "")


def _style(run: Trainer) -> str:
    """The architecture by its family, or by the kind of its positions."""
    shape = run.shape
    if shape.architecture:
        return f"{run.config.model.architecture} in transformers"
    if not shape.family:
        return "Llama style" if shape.positions == "rope" else "GPT-2 style"
    from multipack.shapes.families import BY_TYPE

    return BY_TYPE[shape.family].title


def _optimizer(run: Trainer) -> str:
    return optimizer_text(meta_parameters(run.engine.shapes, run.engine.saved), run.config.optimizer)


def _schedule(run: Trainer) -> str:
    return schedule_text(run.config.optimizer, run.steps)


def _shapes(run: Trainer) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the model's own parameters; with adapters an engine has theirs, and quantized bytes."""
    if run.engine.saved is None:
        return run.engine.shapes
    from multipack.models.huggingface import parameter_shapes

    return parameter_shapes(run.shape)


def parameter_count(run: Trainer) -> int:
    """Number of parameters of the model, without adapters."""
    return sum(map(math.prod, _shapes(run).values()))


def _adapter_rows(run: Trainer) -> Rows:
    """Rows on adapters: trained matrices, and frozen weights."""
    adapter, shapes, saved = run.config.adapter, run.engine.shapes, run.engine.saved or ()
    held = "" if adapter.format else f", matrices in {run.config.train.dtype}"
    base = ("frozen weights", " at ".join(filter(None, hub_name(adapter.base))) + held)
    if adapter.format is None:
        return [("adapter", _adapter_text(run)), base]
    from multipack.ops.quantized import part_names

    codes = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(part_names("")[0]))
    count, form = codes * adapter.format.per_byte, adapter.format.text(adapter.double_quantize)
    others = sum(math.prod(shape) for name, shape in _shapes(run).items() if name not in saved)
    frozen = f"{count:,} frozen ones are in {form}, {others - count:,} are not quantized"
    return [("adapter", f"{_adapter_text(run)}; {frozen}"), base]


def _adapter_text(run: Trainer) -> str:
    """Kind, size and share of the adapters."""
    adapter, shapes, saved = run.config.adapter, run.engine.shapes, run.engine.saved or ()
    trained = sum(math.prod(shapes[name]) for name in saved)
    count = trained + sum(math.prod(shape) for name, shape in _shapes(run).items() if name not in saved)
    prefix, form = (adapter.format.prefix, f" in {adapter.format.title}") if adapter.format else ("", "")
    stabilized = ", rank-stabilized" if adapter.rank_stabilized else ""
    matrices = sum(name.endswith(".lora_a") for name in saved)
    whole = f", and {', '.join(adapter.train)} whole" if adapter.train else ""
    return (
        f"{prefix}{ {'lora': 'LoRA', 'dora': 'DoRA'}[adapter.name] } of rank {adapter.rank}, alpha {adapter.alpha:g}"
        f"{stabilized}, on {matrices} matrices{form}{whole}: {trained:,} parameters trained"
        f" ({100 * trained / count:.2g} %)"
    )


def measure_plan(run: Trainer) -> MeasuredPlan | None:
    """The measures of the first plan; None for a stream."""
    if run.feed.plan is None:
        return None
    share = padded_share(run.corpus.train.lengths, PADDED_BATCH_SIZE, run.config.train.seed)
    return MeasuredPlan(report(run.feed.plan, run.mesh.data_size, run.config.parallel.sync), share)


def start_record(run: Trainer, rows: Rows, plan: MeasuredPlan | None) -> dict[str, Any]:
    """The record of a process's start in history.jsonl, with the rows of `header_rows`."""
    return {
        "step": run.step,
        "steps": run.steps,
        "world_size": run.world.size,
        "parallel": run.config.parallel.text(run.world.size),
        "run": rows,
        "plan": plan.rows(run) if plan else [],
        "padded_share": plan.padded_share if plan else None,
        "padded_batch_size": PADDED_BATCH_SIZE,
        "notes": [note for note in run.notes if not isinstance(note, Detail)],
        "details": [note for note in run.notes if isinstance(note, Detail)],
        "left_out": [f"{name}: {text}" for name, text in corpus_notes(run.corpus)],
    }


def plan_rows(run: Trainer, plan: MeasuredPlan | None) -> Rows:
    """The report of the plan, packs of a step, and documents that were cut or skipped."""
    feed, config, corpus, ranks = run.feed, run.config, run.corpus, run.mesh.data_size
    if feed.plan is None or plan is None:
        ends = f"those of {corpus.description}; the run ends with them, or after {run.steps:,} steps"
        ahead = f"{config.plan.window} steps, as soon as the documents that fill them are there"
        rows = [("documents", ends), ("planned ahead", ahead)]
    else:
        from multipack.planning.advice import advise

        rows = plan.rows(run, advise(feed.plan, plan.report))
    rank = "rank" if ranks == run.world.size else "data-parallel rank"
    step = (
        f"{counted(config.plan.packs_per_step, 'packs')} of at most {config.plan.capacity:,} tokens,"
        f" {feed.micro_batches} per"
        f" {rank}, one micro-batch each"
    )
    held = (
        f"{counted(len(corpus.validation), 'documents')}, {counted(corpus.validation.num_tokens, 'tokens')}"
    )
    held += f": {corpus.validation_files}" if corpus.validation_files else ""
    return [*rows, ("step", step), ("validation", held), *corpus_notes(corpus)]


def _left_out(corpus: Corpus) -> tuple[Rows, list[str]]:
    """Kind of documents → what became of those that were too long; and texts on skipped documents."""
    arriving = corpus.arriving
    train_fit, skipped = corpus.train_fit, corpus.skipped
    if arriving is not None:
        train_fit, skipped = arriving.fit, [*arriving.noted.lines(), *skipped]
    fits = [("training", train_fit), ("validation", corpus.validation_fit)]
    return [(kind, fit.describe()) for kind, fit in fits if fit.describe()], skipped


def corpus_notes(corpus: Corpus) -> Rows:
    """Rows on documents that were cut, dropped or skipped; of a stream only the documents so far."""
    too_long, skipped = _left_out(corpus)
    rows = [(f"too long, {kind}", text) for kind, text in too_long]
    rows += [(f"mixture, {share.name}", share.describe()) for share in corpus.mixture]
    return rows + [("skipped", line) for line in skipped]


def _comparison_rows(found: Comparison) -> Rows:
    return [
        ("packed", f"{found.packed_tokens_per_second:,.0f} tokens/s"),
        (
            "padded",
            f"{found.padded_tokens_per_second:,.0f} tokens/s (random batches of {found.batch_size},"
            f" {100 / found.pad_factor:.1f} % of the slots hold tokens)",
        ),
        ("packed / padded", f"{found.ratio:.2f} x (over {found.steps} pairs of steps)"),
        ("pad factor", f"{found.pad_factor:.2f} (slots that padding computes per token)"),
    ]
